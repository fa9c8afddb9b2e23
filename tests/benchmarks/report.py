"""How large a report is and how long it takes to make: bytes, and CPU seconds in this process.

python -m tests.benchmarks.report [GPUS ...]
"""

from __future__ import annotations

import json
import sys
import time

from fsdpplan.report.of_plan import plan_report
from fsdpplan.report.page import SCRIPTS, asset, page
from tests.report.plans import SIZES, plan_of


def main(sizes: list[int]) -> None:
    """Print a row for each size: the page, what of it are scripts and what drawings' data."""
    print("gpus,cpu_seconds,page_bytes,script_bytes,data_bytes,largest_chart,its_bytes")
    scripts = sum(len(asset(name).encode()) for name in SCRIPTS)
    for gpus in sizes or list(SIZES):
        plan = plan_of(gpus)
        before = time.process_time()
        report = plan_report(plan, about="fsdpplan.json")
        text = page(report)
        cpu = time.process_time() - before
        data = {one.name: len(json.dumps(one.data, separators=(",", ":"))) for one in report.charts}
        largest = max(data, key=lambda name: data[name])
        figures = (len(text.encode()), scripts, sum(data.values()), largest, data[largest])
        print(gpus, f"{cpu:.2f}", *figures, sep=",", flush=True)


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])
