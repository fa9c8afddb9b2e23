# shellcheck shell=bash disable=SC2016,SC2034,SC2154,SC2329
# Left over: ranks whose torchrun was killed are ended.

# end_left_ranks MARK: MARK stands in the environment of those that are meant, who are to save and
# leave, or are ended. They have sessions of their own, would train on unseen, and hold the output of the task, which
# Slurm takes for running as long as they do (seen: 22.05).
end_left_ranks() {
  local files file number tries=0
  while [ "$tries" -lt 40 ]; do
    files=$(grep -lzsxF "$1" /proc/[0-9]*/environ) || break
    for file in $files; do
      file=${file#/proc/} number=$((tries < 30 ? 15 : 9))
      kill -"$number" "${file%%/*}" 2>/dev/null || true
    done
    tries=$((tries + 1))
    sleep 1
  done
}
