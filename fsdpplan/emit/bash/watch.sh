# shellcheck shell=bash disable=SC2016,SC2034,SC2154,SC2329
# Watch: the job comes back if Slurm takes this script's node from it.

# With --no-kill Slurm only takes a lost node from the job, and ends the steps that it was part of: a
# job whose script is lost so would be RUNNING for ever (seen: 22.05).
requeue_without_script() {
  local said batch left
  while sleep 20; do
    said=$(squeue --noheader --jobs="$SLURM_JOB_ID" --states=RUNNING --format="%B|%N") ||
      continue
    batch=${said%%|*}
    left=$(scontrol show hostnames "${said#*|}") || continue
    if [ -n "$batch" ] && [ -n "$left" ] && ! grep -qxF "$batch" <<<"$left"; then
      scontrol requeue "$SLURM_JOB_ID" || true
    fi
  done
}

watch_script() {
  local host
  end_watcher() { [ -z "${watcher:-}" ] || kill "$watcher" 2>/dev/null || true; }
  end_watcher
  watcher=''
  trap end_watcher EXIT
  for host in $hosts; do
    if [ "$host" != "${SLURMD_NODENAME:-}" ] && ! is_bad "$host"; then
      srun --nodes=1 --ntasks=1 --nodelist="$host" --cpus-per-task=1 --overlap --mem=0 \
        --gres=none --output=none --error=none bash -c \
        "$(declare -f requeue_without_script); requeue_without_script" >/dev/null 2>&1 &
      watcher=$!
      return
    fi
  done
}
