# shellcheck shell=bash disable=SC2016,SC2034,SC2154,SC2329
# Here: without Slurm, ranks on this host are told to save and leave.

# torchrun gives each rank a session of its own: they are found by their parent.
signal_ranks() {
  local stat fields parent
  for stat in /proc/[0-9]*/stat; do
    read -r fields 2>/dev/null <"$stat" || continue
    read -r _ parent _ <<<"${fields##*) }"
    [ "$parent" != "$job" ] || kill -USR1 "${fields%% *}" 2>/dev/null || true
  done
}
