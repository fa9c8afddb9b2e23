# shellcheck shell=bash disable=SC2016,SC2034,SC2154,SC2329
# Start: the ranks start once, without retries and requeues.

# Notes the end before Slurm makes it.
leaving() {
  [ -n "${started:-}" ] || return 0
  code=$stopped
  note_end end "ended by a signal"
}

# Starts, and ends with the exit code of the ranks.
live() {
  bad='' told='' code=5 chosen=() attempt=1 used=0 started_from=$(newest)
  choose || give_up "only ${#chosen[@]} of the $needed nodes that are needed are good"
  use_chosen
  meet
  note_start
  started=yes
  run_attempt
  [ -z "$stopped" ] || exit "$stopped"
  if [ "$code" = 0 ]; then
    [ -z "$told" ] || [ -z "$saves_to" ] || after_usr1
    note_end end ''
    exit 0
  fi
  leave_if_ended
  [ -n "$told" ] || name_silent_nodes
  leave_if_ended
  note_end end "it ended with exit code $code"
  exit "$code"
}
