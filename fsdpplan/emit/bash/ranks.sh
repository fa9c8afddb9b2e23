# shellcheck shell=bash disable=SC2016,SC2034,SC2154,SC2329
# Ranks: each node hands over to torchrun.

# What each node is given as text: none of them reads the script.
for_nodes() {
  declare -p needed gpus fsdpplan_version join_seconds reports python program trial assumed node_check near
  declare -f refuse check_node prepare_node start_ranks say_if_head_is_gone end_left_ranks
}

# start_ranks NODES RANKS [preflight]: NODES take part, and this one starts RANKS processes.
start_ranks() {
  set -euo pipefail
  local nodes=$1 ranks=$2 here=${SLURMD_NODENAME:-$HOSTNAME} is_host=false name rendezvous start
  # torchrun's agent would die of USR1. Its workers inherit that it is ignored, and set a
  # handler of their own.
  trap '' USR1
  prepare_node
  if [ "$nodes" = 1 ]; then
    rendezvous=(--standalone --local-addr=127.0.0.1)
    # All ranks are on this host: gloo needs no other interface, and no host name.
    [ "$gpus" -gt 0 ] || export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"
  else
    # Said outright: who hosts the store, and by which name others reach it. torch numbers
    # nodes by these names as text: before the others' stands their place in Slurm's order.
    printf -v name '~%06d.%s' "${SLURM_NODEID:-0}" "$here"
    if [ "$here" = "${FSDPPLAN_HEAD:-}" ]; then is_host=true name=$here; fi
    rendezvous=(--rdzv-backend=c10d
      --rdzv-endpoint="${FSDPPLAN_HEAD:-}:${FSDPPLAN_PORT:-}" --rdzv-id="${FSDPPLAN_RUN:-}"
      --rdzv-conf="is_host=$is_host,join_timeout=$join_seconds,read_timeout=60"
      --local-addr="$name")
  fi
  # Ranks stay on the cores near their GPUs if this node can do that.
  if [ "${#near[@]}" -gt 0 ] && "${python[@]}" "${near[@]}"; then
    rendezvous+=(--numa-binding=node)
  fi
  if [ -n "$reports" ] && [ -n "${FSDPPLAN_METRICS:-}" ]; then
    program+=(--metrics="$FSDPPLAN_METRICS")
  fi
  [ "${3:-}" != preflight ] || program=("${trial[@]}")
  start=("${python[@]}" -m torch.distributed.run --nnodes="$nodes" --nproc-per-node="$ranks"
    "${rendezvous[@]}" "${program[@]}")
  # exec: signals reach torchrun itself.
  [ "$nodes" -gt 1 ] || [ -n "${SLURM_STEP_ID:-}" ] || exec "${start[@]}"
  # SLURM signals every process of a step. A node that is ended because another one failed
  # gives 1, as torchrun does: its 143 would hide the other one's code.
  trap : TERM
  local code=0 mark=FSDPPLAN_START=${SLURM_JOB_ID:-}.${SLURM_STEP_ID:-}.${SLURM_PROCID:-}
  env "$mark" "${start[@]}" || code=$?
  [ "$nodes" = 1 ] || say_if_head_is_gone
  [ "$code" = 0 ] || end_left_ranks "$mark"
  if [ "$code" = 143 ]; then code=1; fi
  return "$code"
}

# In a sentence what torchrun says in a traceback, after a minute or two: the name of the first host
# was known when the nodes met, and is not any more.
say_if_head_is_gone() {
  if [ "$code" != 0 ] && command -v getent >/dev/null &&
    ! getent hosts "$FSDPPLAN_HEAD" >/dev/null; then
    echo "fsdpplan: $here: cannot resolve $FSDPPLAN_HEAD, the first host, any more:" \
      "mend the name service or /etc/hosts, and submit again" >&2
  fi
}
