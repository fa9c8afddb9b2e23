# shellcheck shell=bash disable=SC2016,SC2034,SC2154,SC2329
# Nodes: the first good nodes are used, bad ones are named.

# blame NODE WHY: the node is not used again.
blame() {
  echo "fsdpplan: $1: $2" >&2
  add_line bad-nodes "$1"$'\t'"$2"
  bad+=$'\n'$1
}

read_bad() {
  bad=$({ printf '%s\n' "$bad"; cut -f1 "$FSDPPLAN_RUN_FOLDER/bad-nodes" 2>/dev/null || true; } |
    sort -u | sed '/^$/d')
}

is_bad() { case $'\n'$bad$'\n' in *$'\n'$1$'\n'*) ;; *) return 1 ;; esac; }

# The first good nodes of the allocation, as many as are needed.
choose() {
  local host
  chosen=()
  read_bad
  for host in $hosts; do
    if [ "${#chosen[@]}" -lt "$needed" ] && ! is_bad "$host"; then chosen+=("$host"); fi
  done
  [ "${#chosen[@]}" = "$needed" ]
}

with_commas() { local IFS=,; echo "$*"; }

# One task a node, whatever the allocation says. --overlap --mem=0: a step that a dead node broke,
# and an interactive shell, keep their cores and memory. When a node fails in a job of --no-kill,
# Slurm never gives back those of the step that it broke (seen: 22.05).
use_chosen() {
  step=(srun --nodes="$needed" --ntasks="$needed" --ntasks-per-node=1
    --nodelist="$(with_commas "${chosen[@]}")" --cpus-per-task="$cores" --export=ALL
    --overlap --mem=0)
}

# Blames those of the chosen nodes that Slurm has taken from the job, or on which nothing starts.
name_silent_nodes() {
  local node left answers asked=()
  left=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%N 2>/dev/null) || true
  [ -z "$left" ] || left=$(scontrol show hostnames "$left")
  for node in "${chosen[@]}"; do
    case $'\n'$left$'\n' in
      *$'\n'$node$'\n'* | $'\n\n') asked+=("$node") ;;
      *) blame "$node" "failed, says Slurm" ;;
    esac
  done
  # A node alone is the one that this shell is on.
  [ "$needed" -gt 1 ] && [ "${#asked[@]}" -gt 0 ] || return 0
  answers=$(timeout --kill-after=30 60 srun --nodes="${#asked[@]}" --ntasks="${#asked[@]}" \
    --ntasks-per-node=1 --nodelist="$(with_commas "${asked[@]}")" --overlap --mem=0 --no-kill \
    --kill-on-bad-exit=0 bash -c 'echo "$SLURMD_NODENAME"' 2>/dev/null </dev/null || true)
  # Without any answer, it is not the nodes that fail.
  [ -n "$answers" ] || return 0
  for node in "${asked[@]}"; do
    case $'\n'$answers$'\n' in
      *$'\n'$node$'\n'*) ;;
      *) blame "$node" "does not answer" ;;
    esac
  done
}
