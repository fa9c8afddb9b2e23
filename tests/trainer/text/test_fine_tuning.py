"""Fine-tuning: losses of every layout are those of a plain loop over chats as Transformers sees
them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.trainer import jobs, losses
from tests.trainer.text import chat_cases, chat_layouts
from tests.trainer.text.chat_cases import CHATS, turn

pytestmark = pytest.mark.gloo

LOSS_TOLERANCE = 1e-5
NORM_TOLERANCE = 1e-4

LONG = [
    [turn("user", "x" * number), turn("assistant", "say it " * (6 - number // 5))]
    for number in range(0, 20, 5)
]
ALL = [*CHATS, *LONG]
"""Eight, one a sequence."""
MANY = [*ALL, *([turn("user", f"{n}?"), turn("assistant", f"{n * n}!")] for n in range(16))]
"""As many as fill eight sequences when they are packed."""

Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, asked: Callable[[str], set[Any]]) -> Results:
    """All layouts, measured one after the other in one set of processes."""
    folder = tmp_path_factory.mktemp("fine-tuning")
    template = chat_cases.unmarked(chat_cases.LLAMA3)
    tokenizer = chat_cases.make_tokenizer(folder / "tokenizer", template)
    for packs, chats in ((False, ALL), (True, MANY)):
        chat_cases.write_chats(folder / f"{packs}.jsonl", chats)
        seen = [chat_cases.expected(tokenizer.parent, chat, chat_cases.LLAMA3) for chat in chats]
        (folder / f"{packs}.json").write_text(json.dumps(seen), encoding="utf-8")
    return jobs.measured(
        4,
        "tests.trainer.text.chat_layouts:measure_all",
        folder / "results.json",
        asked=asked("name"),
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", chat_layouts.LAYOUTS)
def test_a_layout_learns_chats_as_a_plain_loop_does(results: Results, name: str) -> None:
    for packs in (False, True):
        found, expected = results[f"{name} {packs}"], results[f"reference {packs}"]
        assert found["losses"] == pytest.approx(expected["losses"], rel=LOSS_TOLERANCE)
        assert found["norms"] == pytest.approx(expected["norms"], rel=NORM_TOLERANCE)
        assert found["held_out"] == pytest.approx(expected["held_out"], rel=LOSS_TOLERANCE)
        assert found["targets"] == expected["targets"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", chat_layouts.MIXTURES)
def test_what_fills_up_rows_is_routed_nowhere_and_counted_nowhere(
    results: Results, name: str
) -> None:
    """Chats by themselves have none: losses, gradients and what balances experts are as there."""
    for packs in (False, True):
        found, layout = results[f"{name} {packs}"], chat_layouts.MIXTURES[name]
        expected = results[losses.reference_name(f"mixture reference {packs}", layout)]
        assert found["losses"] == pytest.approx(expected["losses"], rel=LOSS_TOLERANCE)
        assert found["norms"] == pytest.approx(expected["norms"], rel=NORM_TOLERANCE)
        assert found["auxiliary"] == pytest.approx(expected["auxiliary"], rel=LOSS_TOLERANCE)
        assert found["held_out"] == pytest.approx(expected["held_out"], rel=LOSS_TOLERANCE)


def test_a_run_says_what_it_learns_and_goes_on_to_the_chat(tmp_path: Path) -> None:
    tokenizer = chat_cases.make_tokenizer(tmp_path / "tokenizer", chat_cases.CHATML)
    data = chat_cases.write_chats(tmp_path / "chats.jsonl", MANY)
    held = chat_cases.write_chats(tmp_path / "held.jsonl", CHATS)
    words = ["--sft", "--data", str(data), "--tokenizer", str(tokenizer), "--warmup-steps", "9"]
    words += ["--eval-data", str(held), "--pack"]
    plan: dict[str, Any] = {"model": chat_layouts.MODEL, "training": chat_layouts.TRAINING}
    plan |= {"dp_shard": 2}
    saved = ["--checkpoint-dir", str(tmp_path / "saved")]
    whole = tmp_path / "whole"
    out = jobs.train(whole, 2, *words, "--steps", "4", **plan)
    assert f"{data}: {len(MANY)} chats of" in out
    assert re.search(r"are answers and count; packed into \d sequences, \d\d% full", out)
    assert "held-out loss" in out
    jobs.train(tmp_path / "parts", 2, *words, *saved, "--steps", "2", **plan)
    jobs.train(tmp_path / "parts", 2, *words, *saved, "--steps", "4", **plan)
    assert jobs.losses(tmp_path / "parts") == jobs.losses(whole)
