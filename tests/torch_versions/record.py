"""A pytest plugin: what passed, was skipped or failed in each file, and what torch deprecates.

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

TESTS = "tests/"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where to write."""
    parser.addoption("--torch-record", type=Path, default=None)


def pytest_configure(config: pytest.Config) -> None:
    """Record where it was asked for, and whole files are run."""
    out = config.getoption("--torch-record")
    is_part = config.option.keyword or any("::" in word for word in config.args)
    if out is not None and not is_part:
        config.pluginmanager.register(Recorder(out))


class Recorder:
    """Counts outcomes by file, and gathers what torch warned of."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.counts: dict[str, collections.Counter[str]] = collections.defaultdict(
            collections.Counter
        )
        self.refused: collections.Counter[str] = collections.Counter()
        self.warned: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One phase of one test."""
        if not report.passed or report.when == "call":
            file = report.nodeid.partition("::")[0].removeprefix(TESTS).removesuffix(".py")
            self.counts[file][report.outcome] += 1
        if report.skipped and isinstance(report.longrepr, tuple):
            self.refused[report.longrepr[2].removeprefix("Skipped: ")] += 1
        if report.failed:
            self.warned |= {line.strip() for line in WARNING.findall(report.longreprtext)}

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage) -> None:
        """A warning that was not an error."""
        if issubclass(warning_message.category, DeprecationWarning | FutureWarning):
            where = Path(warning_message.filename).name
            self.warned.add(f"{where}: {str(warning_message.message).splitlines()[0]}")

    def pytest_sessionfinish(self) -> None:
        """Write what was found beside the results of other releases and other files."""
        found = json.loads(self.out.read_text(encoding="utf-8")) if self.out.exists() else {}
        version = torch.__version__.split("+")[0]
        before = found.get(version, {"files": {}, "deprecated": []})
        found[version] = {
            "files": dict(sorted({**before["files"], **self.counts}.items())),
            "deprecated": sorted({*before["deprecated"], *self.warned}),
        }
        ordered = dict(sorted(found.items(), key=lambda one: [int(n) for n in one[0].split(".")]))
        self.out.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say why tests were skipped, and what torch warned of."""
        for reason, count in self.refused.most_common():
            terminalreporter.line(f"skipped {count}: {reason}")
        for line in sorted(self.warned):
            terminalreporter.line(f"torch warns: {line}")
