"""The first screen: short, with what people compare with first, and whole in a narrow terminal."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdpplan.cli.app import exit_code_of
from fsdpplan.cli.views.first_screen import MOST_RUNNERS_UP, runners_up
from fsdpplan.search.advice.words import compact
from fsdpplan.search.order import COMPARED
from fsdpplan.spec.layout import Layout
from tests.cli.small import on_a_machine_without_gpus, words
from tests.search.questions import question

MOST_LINES = 43
"""Of the README's question, guesses included, in 80 columns."""


def test_it_is_read_in_half_a_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_a_machine_without_gpus(monkeypatch)
    monkeypatch.setenv("COLUMNS", "80")
    assert exit_code_of(words("recommend --params 70e9 --gpus 64 --no-save")) == 0
    screen = capsys.readouterr().out
    assert len(screen.splitlines()) <= MOST_LINES
    use = next(line for line in screen.splitlines() if line.startswith("  USE   "))
    assert "over" in use


@pytest.mark.parametrize(
    ("model", "gpus"), [("llama-3.1-8b", 16), ("qwen3-30b-a3b", 16), ("llama-3.2-1b", 4)]
)
def test_what_people_compare_with_is_beside_it(model: str, gpus: int) -> None:
    result = question(model, gpus, "dgx-h100").answer()
    chosen, *_ = result.ranked
    rows = [chosen, *runners_up(result)]
    assert len(rows) <= 1 + MOST_RUNNERS_UP
    assert result.fastest in rows
    assert [row.rank for row in rows] == sorted({row.rank for row in rows})
    for kind in ("HSDP", "expert parallel"):
        best = next((one for one in result.ranked if COMPARED[kind](one.layout)), None)
        assert best is None or best in rows
    assert len(result.listed.notes) == len(result.ranked)


def test_a_layout_in_a_cell() -> None:
    plain = Layout(dp_shard=8)
    assert compact(plain) == "FSDP 8"
    assert compact(replace(plain, dp_replicate=4)) == "HSDP 4 x 8"
    assert compact(Layout(dp_replicate=8, dp_shard=1, sharding="ddp")) == "DDP 8"
    assert compact(Layout()) == "one GPU"
    many = replace(plain, tp=4, pp=2, schedule="1f1b", activation_checkpointing="op")
    assert compact(many) == "FSDP 8, TP 4, PP 2, recompute op"
