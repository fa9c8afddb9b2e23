# shellcheck shell=bash disable=SC2016,SC2034,SC2154,SC2329
# Requeue: the job goes back into Slurm's queue, without the bad nodes.

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
