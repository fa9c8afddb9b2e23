"""What a batch script of Slurm does when its ranks have ended: end, start again, or requeue. Bash.

Fact it rests on, tried on Slurm 22.05: only a job that waits can be told which nodes it must not
get (ExcNodeList), so the script ignores the TERM of its own requeue, and lives on for KillWait
seconds to say so.
"""

from __future__ import annotations

DECISIONS = r"""
# job_says KEY: what Slurm says of this job. Its own name, on the first line, may look like any key.
job_says() {
  scontrol show job "$SLURM_JOB_ID" 2>/dev/null |
    sed -n "/^JobId=/d; s/^\(.* \)*$1=\([^ ]*\).*/\2/p" | head -n 1 || true
}

give_up() {
  note_end end "$1" true
  echo "fsdpplan: $1" >&2
  [ "$code" != 0 ] || code=1
  exit "$code"
}

# requeue WHY: back into the queue, without the bad nodes. This shell lives on for a while: only a
# job that waits can be told which nodes it must not get.
requeue() {
  local said all left list without=$bad
  list=$(job_says ExcNodeList)
  [ "$list" != '(null)' ] || list=''
  if [ -n "$bad" ]; then
    [ -z "$list" ] || without+=$'\n'$(scontrol show hostnames "$list")
    all=$(sinfo --noheader --Node --partition="${SLURM_JOB_PARTITION:-}" --format=%N 2>/dev/null |
      sort -u || true)
    left=$(grep -cvxF -e "$without" <<<"$all" || true)
    if [ -n "$all" ] && [ "$left" -lt $((needed + spares)) ]; then
      give_up "$1, and the partition has only $left nodes without $(paste -sd, <<<"$without")"
    fi
  fi
  leave_if_ended
  trap '' TERM
  if ! said=$(scontrol requeue "$SLURM_JOB_ID" 2>&1); then
    give_up "$1, and Slurm does not requeue the job (${said%%$'\n'*})"
  fi
  note_end requeue "$1" true
  echo "fsdpplan: $1: the job goes back into the queue" >&2
  if [ -n "$bad" ]; then
    scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="${list:+$list,}$(paste -sd, <<<"$bad")" ||
      echo "fsdpplan: Slurm may give it the same nodes again" >&2
  fi
  exit 0
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

# Whether the newest checkpoint is one of a run that has not come to its last step.
is_unfinished() {
  local text step steps
  text=$(cat "$saves_to/$(newest)/trainer.json" 2>/dev/null) || return 1
  step=$(field step "$text") steps=$(field steps "$text")
  [ -n "$step" ] && [ -n "$steps" ] && [ "$step" -lt "$steps" ]
}

is_near_limit() {
  local limit
  limit=$(date --date="$(job_says EndTime)" +%s 2>/dev/null) || return 1
  [ $((limit - $(date +%s))) -lt "$limit_seconds" ]
}

# The program was told to save and leave, and did.
after_usr1() {
  if is_unfinished && [ -n "$may_requeue" ] && is_near_limit; then
    [ -n "$saved" ] || used=$((used + 1))
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

# Notes the end before Slurm makes it. A job that is cancelled ends; one it requeues comes back.
leaving() {
  local next=end restarts
  [ -n "${started:-}" ] || return 0
  restarts=$(job_says Restarts)
  if [ "${restarts:-0}" -gt "${SLURM_RESTART_COUNT:-0}" ]; then next=requeue; fi
  code=$stopped
  note_end "$next" "ended by a signal"
}

# Slurm may have ended the job, and not told this shell yet.
leave_if_ended() {
  case "$(job_says JobState)" in
    RUNNING | RESIZING | SIGNALING | '') ;;
    *) [ -n "$stopped" ] || stop 143 ;;
  esac
  [ -z "$stopped" ] || exit "$stopped"
}

after_attempt() {
  local why fresh
  [ -z "$stopped" ] || exit "$stopped"
  saved=''
  [ "$(newest)" = "$started_from" ] || saved=yes
  if [ "$code" = 0 ]; then
    [ -z "$told" ] || after_usr1
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
"""


def decision_functions() -> list[str]:
    """Lines of the functions by which a job lives; `live` begins.

    It calls two that stand elsewhere: `meet` says where the chosen nodes meet, `run_attempt` checks
    them, starts the ranks and leaves their exit code in `code`.
    """
    return DECISIONS.strip().split("\n")
