# shellcheck shell=bash disable=SC2016,SC2034,SC2154,SC2329
# Check: a node that cannot do its part says why.

check_node() {
  set -euo pipefail
  local here=${SLURMD_NODENAME:-$HOSTNAME}
  # A small limit on locked memory fails late, inside NCCL or RCCL.
  if [ "$gpus" -gt 0 ] && [ "$needed" -gt 1 ] && ! ulimit -l unlimited 2>/dev/null; then
    echo "fsdpplan: $here: only $(ulimit -l) kB may be locked; InfiniBand may fail: raise memlock" \
      "in limits.conf" >&2
  fi
  if [[ -n ${FSDPPLAN_JOB_FOLDER:-} && ${program[0]:-} == "$FSDPPLAN_JOB_FOLDER"/* ]]; then
    [ -r "${program[0]}" ] ||
      refuse "$here: $FSDPPLAN_JOB_FOLDER cannot be read here: put the job folder where every" \
        "node sees it"
  fi
  [ "${python[0]}" != apptainer ] || command -v apptainer >/dev/null ||
    refuse "$here: apptainer is not on PATH: load its module by --env-setup, or install it"
  # What is looked for is in node_check.py; several nodes meet in it.
  "${python[@]}" "${node_check[@]}" \
    "$here" "$fsdpplan_version" "$gpus" "${FSDPPLAN_HEAD:-}" "${FSDPPLAN_HOSTS:-}" "${assumed[@]}"
}
