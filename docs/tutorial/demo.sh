#!/usr/bin/env bash
# Plan, emit and run a decoder of ten million parameters on four CPU processes that stand for two
# nodes of two GPUs. It trains on the text of this project's own documentation.
#
#   docs/tutorial/demo.sh [FOLDER]        (or: make demo)
set -euo pipefail

docs=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:-demo}
mkdir -p "$folder"
cd "$folder"
rm -f fsdpplan.json job.sbatch metrics.jsonl tokens.bin tokens.bin.json
export OMP_NUM_THREADS=1 # four processes share the cores

show() {
  printf '\n$ %s\n' "$*"
  "$@"
}

echo '1. Which layout? HSDP 2x2 is pinned: shard inside a node, replicate across.'
show fsdpplan recommend --layers 8 --hidden 320 --ffn-hidden 864 --heads 5 --kv-heads 5 --vocab 256 \
  --seq-len 128 --global-batch 16 --precision fp32 \
  --hardware cpu --gpus 4 --gpus-per-node 2 --dp-replicate 2 --dp-shard 2

printf '\n2. Something to learn: the documentation, one token a byte.\n'
find "$docs" -name '*.md' -print0 | sort -z |
  xargs -0 python -m fsdpplan.trainer.tokenize --output tokens.bin

printf '\n3. The launch script.\n'
printf '\n$ fsdpplan emit-launch --steps 40 ... > job.sbatch\n'
fsdpplan emit-launch --job-name demo --steps 40 --data tokens.bin --learning-rate 1e-3 \
  --metrics metrics.jsonl >job.sbatch
printf '%s lines; its head:\n' "$(wc -l <job.sbatch)"
sed -n 1,12p job.sbatch

printf '\n4. Run it.\n'
show fsdpplan run

printf '\n5. What it learned, from metrics.jsonl:\n'
python - metrics.jsonl <<'PYTHON'
import json
import sys

with open(sys.argv[1], encoding="utf-8") as lines:
    steps = [line for line in map(json.loads, lines) if line["event"] == "step"]
for step in steps[:: max(1, len(steps) // 6)] + steps[-1:]:
    print(f"step {step['step']:3}  loss {step['loss']:.3f}  " + "#" * round(10 * step["loss"]))
first, last = steps[0]["loss"], steps[-1]["loss"]
if last > first - 1:
    sys.exit(f"the loss did not fall: {first:.3f} -> {last:.3f}")
print(f"the loss fell from {first:.3f} to {last:.3f}")
PYTHON
