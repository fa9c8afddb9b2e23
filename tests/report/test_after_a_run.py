"""What a run came to, as sections: the numbers are those of `verify`, nothing that it left is lost,
and a run that failed is shown as it stands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdpplan.report.after_a_run import after_sections
from fsdpplan.report.values import Chart, Facts, Notes, Section, Table
from fsdpplan.run.aftermath import aftermath
from fsdpplan.run.curves import MOST_POINTS
from fsdpplan.run.verify import comparison
from tests.report.runs import gloo_run, gpu_run
from tests.run.test_verify import ON_GPUS, a_run


def sections(place: Path, folder: Path) -> dict[str, Section]:
    left = aftermath(place, plan_file=None, folder=folder)
    return {one.name: one for one in after_sections(left, None)}


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Section]:
    """Of a run on GPUs that was started again."""
    folder = tmp_path_factory.mktemp("gpus")
    return sections(gpu_run(folder), folder)


def chart(section: Section, name: str) -> Chart:
    (found,) = [one for one in section.blocks if isinstance(one, Chart) and one.name == name]
    return found


def test_the_numbers_are_those_of_verify(tmp_path: Path) -> None:
    left = aftermath(gloo_run(tmp_path), plan_file=None, folder=tmp_path)
    rows = comparison(left.run)
    measured = {one.name: one for one in after_sections(left, None)}["measured"]
    (facts,) = [one for one in measured.blocks if isinstance(one, Facts)]
    assert [fact.exact for fact in facts.items] == [row.measured for row in rows]
    (table,) = [one for one in measured.blocks if isinstance(one, Table)]
    for row, cells in zip(rows, table.rows, strict=True):
        exact = [getattr(one, "exact", None) for one in cells[1:]]
        assert exact == [row.predicted, row.lower, row.upper, row.measured, row.error_fraction]
    drawn = chart(measured, "measured-over-predicted").data["rows"]
    step = rows[0]
    assert step.measured is not None
    assert drawn[0]["measured"] == step.measured / step.predicted
    # a CPU has no allocator: its memory is no measurement of what was predicted
    assert len(drawn) == 3


def test_the_newest_run_of_a_folder_is_found(tmp_path: Path) -> None:
    place = gloo_run(tmp_path)
    left = aftermath(None, plan_file=None, folder=tmp_path)
    assert left == aftermath(place, plan_file=None, folder=tmp_path)
    assert left.folder == place


def test_curves_go_over_all_starts_and_keep_the_slowest_step(on_gpus: dict[str, Section]) -> None:
    steps = on_gpus["steps"]
    assert "3,000 reported steps" in steps.says
    assert "went on from a checkpoint at step 1,000" in steps.says
    times = chart(steps, "step-seconds")
    measured, predicted = times.data["series"]
    assert len(measured["points"]) <= MOST_POINTS
    assert max(value for _, value in measured["points"]) == 7.5
    # it is beyond the chart, so that the others can be told apart, and said to be
    assert times.data["y"]["max"] < 7.5
    assert "1 of them is beyond the chart, the first at step 1,499" in times.says
    assert [measured["points"][0][0], measured["points"][-1][0]] == [1, 3000]
    assert {tuple(ends) for ends in predicted["points"]} == {(1, 0.2), (3000, 0.2)}
    assert [mark["value"] for mark in times.data["marks"]] == [1000]
    assert "of 3,000 steps are drawn" in times.says
    memory = chart(steps, "reserved-bytes").data["series"]
    assert [one["name"] for one in memory] == ["measured", "predicted"]


def test_starts_their_ends_and_nodes_are_told(on_gpus: dict[str, Section]) -> None:
    (notes,) = on_gpus["went"].blocks
    assert isinstance(notes, Notes)
    words = " ".join(note.text for note in notes.items)
    assert "Attempt 1 of 4 on n[1-2]" in words
    assert "node n2 failed" in words
    assert "Node n2 must not be used again: its link was down" in words
    assert [note.tone for note in notes.items][:2] == ["plain", "bad"]


def test_what_nccl_did_is_told_where_it_left_a_log(
    on_gpus: dict[str, Section], tmp_path: Path
) -> None:
    found = on_gpus["nccl"]
    assert "2.18" in found.says
    (ways,) = [one for one in found.blocks if isinstance(one, Table) and not one.folded]
    assert any("NET/IB" in str(row[0]) for row in ways.rows)
    assert "nccl" not in sections(gloo_run(tmp_path), tmp_path)


def test_a_profile_stands_beside_its_prediction(on_gpus: dict[str, Section]) -> None:
    measured = on_gpus["measured"]
    waits = chart(measured, "waits").data
    at = waits["categories"].index("dp_shard")
    assert waits["series"][1]["values"][at] == 0.01
    names = [fact.name for one in measured.blocks if isinstance(one, Facts) for fact in one.items]
    assert {"Communication that is hidden", "Device idle in a step"} <= set(names)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_run_that_was_killed_is_shown_as_it_stands(steps: int, tmp_path: Path) -> None:
    lines = [*ON_GPUS.splitlines()[: 1 + steps]]
    lines.append(json.dumps({"event": "oom", "rank": 3, "phase": "backward", "step": steps}))
    found = sections(a_run(tmp_path, metrics="\n".join(lines) + "\n"), tmp_path)
    (notes,) = [one for one in found["measured"].blocks if isinstance(one, Notes)]
    assert f"after {steps} steps" in " ".join(note.text for note in notes.items)
    (went,) = found["went"].blocks
    assert isinstance(went, Notes)
    assert "Rank 3 ran out of memory in backward" in went.items[0].text
    assert ("steps" in found) is (steps > 1)
