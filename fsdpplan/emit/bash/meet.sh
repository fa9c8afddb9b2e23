# shellcheck shell=bash disable=SC2016,SC2034,SC2154,SC2329
# Meeting: the first host of a start carries the rendezvous.

# A port per job keeps two jobs on one host apart (below the ports that Linux hands out itself), a
# port per attempt those that hang on.
meet() {
  FSDPPLAN_HEAD=${chosen[0]}
  FSDPPLAN_HOSTS=$(with_commas "${chosen[@]}")
  FSDPPLAN_PORT=${port:-$((20000 + (SLURM_JOB_ID + 1000 * (attempt - 1)) % 10000))}
  FSDPPLAN_RUN="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}.$attempt"
  # Where each node unpacks an image first, at its own pace.
  [ "$join_seconds" -le 60 ] || export FSDPPLAN_JOIN_SECONDS=$join_seconds
  export FSDPPLAN_HEAD FSDPPLAN_HOSTS FSDPPLAN_PORT FSDPPLAN_RUN
}
