"""Adapters on the command line: what a card is told, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from fsdpplan.cli.app import exit_code_of
from fsdpplan.files.plans import read_plan
from fsdpplan.spec.adapters import Adapters
from fsdpplan.spec.model import Model
from tests.cli.small import on_a_machine_without_gpus, words


def flag_values(options: tuple[str, ...] | list[str]) -> Iterator[tuple[str, str]]:
    """Flags with their values."""
    return zip(options[::2], options[1::2], strict=True)


ON_A_CARD = words("recommend --model qwen3-8b --gpus 1 --hardware rtx-4090")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_machine_without_gpus(monkeypatch)
    monkeypatch.chdir(tmp_path)


def test_a_plan_says_its_adapters_and_is_asked_again_with_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert exit_code_of((*ON_A_CARD, *words("--lora 16 --base nf4 --lora-targets q,v"))) == 0
    assert "LoRA rank 16 over a 4-bit base" in " ".join(capsys.readouterr().out.split())
    plan = read_plan("fsdpplan.json")
    wanted = Adapters(rank=16, alpha=32.0, targets=("q", "v"), base="nf4")
    assert plan.training.adapters == wanted
    assert plan.training.global_batch == 64
    assert type(plan.model) is Model
    assert exit_code_of(words("what-if fsdpplan.json --no-ledger --lora-rs --json")) == 0
    asked = json.loads(capsys.readouterr().out)
    assert '"rslora": true' in json.dumps(asked)
    assert '"targets": ["q", "v"]' in json.dumps(asked)


def test_every_option_of_adapters_is_in_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    typed = "--lora 8 --lora-alpha 8 --lora-rs --lora-targets mlp --lora-dropout 0.1"
    assert exit_code_of((*ON_A_CARD, *words(f"{typed} --lora-dtype bf16 --base bf16"))) == 0
    assert read_plan("fsdpplan.json").training.adapters == Adapters(
        rank=8, alpha=8.0, rslora=True, targets=("gate", "up", "down"), dropout=0.1, dtype="bf16"
    )


def test_what_does_not_fit_is_told_the_adapters_that_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert exit_code_of((*ON_A_CARD, *words("--offload none --global-batch 16"))) == 3
    said = capsys.readouterr().err
    assert "--lora 16 (" in said
    assert "--lora 16 --base nf4 (" in said
    typed = (*ON_A_CARD, *words("--offload none --global-batch 16 --lora 16"))
    assert exit_code_of(typed) == 0


@pytest.mark.parametrize("recipe", ["--optimizer muon", "--param-dtype bf16", ""])
def test_what_is_offered_is_a_plan_whatever_the_recipe_was(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = words("recommend --model qwen3-14b --gpus 1 --hardware rtx-4090 --offload none")
    given = dict(pairwise([*words(recipe), ""]))
    assert exit_code_of((*asked, *words(recipe))) == 3
    offered = re.findall(r"(--lora 16[^(]*) \(", capsys.readouterr().err)
    assert offered
    for each in offered:
        typed = {**given, **dict(flag_values(words(each)))}
        options = [word for pair in typed.items() if pair[0].startswith("--") for word in pair]
        assert exit_code_of((*asked, *options)) == 0, each


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--base nf4", "add --lora 16"),
        ("--lora-alpha 4", "add --lora 16"),
        ("--lora 16 --program megatron", "leave --lora out"),
        ("--lora 16 --param-dtype bf16", "--lora-dtype bf16"),
        ("--lora 8192", "--lora 1024 or less"),
    ],
)
def test_what_adapters_do_not_go_with_is_said(
    typed: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of((*ON_A_CARD, *words(typed))) != 0
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_launcher_without_adapters_names_them_in_words(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert exit_code_of((*ON_A_CARD, "--lora", "16")) == 0
    assert exit_code_of(words("emit-launch --target megatron")) == 2
    assert "adapters LoRA rank 16 over a bf16 base (" in capsys.readouterr().err
