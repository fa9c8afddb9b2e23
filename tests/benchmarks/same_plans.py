"""Whether two versions give the same plans, to the bit.

    python tests/benchmarks/same_plans.py FOLDER     # writes what FOLDER lacks, compares the rest

Run it with one version (`PYTHONPATH` says which), then with the other one and the same folder: the
second run names each question whose answer differs. A plan that came to say more is the same plan.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

QUESTIONS = """\
recommend --params 70e9 --gpus 64
recommend --params 7b --gpus 16
recommend --params 13b --gpus 32 --hardware dgx-a100-80g-hdr
recommend --params 1b --gpus 8
recommend --params 100b --active-params 10b --gpus 128
recommend --model llama-3.1-8b --gpus 1
recommend --model llama-3.1-8b --gpus 8
recommend --model llama-3.1-8b --gpus 32 --hardware p5-48xlarge --seq-len 8192
recommend --model llama-3.1-8b --gpus 8 --hardware pcie-8xl40s --seq-len 16384 --global-batch 16
recommend --model llama-3.1-8b --gpus 64 --seq-len 128k
recommend --model llama-3.1-70b --gpus 128 --precision fp8
recommend --model llama-3.1-70b --gpus 256 --hardware dgx-b200
recommend --model llama-3.1-70b --gpus 72 --hardware gb200-nvl72
recommend --model llama-3.1-70b --gpus 64 --hardware hgx-h800-ndr
recommend --model llama-3.1-405b --gpus 1024
recommend --model llama-3.1-405b --gpus 16384
recommend --model llama-3.1-405b --gpus 512 --runtime megatron
recommend --model llama-2-7b --gpus 8 --hardware dgx-1v-32g --precision fp16
recommend --model llama-2-13b --gpus 64 --hardware p4d-24xlarge
recommend --model llama-2-70b --gpus 8
recommend --model llama-2-70b --gpus 8 --offload cpu
recommend --model llama-2-70b --gpus 128 --runtime megatron
recommend --model llama-2-70b --gpus 64 --runtime megatron_deepspeed
recommend --model mixtral-8x7b --gpus 64
recommend --model mixtral-8x22b --gpus 128 --runtime megatron
recommend --model qwen3-30b-a3b --gpus 16
recommend --model qwen3-235b-a22b --gpus 256
recommend --model qwen2.5-32b --gpus 32 --optimizer muon
recommend --model qwen2.5-14b --gpus 16 --optimizer adamw_8bit
recommend --model qwen3-4b --gpus 32 --hardware cpu
recommend --model deepseek-v2-lite --gpus 16
recommend --model deepseek-v3 --gpus 2048 --hardware hgx-h800-ndr
recommend --model gpt-oss-20b --gpus 8
recommend --model gpt-oss-120b --gpus 64
recommend --model gemma-3-4b --gpus 8 --hardware pcie-8xrtx4090
recommend --model gemma-2-27b --gpus 32
recommend --model gemma-3-27b --gpus 16 --seq-len 32768
recommend --model olmo-2-13b --gpus 32
recommend --model phi-4 --gpus 8
recommend --model starcoder2-7b --gpus 8 --hardware gcp-g2-standard-96
recommend --model falcon-40b --gpus 64
recommend --model gpt3-175b --gpus 1024 --hardware dgx-a100-80g-hdr --runtime megatron
recommend --model megatron-1t --gpus 3072 --hardware dgx-a100-80g-hdr --seq-len 2048
recommend --model bloom-176b --gpus 384 --hardware dgx-a100-80g-hdr --seq-len 2048
recommend --model gpt2-xl --gpus 4 --global-batch 64 --seq-len 1024
recommend --model pythia-12b --gpus 16 --torch 2.9
recommend --model mpt-30b --gpus 32 --hardware azure-nd-mi300x-v5
recommend --model nemotron-4-340b --gpus 512
recommend --model llama-3.3-70b --gpus 64 --tp 8
recommend --model llama-3.3-70b --gpus 64 --pp 4 --schedule zero_bubble
recommend --model llama-3.3-70b --gpus 64 --activation-checkpointing none --tokens 2T
recommend --model llama-3.3-70b --gpus 48 --global-batch 720 --inter-bw 200Gb/s
recommend --model llama-3.2-3b --gpus 8 --program own
recommend --model llama-3.2-1b --gpus 8 --program hf
recommend --model mistral-7b-v0.1 --gpus 24 --global-batch 96
recommend --model llama-3.2-3b --gpus 2 --hardware lambda-2xh100
recommend --params 7b --gpus 4 --hardware pcie-4xa100-80g-bridged
estimate --params 70e9 --gpus 64 --dp-shard 64 --activation-checkpointing full
estimate --params 70e9 --gpus 64 --dp-shard 8 --tp 8 --micro-batch 2
estimate --params 70e9 --gpus 64 --dp-shard 16 --pp 4 --schedule 1f1b --micro-batch 1 --tp 1 \
--activation-checkpointing full --reshard-after-forward always \
--gradient-sync every
estimate --params 70e9 --gpus 64 --dp-shard 8 --pp 8 --schedule interleaved_1f1b --virtual-stages 2
estimate --model llama-3.1-8b --gpus 16 --dp-replicate 2 --dp-shard 8 --loss-chunks 8
estimate --model llama-3.1-8b --gpus 16 --dp-shard 2 --cp 8 --seq-len 65536
estimate --model llama-3.2-1b --gpus 8 --dp-replicate 8 --sharding ddp --optimizer adamw_8bit
estimate --model llama-3.2-3b --gpus 8 --dp-shard 8 --sharding zero1 --runtime megatron
estimate --model mixtral-8x7b --gpus 32 --dp-shard 32 --ep 8
estimate --model llama-2-7b --gpus 8 --dp-shard 8 --offload cpu --activation-checkpointing full
estimate --model qwen3-8b --gpus 8 --dp-shard 8 --reshard-after-forward never \
--compile --loss-chunks 4
"""


def answer(question: str) -> str:
    """The plan as JSON, or the refusal of a question that has none."""
    with tempfile.TemporaryDirectory() as folder:
        asked = [*shlex.split(question), "--no-ledger", "--json"]
        told = subprocess.run(
            [sys.executable, "-m", "fsdpplan", *asked], cwd=folder, capture_output=True, text=True
        )
    return told.stdout if told.returncode == 0 else f"exit {told.returncode}\n{told.stderr}"


def is_same(before: str, after: str) -> bool:
    """Equal to the byte, but for fields that are new, splits of stages that were left open, how
    long it took, and in which module a number was fitted."""
    try:
        old, new = (_answer(json.loads(text)) for text in (before, after))
    except ValueError:
        return before == after
    return json.dumps(_as_before(old, new)) == json.dumps(old)


def _answer(plan: dict[str, Any]) -> dict[str, Any]:
    plan.pop("sources", None)
    plan.get("search", {}).pop("seconds", None)
    return plan


def _as_before(before: Any, after: Any) -> Any:
    if isinstance(before, dict) and isinstance(after, dict):
        return {
            key: []
            if key == "stage_blocks" and before[key] == []
            else _as_before(before[key], value)
            for key, value in after.items()
            if key in before
        }
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return [_as_before(*pair) for pair in zip(before, after, strict=True)]
    return after


def main() -> int:
    """Ask all questions; 1 where an answer is not the one before."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--at-once", type=int, default=2)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    questions = QUESTIONS.splitlines()
    written = same = refused = 0
    with ThreadPoolExecutor(asked.at_once) as pool:
        for question, now in zip(questions, pool.map(answer, questions), strict=True):
            path = asked.folder / f"{question.replace(' ', '_').replace('/', '-')}.json"
            refused += now.startswith("exit ")
            if not path.exists():
                path.write_text(now)
                written += 1
            elif is_same(path.read_text(), now):
                same += 1
            else:
                print(f"differs: {question}")
    print(f"{len(questions)} questions ({refused} refused): {written} written, {same} the same")
    return 0 if written + same == len(questions) else 1


if __name__ == "__main__":
    sys.exit(main())
