# shellcheck shell=bash disable=SC2016,SC2034,SC2154,SC2329
# Starts: the ranks start again after a bad node or a new checkpoint.

# What this job has been through: Slurm may have requeued it.
look_back() {
  local mine='' last begun=''
  attempt=${SLURM_RESTART_COUNT:-0} used=${SLURM_RESTART_COUNT:-0}
  mine=$(grep -F "\"job\": \"$job_key\"" "$FSDPPLAN_RUN_FOLDER/attempts.jsonl" 2>/dev/null) ||
    return 0
  last=${mine##*$'\n'}
  begun=$(grep -F '"event": "attempt"' <<<"$mine" | tail -n 1) || true
  attempt=$(field attempt "$last") used=$(field used "$last")
  # A full disk may have cut the line short.
  case "$attempt,$used" in
    ,* | *, | *[!0-9,]*)
      attempt=${SLURM_RESTART_COUNT:-0} used=${SLURM_RESTART_COUNT:-0}
      return
      ;;
  esac
  # Slurm itself began again: that counts where nothing was saved.
  if [ "$(field settled "$last")" != true ] &&
    [ "$(newest)" = "$(field checkpoint "$begun")" ]; then used=$((used + 1)); fi
}

# again WHY: returns to start once more on the chosen nodes, requeues, or gives up.
again() {
  if [ "$used" -ge "$retries" ]; then
    give_up "$1, and no further start is allowed (--retries)"
  fi
  used=$((used + 1))
  if choose && [ -z "$told" ]; then
    note_end retry "$1" true
    echo "fsdpplan: $1: starting again on $(with_commas "${chosen[@]}")" >&2
    return
  fi
  [ -n "$may_requeue" ] || give_up "$1, and the job may not be requeued (--no-requeue)"
  requeue "$1"
}

# Notes the end before Slurm makes it. A job that is cancelled ends; one it requeues comes back.
leaving() {
  local next=end restarts
  [ -n "${started:-}" ] || return 0
  restarts=$(job_says Restarts)
  if [ "${restarts:-0}" -gt "${SLURM_RESTART_COUNT:-0}" ]; then next=requeue; fi
  code=$stopped
  note_end "$next" "ended by a signal"
}

after_attempt() {
  local why fresh
  [ -z "$stopped" ] || exit "$stopped"
  saved=''
  [ "$(newest)" = "$started_from" ] || saved=yes
  if [ "$code" = 0 ]; then
    [ -z "$told" ] || [ -z "$saves_to" ] || after_usr1
    note_end end ''
    exit 0
  fi
  why="attempt $attempt ended with exit code $code"
  if [ -n "$told" ] && ! is_near_limit; then
    note_end end "$why after it was told to leave"
    exit "$code"
  fi
  leave_if_ended
  [ -z "$told" ] || [ -n "$trained" ] || again "told to leave before the ranks were started"
  name_silent_nodes
  leave_if_ended
  read_bad
  if [ "$bad" != "$bad_before" ]; then
    fresh=$(grep -vxF -e "$bad_before" <<<"$bad" | paste -sd,)
    again "$why; $fresh will not be used again"
  elif [ -n "$saved" ]; then
    again "$why after $(newest)"
  else
    fresh='nothing was saved since it began'
    [ "$used" -lt "$retries" ] || fresh=''
    note_end end "${fresh:-$why}"
    echo "fsdpplan: $why${fresh:+, and $fresh: it is not started again}" >&2
    exit "$code"
  fi
}

# Starts, and starts again, until an end.
live() {
  bad='' told='' saved='' code=1 chosen=()
  look_back
  started_from=$(newest)
  [ "$used" -le "$retries" ] ||
    give_up "the job came back after its last start, and no further one is allowed (--retries)"
  while :; do
    code=5
    if ! choose; then
      again "only ${#chosen[@]} of the $needed nodes that are needed are good"
      continue
    fi
    attempt=$((attempt + 1)) bad_before=$bad started_from=$(newest)
    use_chosen
    meet
    note_start
    started=yes
    run_attempt
    after_attempt
  done
}
