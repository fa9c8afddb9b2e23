"""A pytest plugin: what passed, was skipped or failed in each area, and what torch deprecates.

python -m pytest -p tests.torch_versions.record --torch-record tests/golden/torch_versions.json ...
"""

from __future__ import annotations

import collections
import json
import re
import warnings
from pathlib import Path

import pytest
import torch

WARNING = re.compile(r"^E\s+(\w*(?:Deprecation|Future)Warning: .+)$", re.M)

AREAS: dict[str, tuple[str, ...]] = {
    "losses of FSDP2, HSDP and DDP": (
        "trainer/test_losses",
        "trainer/test_step",
        "trainer/test_clip",
    ),
    "tensor and context parallelism": (
        "trainer/test_tensor_parallel",
        "trainer/test_parallel_layouts",
        "trainer/test_context_parallel",
        "trainer/test_loss.py",
    ),
    "experts": ("trainer/test_expert_parallel", "trainer/test_moe"),
    "pipelines": ("trainer/test_pipeline",),
    "axes that meet": ("trainer/test_matrix",),
    "checkpoints": ("trainer/test_checkpoint", "trainer/test_resharding", "trainer/test_kills"),
    "own models": (
        "trainer/test_user_model",
        "trainer/test_parallelize",
        "trainer/test_hugging_face",
        "trainer/test_mistakes",
    ),
    "precisions and optimizers": (
        "trainer/test_precision",
        "trainer/test_float8",
        "trainer/test_optimizer",
        "trainer/test_muon",
    ),
    "rehearsal": ("trainer/test_rehearse", "run/test_rehearse", "cli/test_rehearse"),
    "ground truth of bytes, counts and peaks": ("ground_truth/",),
    "the rest of the trainer": ("trainer/",),
}
"""Names of areas, and how their files begin, under tests; the first that fits counts."""


def area_of(path: str) -> str:
    """The area of a test file, as pytest names it; empty: none."""
    within = path.removeprefix("tests/")
    begins = ((area, start) for area, starts in AREAS.items() for start in starts)
    return next((area for area, start in begins if within.startswith(start)), "")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where to write."""
    parser.addoption("--torch-record", type=Path, default=None)


def pytest_configure(config: pytest.Config) -> None:
    """Record where it was asked for."""
    if config.getoption("--torch-record") is not None:
        config.pluginmanager.register(Recorder(config.getoption("--torch-record")))


class Recorder:
    """Counts outcomes by area, and gathers what torch warned of."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.counts: dict[str, collections.Counter[str]] = collections.defaultdict(
            collections.Counter
        )
        self.refused: collections.Counter[str] = collections.Counter()
        self.warned: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One phase of one test."""
        area = area_of(report.nodeid)
        if area and (not report.passed or report.when == "call"):
            self.counts[area][report.outcome] += 1
        if report.skipped and isinstance(report.longrepr, tuple):
            self.refused[report.longrepr[2].removeprefix("Skipped: ")] += 1
        if report.failed:
            self.warned |= {line.strip() for line in WARNING.findall(report.longreprtext)}

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage) -> None:
        """A warning that was not an error."""
        if issubclass(warning_message.category, DeprecationWarning | FutureWarning):
            where = f"{Path(warning_message.filename).name}:{warning_message.lineno}"
            self.warned.add(f"{where}: {str(warning_message.message).splitlines()[0]}")

    def pytest_sessionfinish(self) -> None:
        """Write what was found beside other releases' and other areas' results."""
        found = json.loads(self.out.read_text(encoding="utf-8")) if self.out.exists() else {}
        version = torch.__version__.split("+")[0]
        run = {**found.get(version, {}), **self.counts}
        found[version] = {area: run[area] for area in AREAS if area in run}
        ordered = dict(sorted(found.items(), key=lambda one: [int(n) for n in one[0].split(".")]))
        self.out.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say why tests were skipped, and what torch warned of."""
        for reason, count in self.refused.most_common():
            terminalreporter.line(f"skipped {count}: {reason}")
        for line in sorted(self.warned):
            terminalreporter.line(f"torch warns: {line}")
