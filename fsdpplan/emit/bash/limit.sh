# shellcheck shell=bash disable=SC2016,SC2034,SC2154,SC2329
# Limit: the program saves before the time limit, and the job comes back.

# Whether the newest checkpoint is one of a run that has not come to its last step.
is_unfinished() {
  local text step steps
  text=$(cat "$saves_to/$(newest)/trainer.json" 2>/dev/null) || return 1
  step=$(field step "$text") steps=$(field steps "$text")
  [ -n "$step" ] && [ -n "$steps" ] && [ "$step" -lt "$steps" ]
}

# Seconds that the run takes to leave, as its metrics have it: steps until it has heard, an
# evaluation, the save under way and the last one, and a margin. A save is as planned until one was
# measured. The first step of a start also compiles.
measured_seconds() {
  tail -n 1000 "${FSDPPLAN_METRICS:-/}" 2>/dev/null | awk -v steps="$steps_to_leave" \
    -v margin="$margin_seconds" -v planned="$save_seconds" '
    function seconds_of(key, found) {
      if (!match($0, "\"" key "\": [0-9.e+-]+")) return 0
      found = substr($0, RSTART, RLENGTH)
      sub(/.*: /, "", found)
      return found + 0
    }
    function slowest(one, other) { return one > other ? one : other }
    /"event": "start"/ { first = 1 }
    /"event": "step"/ { if (!first) step = slowest(step, seconds_of("step_seconds")); first = 0 }
    /"event": "eval"/ { judged = slowest(judged, seconds_of("seconds")) }
    /"event": "checkpoint"/ { save = slowest(save, seconds_of("seconds")) }
    END {
      if (!save) save = planned
      under_way = save > step ? save - step : 0
      if (step) printf "%d", steps * step + judged + save + under_way + margin + 1
    }' || true
}

# How long before the limit the program is told: as planned, or earlier where it measured more.
seconds_to_leave() {
  local measured
  measured=$(measured_seconds)
  if [ "${measured:-0}" -gt "$signal_seconds" ]; then echo "$measured"; else echo "$signal_seconds"; fi
}

seconds_left() {
  local limit
  limit=$(date --date="$(job_says EndTime)" +%s 2>/dev/null) && echo $((limit - $(date +%s)))
}

# Slurm's own signal may come 60 seconds earlier than asked (sbatch(1), --signal), and a look takes
# a while.
is_near_limit() {
  local left
  left=$(seconds_left) || return 1
  [ "$left" -lt $(($(seconds_to_leave) + 90)) ]
}

# Tells the program in time, and again until it has left: Slurm tells it once, when ranks may still
# be starting, and knows nothing of what was measured. Like what watches NCCL, it stays until this
# shell ends it.
watch_limit() {
  local left end naps=0
  [ -n "$saves_to" ] && left=$(seconds_left) || return 0
  end=$(($(date +%s) + left))
  (
    nap='' over=''
    trap 'over=yes; [ -z "$nap" ] || kill "$nap" 2>/dev/null || true' TERM
    while [ -z "$over" ] && kill -0 $$ 2>/dev/null; do
      sleep 15 >/dev/null 2>&1 &
      nap=$!
      [ -z "$over" ] || kill "$nap" 2>/dev/null || true
      wait "$nap" || true
      nap='' naps=$((naps + 1)) left=$((end - $(date +%s)))
      # An operator may change it.
      if [ $((naps % 20)) = 0 ] || [ "$left" -le "$(seconds_to_leave)" ]; then
        left=$(seconds_left) || continue
        end=$(($(date +%s) + left))
      fi
      if [ -z "$over" ] && [ "$left" -le "$(seconds_to_leave)" ]; then
        kill -USR1 $$ 2>/dev/null || true
      fi
    done
  ) &
  limit_watcher=$!
}

leave_limit() {
  [ -n "${limit_watcher:-}" ] || return 0
  local code
  kill "$limit_watcher" 2>/dev/null || true
  await "$limit_watcher" 2>/dev/null
  limit_watcher=''
}

# The program was told to save and leave, and did.
after_usr1() {
  if is_unfinished && [ -n "$may_requeue" ] && is_near_limit; then
    [ -n "${saved:-}" ] || used=$((used + 1))
    [ "$used" -le "$retries" ] || give_up "the time limit came again before anything was saved"
    requeue "saved before the time limit"
  fi
  if ! is_unfinished; then
    note_end end ''
    exit 0
  fi
  note_end end "told to save and leave"
  echo "fsdpplan: left at $(newest), as it was told: sbatch goes on from there" >&2
  exit 0
}
