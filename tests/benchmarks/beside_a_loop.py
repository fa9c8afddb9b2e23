"""The trainer beside a hand-written FSDP2 loop: the same model, text and layout, on CPU processes.

    python tests/benchmarks/beside_a_loop.py            # medians of five interleaved pairs

Both train the reference decoder by `fully_shard` of each block, AdamW and clipping, on the bytes of
a text. The loop is what a person writes in an afternoon: it saves nothing, watches nothing, and
reads its text as bytes. Each is run for few and for many steps, and only the difference counts:
neither start-up nor set-up. What the trainer adds to a step is the ratio. A benchmark, not a test:
nothing here asserts.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

MODEL = {
    "layers": 4,
    "hidden": 256,
    "ffn_hidden": 768,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 64,
    "vocab": 257,
    "max_positions": 256,
    "qk_norm": False,
}
SEQ_LEN, MICRO_BATCH, PEAK, CLIP = 256, 2, 3e-4, 1.0
TEXT_BYTES = 4 << 20


def loop(plan_file: Path, text_file: Path, steps: int) -> None:
    """The hand-written one; what torchrun starts."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.functional import cross_entropy

    from fsdpplan.trainer.config import load_plan
    from fsdpplan.trainer.model.decoder import Decoder

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Decoder(load_plan(str(plan_file)).model)
    for block in model.layers.values():
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.55 + 0.45 * math.cos(math.pi * step / steps)
    )
    size = text_file.stat().st_size
    text = torch.from_file(str(text_file), shared=False, size=size, dtype=torch.uint8)
    windows = torch.randperm((size - 1) // SEQ_LEN)
    for step in range(steps):
        first = (step * ranks + rank) * MICRO_BATCH
        own = [int(windows[n % len(windows)]) * SEQ_LEN for n in range(first, first + MICRO_BATCH)]
        tokens = torch.stack([text[start : start + SEQ_LEN + 1] for start in own]).long()
        logits = model(tokens[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step + 1} loss {mean.item() / ranks:.4f}", flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an orderly exit


def spent(command: list[str]) -> tuple[float, float]:
    """(CPU seconds, wall seconds) of a command and all that it starts."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        sys.exit("\n".join(said) or done.stderr[-2000:])
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def write_text(path: Path) -> None:
    """Lines of words, the same each time."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 9))) for _ in range(3000)]
    with path.open("w", encoding="ascii") as file:
        while file.tell() < TEXT_BYTES:
            file.write(" ".join(draw.choices(words, k=12)) + "\n")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--pairs", type=int, default=5, help="of both, one after the other")
    parser.add_argument("--processes", type=int, default=2, help="ranks of FSDP")
    parser.add_argument("--few", type=int, default=10, help="steps that do not count")
    parser.add_argument("--many", type=int, default=70, help="steps of the longer run")
    parser.add_argument("--loop", nargs=3, metavar=("PLAN", "TEXT", "STEPS"), help="internal")
    return parser.parse_args()


def main() -> None:
    """Run both in turn, and print the medians of their ratios."""
    options = parse()
    if options.loop:
        plan, text, steps = options.loop
        loop(Path(plan), Path(text), int(steps))
    from tests.trainer.plans import plan_text

    with tempfile.TemporaryDirectory(prefix="fsdpplan-") as name:
        folder = Path(name)
        plan, text = folder / "plan.json", folder / "text.txt"
        plan.write_text(
            plan_text(
                model=MODEL,
                training={"seq_len": SEQ_LEN},
                micro_batch=MICRO_BATCH,
                dp_shard=options.processes,
            )
        )
        write_text(text)
        run = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={options.processes}",
        ]
        torchrun = [sys.executable, *run]

        def ours(steps: int) -> list[str]:
            words = ["--plan", str(plan), "--data", str(text), "--steps", str(steps)]
            metrics = ["--metrics", str(folder / "metrics.jsonl")]
            return [*torchrun, "-m", "fsdpplan.trainer", *words, *metrics, "--no-numbers"]

        def theirs(steps: int) -> list[str]:
            return [*torchrun, __file__, "--loop", str(plan), str(text), str(steps)]

        ratios: list[tuple[float, float]] = []
        for pair in range(options.pairs):
            seconds = []
            for command in (ours, theirs) if pair % 2 else (theirs, ours):
                few, many = spent(command(options.few)), spent(command(options.many))
                seconds.append((many[0] - few[0], many[1] - few[1]))
            mine, other = seconds if pair % 2 else seconds[::-1]
            ratios.append((mine[0] / other[0], mine[1] / other[1]))
            print(
                json.dumps({"pair": pair, "cpu": ratios[-1][0], "wall": ratios[-1][1]}), flush=True
            )
    cpu, wall = (median(each) for each in zip(*ratios, strict=True))
    print(f"trainer / loop, medians of {len(ratios)} pairs: CPU {cpu:.3f}, wall {wall:.3f}")


if __name__ == "__main__":
    main()
