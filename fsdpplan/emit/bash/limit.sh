# shellcheck shell=bash disable=SC2016,SC2034,SC2154,SC2329
# Limit: the program saves before the time limit, and the job comes back.

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
