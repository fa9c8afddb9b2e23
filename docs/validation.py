"""Write `docs/explanation/validation.md` and its picture, and keep what was reached.

    python docs/validation.py                      # or: make docs
    python docs/validation.py --record             # lower errors become the recorded ones
    python docs/validation.py --record --because "REASON"     # higher ones too

Predicts the published runs of `tests/golden/bench` with the profiles of this checkout; predictions
of projects that were held back come from `tests/golden/bench/held_out.json`, where it exists.
`tests/validate/test_published.py` fails when the page is stale or an error has grown.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

from scatter import Point, scatter  # noqa: E402
from validation_page import page  # noqa: E402
from validation_results import Results, record, results  # noqa: E402

from fsdpplan.validate.runs.projects import project_of  # noqa: E402

PAGE = ROOT / "docs" / "explanation" / "validation.md"
PICTURE = PAGE.with_suffix(".svg")


def picture(found: Results) -> str:
    """Predicted over measured step time of every compared row, held out where that is known."""
    points = []
    for row in found.plain.rows:
        if row.error_fraction is None:
            continue
        shown = found.held_out.get(row.run.row, row)
        measured, prediction = shown.run.measured_step_seconds, shown.prediction
        if measured is None or prediction is None:
            continue
        points.append(
            Point(
                group=project_of(shown.run.source_id),
                measured=measured,
                predicted=prediction.step_seconds.expected,
            )
        )
    return scatter(points)


def main() -> None:
    """Write the page, the picture and, if asked, the record."""
    parser = argparse.ArgumentParser(description="write docs/explanation/validation.md")
    parser.add_argument("--record", action="store_true", help="record the errors reached")
    parser.add_argument("--because", help="why errors grew")
    options = parser.parse_args()
    found = results()
    if options.record:
        record(found, options.because)
    for path, text in ((PAGE, page(found)), (PICTURE, picture(found))):
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
