# shellcheck shell=bash disable=SC2016,SC2034,SC2154,SC2329
# Hosts: each of the named hosts is started, and all end together.

# main WORD...: what this script was given.
main() {
  local way=""
  case "${1:-}" in
    --hung-up) way=until_hung_up; shift; set -- "$@" ;;
    --on) way=on_host; shift ;;
    -*) refuse "$1 is no option of this script: see its first lines" ;;
  esac
  local named=$#
  case "$way" in
    until_hung_up) named=$((named - 2)) ;;
    on_host) named=$((named - 1)) ;;
  esac
  [ "$named" = "$needed" ] ||
    refuse "the plan is for $needed host(s), and $((named > 0 ? named : 0)) are named:" \
      "name each one once, the first one first"
  "${way:-over_ssh}" "$@"
}

# on_host HERE HOST...: this host's part. The check calls it by the name that others use.
on_host() {
  export HOSTNAME=${1##*@}
  HEAD_NODE=${2##*@}
  NODE_RANK=''
  local here=$1 index=0 host
  shift
  for host in "$@"; do
    if [ "$host" = "$here" ]; then NODE_RANK=$index; fi
    index=$((index + 1))
  done
  [ -n "$NODE_RANK" ] || refuse "$here is none of $*: name it as the others do"
  meet
  check_node
  start_ranks
}

# Over ssh the end of the connection ends the ranks: the rest of the input says so.
until_hung_up() {
  local folder=$1 job watch code=0
  shift
  cd -- "$folder" 2>/dev/null ||
    refuse "$folder is not on $1: start from a folder that all hosts see"
  exec 3<&0
  on_host "$@" </dev/null 3<&- &
  job=$!
  # It holds the input alone: an output that is open would keep the connection.
  { cat <&3 || true; kill -TERM "$job" || true; } >/dev/null 2>&1 &
  watch=$!
  wait "$job" || code=$?
  kill "$watch" 2>/dev/null || true
  return "$code"
}

# Starts this script on every host. Its text is their input, which stays open as long as this one
# runs, however it ends.
over_ssh() {
  local host code=0 command feed pipes
  trap 'end_all; exit 130' INT
  trap 'end_all; exit 143' TERM
  pipes=$(mktemp -d)
  for host in "$@"; do
    command="bash -s -- $(printf '%q ' --hung-up "$PWD" "$host" "$@")"
    mkfifo "$pipes/input"
    ssh -o BatchMode=yes -o ServerAliveInterval=15 -- "$host" "$command" \
      <"$pipes/input" > >(label "$host") 2>&1 &
    started+=("$!")
    exec {feed}>"$pipes/input"
    rm -- "$pipes/input"
    (exec 1>&"$feed" 2>/dev/null; cat -- "$0" &)
  done
  rmdir -- "$pipes"
  for host in "$@"; do
    wait -n || { code=$?; break; }
  done
  # A host that fails ends the others.
  end_all
  return "$code"
}
started=()
end_all() { kill "${started[@]}" 2>/dev/null || true; wait "${started[@]}" || true; }
label() {
  local line
  while IFS= read -r line; do printf '%s: %s\n' "$1" "$line"; done
}
