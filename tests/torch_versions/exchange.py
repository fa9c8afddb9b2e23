"""Checkpoints that one torch writes and another reads: the next losses are those of the writer.

    python tests/torch_versions/exchange.py .torch/2.8.0/bin/python .venv/bin/python ...

With each Python two ranks train a tiny model under FSDP2 with AdamW, save it and go on; then each
reads what each wrote, and must lose as the writer did. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 5e-6
"""Sums in another order."""

Losses = dict[str, list[float]]


def on_ranks(python: Path, what: str, *folders: Path) -> Losses:
    """Folder -> losses, of `exchange_ranks.py` on 2 ranks."""
    program = ROOT / "tests/torch_versions/exchange_ranks.py"
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    run = subprocess.run(
        [python, *launcher, program, what, *folders],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    if run.returncode:
        raise SystemExit(f"{python} {what}: exit {run.returncode}\n{run.stderr[-3000:]}")
    losses: Losses = json.loads(run.stdout.splitlines()[-1])
    return losses


def release(python: Path) -> str:
    """The torch of a Python: 2.9.1."""
    code = "import torch; print(torch.__version__.split('+')[0])"
    asked = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return asked.stdout.strip()


def differences(pythons: dict[str, Path], top: Path) -> dict[str, dict[str, float]]:
    """Writer -> reader -> by how much the largest of their losses differ."""
    expected: Losses = {}
    for writer, python in pythons.items():
        expected |= on_ranks(python, "write", top / writer)
    pairs: dict[str, dict[str, float]] = {writer: {} for writer in pythons}
    for reader, python in pythons.items():
        found = on_ranks(python, "read", *(top / writer for writer in pythons))
        for writer in pythons:
            both = zip(found[str(top / writer)], expected[str(top / writer)], strict=True)
            pairs[writer][reader] = max(abs(read - wrote) for read, wrote in both)
    return pairs


def main() -> int:
    """Write with each, read with each; the exit code says whether all agree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python", nargs="+", type=Path)
    parser.add_argument("--json", type=Path, help="where to write the differences")
    options = parser.parse_args()
    # not resolved: a virtual environment's Python is a link to another's
    pythons = {release(path.absolute()): path.absolute() for path in options.python}
    with tempfile.TemporaryDirectory() as top:
        pairs = differences(pythons, Path(top))
    for writer, readers in pairs.items():
        for reader, off in readers.items():
            print(f"written by {writer}, read by {reader}: losses differ by {off:.1e}")
    if options.json is not None:
        options.json.write_text(json.dumps(pairs, indent=1) + "\n", encoding="utf-8")
    return int(any(off > TOLERANCE for readers in pairs.values() for off in readers.values()))


if __name__ == "__main__":
    sys.exit(main())
