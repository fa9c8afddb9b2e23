# shellcheck shell=bash disable=SC2016,SC2034,SC2154,SC2329
# Allocation: an allocation that is not the plan's is refused.

enter_allocation() {
  local has=${SLURM_JOB_NUM_NODES:-0}
  [ -z "${SLURM_ARRAY_TASK_ID:-}" ] ||
    refuse "this is a task of a job array: each would run the same plan on the same checkpoints;" \
      "submit it without --array"
  [ -z "${SLURM_HET_SIZE:-}" ] ||
    refuse "this is a heterogeneous job, and the plan is for nodes that are alike: submit it as" \
      "one component"
  [ "$has" -ge "$needed" ] && [ "$has" -le $((needed + spares)) ] ||
    refuse "the plan needs $needed node(s) of $ranks ranks, allocation $SLURM_JOB_ID has $has:" \
      "take as many, or plan again for what there is"
  hosts=${SLURM_JOB_NODELIST:-}
  if [ $((needed + spares)) -gt 1 ]; then
    if ! command -v srun >/dev/null || ! command -v scontrol >/dev/null; then
      refuse "srun and scontrol are not on PATH in allocation $SLURM_JOB_ID"
    fi
    hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
  fi
  local host
  for host in $hosts; do
    case " $excluded " in
      *" $host "*)
        refuse "allocation $SLURM_JOB_ID has $host, which this job excludes: sbatch $0 asks for" \
          "others" ;;
    esac
  done
  # What an interactive step says of its own task srun would take for ours, and it wants a task's
  # cores from one place.
  unset "${!SLURM_CPU_BIND@}" SLURM_CPUS_PER_TASK SRUN_CPUS_PER_TASK SLURM_TRES_PER_TASK
  # srun does not inherit the cores since Slurm 22.05: give each task those of the smallest node,
  # from a list such as 96(x3),48.
  cores=$(tr ',' '\n' <<<"${SLURM_JOB_CPUS_PER_NODE:-1}" | sed 's/(.*//' | sort -n | sed -n 1p)
  signal_ranks() {
    [ -z "$job" ] || kill -USR1 "$job" 2>/dev/null || true
    told_before
  }
  # The trainer may be told over and over, and ranks that are still starting hear nothing.
  told_before() {
    [ -n "$job" ] && [ -n "$saves_to" ] || return 0
    while sleep 5 && kill -USR1 "$job"; do :; done >/dev/null 2>&1 &
  }
  # An interactive shell may run this more than once in a job.
  job_key=$SLURM_JOB_ID
  if [ "${SLURM_TASK_PID:-}" != $$ ]; then job_key+=.$$; fi
  # A job that comes back knows from its folder what it has saved, wherever that is now.
  if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && [ -n "$saves_to" ] && [ ! -e "$saves_to/latest" ] &&
    [ ! -d "${SLURM_SUBMIT_DIR:-/}" ]; then
    refuse "job $SLURM_JOB_ID came back, and neither $SLURM_SUBMIT_DIR nor a checkpoint in" \
      "$saves_to is on ${SLURMD_NODENAME:-$HOSTNAME}: have their disks mounted there, or leave" \
      "the node out by --exclude, and submit it again"
  fi
  # A folder that cannot be made is no reason to end: the job goes on without what lies in it.
  if ! mkdir -p "$FSDPPLAN_RUN_FOLDER" 2>/dev/null; then
    case "${FSDPPLAN_METRICS:-}" in "$FSDPPLAN_RUN_FOLDER"/*) unset FSDPPLAN_METRICS ;; esac
  elif [ -f "$0" ] && ! cmp -s "$0" "$FSDPPLAN_RUN_FOLDER/job.sbatch"; then
    # What ran is known from the run alone; fsdpplan run has put it there.
    { cp -- "$0" "$FSDPPLAN_RUN_FOLDER/job.part" &&
      mv -- "$FSDPPLAN_RUN_FOLDER/job.part" "$FSDPPLAN_RUN_FOLDER/job.sbatch"; } 2>/dev/null || true
  fi
}
