#!/usr/bin/env bash
# All that needs a GPU, within ten minutes: what the machine is, its profile, training steps beside
# their predictions, and the tests. README.md beside this says what it leaves in $OUT.
#
#   tests/gpu/session.sh [--device cpu] [host] [calibrate] [steps] [rank] [kernels] [tests]
#
# All of them by default, in that order: the host, its profile, training steps beside predictions, one
# rank of a large plan, the kernels of a step, the tests.
#
# With --device cpu a tiny model goes the same way on one CPU process, in a minute: what the script
# does is tried without a GPU, and the tests that need one say so.
#
# From the environment: OUT, a folder for the results (a new one); PYTHON, the one that has torch
# (python3); WHEELS, a folder of wheels that it lacks (.whl); LIMIT, seconds for everything (570; 330
# leaves a second try on a machine that is lent for ten minutes);
# MEASURED, the profile that predicts (what calibrate writes); CALIBRATE and CASES, more words for
# fsdpplan calibrate and for single_gpu.py.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit

device=cuda
if [[ ${1-} == --device ]]; then
  device=${2-}
  shift 2
fi
case $device in
  cuda)
    calibrate_seconds=60 calibrate_device=() case_device=(--checkpointing "none,full")
    ;;
  cpu)
    calibrate_seconds=5 calibrate_device=(--hardware cpu --processes 1)
    case_device=(--models tests/gpu/tiny/config.json:2 --kernels eager --checkpointing none
      --precision fp32 --seq-len 64 --steps 6)
    ;;
  *)
    echo "session: --device must be cuda or cpu, not '$device'" >&2
    exit 2
    ;;
esac

out=${OUT:-$(mktemp -d)} python=${PYTHON:-python3} wheels=${WHEELS:-.whl} limit=${LIMIT:-570}
parts=" ${*:-host calibrate steps rank kernels tests} "
mkdir -p "$out" || exit
out=$(cd "$out" && pwd)
read -ra calibrate_words <<<"${CALIBRATE:-}"
read -ra case_words <<<"${CASES:-}"
measured=${MEASURED:-$out/measured.toml}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
worst=0

say() { echo "session: $* (after ${SECONDS} s)"; }

# wants PART: whether it was asked for.
wants() { [[ $parts == *" $1 "* ]]; }

# run NAME SECONDS COMMAND...: for so long at most, and not past the limit.
run() {
  local name=$1 seconds=$2 left=$((limit - SECONDS)) code=0
  shift 2
  ((seconds < left)) || seconds=$left
  if ((seconds < 10)); then
    code=124
  else
    timeout --signal=INT --kill-after=20 "$seconds" "$@" || code=$?
  fi
  ((code == 0)) || worst=1
  say "$name ended with $code"
}

use_wheels() {
  local found
  shopt -s nullglob
  found=("$wheels"/*.whl)
  ((${#found[@]} == 0)) || "$python" -m pip install --quiet --no-index --no-deps --no-compile \
    --no-cache-dir --target "$site" "${found[@]}" || exit
  export PYTHONPATH="$site:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
}

main() {
  local seconds later=0 part
  use_wheels
  "$python" -c 'import torch; print("torch", torch.__version__, torch.cuda.is_available())' || exit
  if wants host; then
    run detect 60 "$python" -m fsdpplan detect --record "$out/host.json"
  fi
  if wants calibrate; then
    run calibrate 120 "$python" -m fsdpplan calibrate --seconds "$calibrate_seconds" \
      --save "$out/measured.toml" "${calibrate_device[@]}" "${calibrate_words[@]}"
  fi
  if wants steps; then
    ! wants tests || later=$((limit / 4))
    for part in rank kernels; do ! wants $part || later=$((later + limit / 8)); done
    # The benchmark ends itself in its budget; the other seconds are for its last case to end.
    seconds=$((limit - SECONDS - later))
    run steps "$seconds" "$python" tests/benchmarks/single_gpu.py --hardware "$measured" \
      --out "$site/table.md" --json "$out/steps.jsonl" --runs "$out/steps.csv" \
      --budget-seconds $((seconds - seconds / 5)) "${case_device[@]}" "${case_words[@]}"
  fi
  for part in rank kernels; do
    # With the allocator as the job script sets it, by its name of either torch.
    ! wants $part || run $part $((limit / 4)) env PYTORCH_ALLOC_CONF=expandable_segments:True \
      PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "$python" tests/benchmarks/on_device.py \
      $part --device "$device" --out "$out/device.jsonl"
  done
  if wants tests; then
    # Warnings are of that machine's packages, which the project does not pin.
    run tests 300 "$python" -m pytest tests/gpu -m gpu --whole -W default -p no:cacheprovider -rs
  fi
  say "results in $out"
  exit "$worst"
}

main 2>&1 | tee "$out/session.log"
exit "${PIPESTATUS[0]}"
