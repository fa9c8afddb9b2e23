# shellcheck shell=bash disable=SC2016,SC2034,SC2154,SC2329
# Here: without Slurm, ranks on this host are told to save and leave.

# Ranks that are still starting have no handler and ignore the signal, as torchrun does: each is told
# when it has one.
signal_ranks() {
  [ -n "$job" ] || return 0
  keep_telling >/dev/null 2>&1 &
}
told_before() { signal_ranks; }
keep_telling() {
  local heard=' '
  while kill -0 "$job"; do
    tell_ranks
    sleep 1
  done
}

# torchrun gives each rank a session of its own: they are found by their parent.
tell_ranks() {
  local stat fields parent rank
  for stat in /proc/[0-9]*/stat; do
    read -r fields <"$stat" || continue
    read -r _ parent _ <<<"${fields##*) }"
    rank=${fields%% *}
    [ "$parent" = "$job" ] || continue
    case $heard in *" $rank "*) continue ;; esac
    catches_usr1 "$rank" || continue
    kill -USR1 "$rank" && heard+="$rank "
  done
}
catches_usr1() {
  local key mask
  while read -r key mask; do
    [ "$key" != SigCgt: ] || break
  done <"/proc/$1/status" || return 1
  [ $((0x${mask:-0} & 0x200)) != 0 ]
}
