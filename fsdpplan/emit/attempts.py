"""What a batch script of Slurm remembers of its starts, and which of its nodes are good: bash.

Facts it rests on, tried on Slurm 22.05:

* When a node fails in a job of --no-kill, Slurm takes it out of the job, and never gives back the
  cores and memory of the step that it broke: steps that come later must share them (--overlap
  --mem=0).
* srun ends a step with a dead node in it when Slurm has given that node up (SlurmdTimeout).
"""

from __future__ import annotations

from fsdpplan.emit.job import Job, Trainer, signal_seconds
from fsdpplan.emit.quoting import shell_word
from fsdpplan.spec.plan import Plan

EARLY_SECONDS = 90
"""How much earlier than asked the signal before a time limit may come, and how long a look takes.
Source: sbatch(1), --signal: up to 60 seconds earlier than specified."""


def survival_settings(*, plan: Plan, job: Job) -> list[str]:
    """Lines that say how often and where to start again."""
    folder = job.program.checkpoint_dir if isinstance(job.program, Trainer) else None
    seconds = signal_seconds(job)
    limit = 0 if seconds is None else seconds + EARLY_SECONDS
    requeue = "yes" if job.survival.requeue else "''"
    return [
        f"needed={plan.cluster.nodes} spares={job.survival.spares} "
        f"retries={job.survival.retries} may_requeue={requeue} limit_seconds={limit}",
        f"saves_to={shell_word(folder or '')}",
    ]


RECORDS = r"""
# add_line FILE TEXT: to a file of the run. One that is full or gone is no reason to end.
add_line() {
  { mkdir -p "$FSDPPLAN_RUN_FOLDER" && printf '%s\n' "$2" >>"$FSDPPLAN_RUN_FOLDER/$1"; } \
    2>/dev/null || true
}

# note EVENT FIELDS: one line of JSON.
note() {
  local begin
  printf -v begin '{"event": "%s", "job": "%s", "attempt": %d, "used": %d, ' \
    "$1" "$job_key" "$attempt" "$used"
  add_line attempts.jsonl "$begin$2}"
}

note_start() {
  local nodes fields
  printf -v nodes '"%s", ' "${chosen[@]}"
  printf -v fields '"restart": %d, "most": %d, "nodes": [%s], "checkpoint": "%s"' \
    "${SLURM_RESTART_COUNT:-0}" $((attempt + retries - used)) "${nodes%, }" "$started_from"
  note attempt "$fields"
  # Over NFS, what another node adds to a file that is there is seen at once; a new one is not.
  { : >>"$FSDPPLAN_RUN_FOLDER/bad-nodes"; } 2>/dev/null || true
}

# note_end NEXT REASON [true]: how the start ended; true where `used` counts it already.
note_end() {
  local fields
  printf -v fields '"exit_code": %d, "next": "%s", "reason": "%s", "settled": %s' \
    "$code" "$1" "${2//[\"\\]/}" "${3:-false}"
  note attempt_ended "$fields"
  started=''
}

# field NAME LINE: a number or word in a line of JSON.
field() {
  local rest=${2#*"\"$1\": "}
  [ "$rest" != "$2" ] || return 0
  rest=${rest#\"}
  printf '%s' "${rest%%[\",\}]*}"
}

# The newest whole checkpoint, or nothing.
newest() {
  local name=''
  [ -z "$saves_to" ] || read -r name 2>/dev/null <"$saves_to/latest" || true
  case "$name" in
    step-*[!0-9]*) ;;
    step-?*) printf '%s' "$name" ;;
  esac
}

# What this job has been through: Slurm may have requeued it.
look_back() {
  local mine='' last begun=''
  attempt=${SLURM_RESTART_COUNT:-0} used=${SLURM_RESTART_COUNT:-0}
  mine=$(grep -F "\"job\": \"$job_key\"" "$FSDPPLAN_RUN_FOLDER/attempts.jsonl" 2>/dev/null) ||
    return 0
  last=${mine##*$'\n'}
  begun=$(grep -F '"event": "attempt"' <<<"$mine" | tail -n 1) || true
  attempt=$(field attempt "$last") used=$(field used "$last")
  # A full disk may have cut the line short.
  case "$attempt,$used" in
    ,* | *, | *[!0-9,]*)
      attempt=${SLURM_RESTART_COUNT:-0} used=${SLURM_RESTART_COUNT:-0}
      return
      ;;
  esac
  # Slurm itself began again: that counts where nothing was saved.
  if [ "$(field settled "$last")" != true ] &&
    [ "$(newest)" = "$(field checkpoint "$begun")" ]; then used=$((used + 1)); fi
}
"""

NODES = r"""
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
# and an interactive shell, keep their cores and memory.
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
"""


def attempt_functions() -> list[str]:
    """Lines of the functions that say what happened, and which nodes are good.

    They expect `hosts`, `cores` and `job_key`, and what `survival_settings` sets.
    """
    return "\n".join((RECORDS, NODES)).strip().split("\n")
