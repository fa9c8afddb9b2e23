# shellcheck shell=bash disable=SC2016,SC2034,SC2154,SC2329
# Records: starts and ends are noted in the run's folder.

# add_line FILE TEXT: to a file of the run. One that is full or gone is no reason to end.
add_line() {
  { mkdir -p "$FSDPPLAN_RUN_FOLDER" && printf '%s\n' "$2" >>"$FSDPPLAN_RUN_FOLDER/$1"; } \
    2>/dev/null || true
}

# note EVENT FIELDS: one line of JSON.
note() {
  local begin
  printf -v begin '{"event": "%s", "job": "%s", "attempt": %d, "used": %d, ' \
    "$1" "$job_key" "$attempt" "$used"
  add_line attempts.jsonl "$begin$2}"
}

note_start() {
  local nodes fields
  printf -v nodes '"%s", ' "${chosen[@]}"
  printf -v fields '"restart": %d, "most": %d, "nodes": [%s], "checkpoint": "%s"' \
    "${SLURM_RESTART_COUNT:-0}" $((attempt + retries - used)) "${nodes%, }" "$started_from"
  note attempt "$fields"
  # Over NFS, what another node adds to a file that is there is seen at once; a new one is not.
  { : >>"$FSDPPLAN_RUN_FOLDER/bad-nodes"; } 2>/dev/null || true
  [ -z "$saves_to" ] || { : >>"$FSDPPLAN_RUN_FOLDER/saves.jsonl"; } 2>/dev/null || true
}

# note_end NEXT REASON [true]: how the start ended; true where `used` counts it already.
note_end() {
  local fields
  printf -v fields '"exit_code": %d, "next": "%s", "reason": "%s", "settled": %s' \
    "$code" "$1" "${2//[\"\\]/}" "${3:-false}"
  note attempt_ended "$fields"
  started=''
}

# field NAME LINE: a number or word in a line of JSON.
field() {
  local rest=${2#*"\"$1\": "}
  [ "$rest" != "$2" ] || return 0
  rest=${rest#\"}
  printf '%s' "${rest%%[\",\}]*}"
}

# job_says KEY: what Slurm says of this job. Its own name, on the first line, may look like any key.
job_says() {
  scontrol show job "$SLURM_JOB_ID" 2>/dev/null |
    sed -n "/^JobId=/d; s/^\(.* \)*$1=\([^ ]*\).*/\2/p" | head -n 1 || true
}

# The newest whole checkpoint, or nothing. Where its folder is not seen, the run knows.
newest() {
  local name=''
  if [ -n "$saves_to" ]; then
    read -r name 2>/dev/null <"$saves_to/latest" || true
    [ -n "$name" ] ||
      name=$(field checkpoint "$(tail -n 1 "$FSDPPLAN_RUN_FOLDER/saves.jsonl" 2>/dev/null)")
  fi
  case "$name" in
    step-*[!0-9]*) ;;
    step-?*) printf '%s' "$name" ;;
  esac
}

# give_up WHY: an end that is noted.
give_up() {
  note_end end "$1" true
  echo "fsdpplan: $1" >&2
  [ "$code" != 0 ] || code=1
  exit "$code"
}

# Slurm may have ended the job, and not told this shell yet.
leave_if_ended() {
  case "$(job_says JobState)" in
    RUNNING | RESIZING | SIGNALING | '') ;;
    *) [ -n "$stopped" ] || stop 143 ;;
  esac
  [ -z "$stopped" ] || exit "$stopped"
}
