# shellcheck shell=bash disable=SC2016,SC2034,SC2154,SC2329
# Signals: USR1 (save and leave) goes on to the ranks, an end to all.

job='' passed_on='' stopped='' told=''
pass_usr1() { passed_on=1 told=1; signal_ranks; }
stop() { passed_on=1 stopped=$1; end_job; leaving; }
# Others say below how ranks are told, what is noted before an end, and what is done after one.
signal_ranks() { :; }
told_before() { :; }
leaving() { :; }
followed() { :; }
leave_limit() { :; }
is_near_limit() { false; }
end_job() { [ -z "$job" ] || kill -TERM "$job" 2>/dev/null || true; }
trap pass_usr1 USR1
trap 'stop 130' INT
trap 'stop 143' TERM

# Waits for a process; its exit code is then in `code`. A signal interrupts wait: wait again for it.
await() {
  while :; do
    passed_on='' code=0
    wait "$1" || code=$?
    [ -n "$passed_on" ] || break
  done
}

# Waits for what was started last; its exit code is then in `code`.
follow() {
  job=$!
  [ -z "$stopped" ] || end_job
  [ -z "$told" ] || told_before
  await "$job"
  job=''
  leave_limit
  followed
}
