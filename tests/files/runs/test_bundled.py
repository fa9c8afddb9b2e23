"""The published runs are found in a clone; elsewhere the error says where they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdpplan.errors import SpecError
from fsdpplan.files.runs.table import bundled_runs, read_runs


def test_every_published_row_is_read() -> None:
    runs = read_runs(bundled_runs())
    assert len(runs) == 2686
    assert len({run.source_id for run in runs}) == 17
    assert sum(run.is_timed for run in runs) > 1700


def test_without_a_clone_one_line_says_where_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"validate tests/golden/bench/train_runs\.csv` in a clone"):
        bundled_runs(tmp_path)
