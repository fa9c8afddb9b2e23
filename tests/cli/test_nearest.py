"""A word with a slip in it is answered with the word that was meant."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cli.app import exit_code_of
from fsdpplan.cli.commands import Commands
from fsdpplan.cli.options import failures, files, goal, job, layout, question, run, scaling
from fsdpplan.cli.options.expand import Flag, flag_of
from fsdpplan.cli.options.parse import Choice
from fsdpplan.cli.options.wanted import layout_words, wanted
from fsdpplan.cli.views.profiles import profile_kind
from fsdpplan.errors import FsdpPlanError, did_you_mean, nearest
from fsdpplan.files import catalogue
from fsdpplan.files.plans import plan_from_json, plan_json
from fsdpplan.files.prices import price_of, prices
from fsdpplan.files.profiles.catalogue import load_node, profile_names
from fsdpplan.files.runs.columns import COLUMNS
from fsdpplan.files.runs.table import read_runs
from fsdpplan.files.table import Table, beside
from fsdpplan.validate.check.conditions import check as condition
from fsdpplan.validate.check.quantities import plan_quantities
from tests.emit.plans import make_plan

OF_EACH = 2
"""Slips of each word, by a seed."""

GROUPS = (failures, files, goal, job, layout, question, run, scaling)


def slips(word: str) -> list[str]:
    """The word with a letter dropped, or two swapped."""
    dropped = [word[:i] + word[i + 1 :] for i in range(len(word))]
    swapped = [word[:i] + word[i + 1] + word[i] + word[i + 2 :] for i in range(len(word) - 1)]
    return [one for one in dict.fromkeys((*dropped, *swapped)) if one != word]


def some_slips(word: str, *, known: set[str]) -> list[str]:
    """Some of them that are no known words themselves."""
    plain = {one.lower() for one in known}
    found = [one for one in slips(word) if one.strip("-_. ") and one.lower() not in plain]
    return random.Random(word).sample(found, min(OF_EACH, len(found)))


def refusal(call: Callable[[], Any]) -> str:
    """What is said; empty where nothing is refused: then it was a known word, too."""
    try:
        call()
    except FsdpPlanError as error:
        return str(error)
    return ""


def choices() -> Iterator[tuple[str, Choice]]:
    """Every option that takes one of some words."""
    for module in GROUPS:
        for group in vars(module).values():
            if not (isinstance(group, type) and hasattr(group, "HEADING")):
                continue
            for name, hint in get_type_hints(group, include_extras=True).items():
                for mark in getattr(hint, "__metadata__", ()):
                    if isinstance(mark, Flag) and isinstance(mark.parse, Choice):
                        yield flag_of(name, mark), mark.parse


def test_options_of_some_words() -> None:
    assert len(dict(choices())) > 15
    for flag, parse in choices():
        for word in parse.allowed:
            for typed in some_slips(word, known=set(parse.known) | set(parse.allowed)):
                said = refusal(lambda typed=typed, parse=parse, flag=flag: parse(typed, name=flag))
                meant = said.partition("did you mean")[2].partition("?")[0]
                assert not said or word in meant, (flag, typed, said)


def _named(load: Callable[[str], Any], names: list[str], every: int = 1) -> None:
    for name in names[::every]:
        for typed in some_slips(name, known=set(names)):
            said = refusal(lambda typed=typed: load(typed))
            assert not said or name in said, (typed, said)


def test_models_and_profiles() -> None:
    _named(catalogue.load_model, catalogue.model_names(), every=12)
    _named(load_node, sorted(profile_names("node")), every=9)


def test_providers_and_kinds_of_profiles() -> None:
    _named(lambda one: price_of(one, "h100-sxm-80g"), sorted({row.provider for row in prices()}))
    _named(profile_kind, ["device", "node", "cluster"])


def test_words_of_a_layout() -> None:
    words = [one for one in layout_words() if len(one) > 2]
    for word in words:
        for typed in some_slips(word, known=set(layout_words())):
            said = refusal(lambda typed=typed: wanted(f"{typed} 2", name="--why"))
            assert not said or word in said or "two values" in said, (typed, said)


def test_columns_of_a_table_and_quantities_of_a_plan(tmp_path: Path) -> None:
    def read(name: str) -> None:
        (tmp_path / "runs.csv").write_text(f"{name},x\n1,2\n")
        read_runs(tmp_path / "runs.csv")

    _named(read, sorted(COLUMNS), every=9)
    quantities = plan_quantities(make_plan("cuda", nodes=2, per_node=4))
    _named(lambda name: condition(f"{name} > 1", quantities), sorted(quantities)[::29])


def test_keys_of_a_profile_and_of_a_plan() -> None:
    keys = ["latency", "port_bandwidth", "domain_gpus"]
    for key in keys:
        for typed in some_slips(key, known=set(keys)):
            table = Table(where="x.toml", values={typed: 1})
            assert f"did you mean {key}" in refusal(lambda table=table: table.refuse_unknown(keys))
    plan = json.loads(plan_json(make_plan("cuda", nodes=2, per_node=4)))
    for path in (("layout",), ("training",), ("cluster", "device"), ("model",)):
        place: Any = plan
        for step in path:
            place = place[step]
        for key in [*place][::5]:
            for typed in some_slips(key, known=set(place))[:1]:
                value = place.pop(key)
                place[typed] = value
                said = refusal(lambda: plan_from_json(json.dumps(plan), where="plan.json"))
                place[key] = place.pop(typed)
                assert "unknown key" not in said or key in said, said


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", Commands())
def test_options_of_a_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = Commands()[name]
    flags = {
        one for parameter in command.params for one in (*parameter.opts, *parameter.secondary_opts)
    }
    flags = {one for one in flags if one.startswith("--")}
    for flag in sorted(flags)[::5]:
        known = {one[2:] for one in flags}
        for typed in some_slips(flag[2:], known=known)[:1]:
            assert exit_code_of([name, f"--{typed}"]) == 2
            said = capsys.readouterr().err
            assert flag in said.partition("; type")[0], said


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for name in Commands():
        for typed in some_slips(name, known={*Commands()}):
            assert exit_code_of([typed]) == 2
            assert name in capsys.readouterr().err.partition("did you mean")[2]


def test_a_word_that_is_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(["recommend", "tp", "4"]) == 2
    assert "recommend takes no word tp (did you mean --tp" in capsys.readouterr().err
    assert exit_code_of(["explain", "plan.json", "whyy"]) == 2
    assert "did you mean --why?" in capsys.readouterr().err


def test_files(tmp_path: Path) -> None:
    (tmp_path / "fsdpplan.json").write_text("{}")
    (tmp_path / "other.toml").write_text("")
    for typed in slips("fsdpplan.json"):
        assert str(tmp_path / "fsdpplan.json") in beside(tmp_path / typed)
    assert beside(tmp_path / "nothing.csv") == ""
    assert beside(tmp_path / "no folder" / "fsdpplan.json") == ""


@given(st.text(max_size=12), st.lists(st.text(max_size=8), max_size=4))
def test_any_text_is_answered(word: str, known: list[str]) -> None:
    near = nearest(word, known)
    assert set(near) <= set(known)
    assert bool(did_you_mean(word, known)) == bool(near)
    assert not near or did_you_mean(word, known).endswith("?)")


def test_a_word_far_from_all_is_answered_with_none() -> None:
    assert nearest("torchtitan", ["fsdp", "ddp", "zero1"]) == []
    assert did_you_mean("x" * 10_000, ["fsdp"]) == ""
