"""What the planner says to the trainer is what the trainer reads, and refuses alike."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.emit.trainer_program import (
    Trainer,
    decay_steps,
    peak_learning_rate,
    require_meaning,
    warmup_steps,
)
from fsdpplan.errors import SpecError
from fsdpplan.spec.trainer_options import TrainerOptions, data_share, options_of
from fsdpplan.spec.training import Training
from fsdpplan.trainer import schedule
from fsdpplan.trainer.options import parse_options
from fsdpplan.trainer.text.mixture import share_of
from tests.emit.plans import make_plan

OPTIONS = options_of(TrainerOptions)
TOGETHER = {
    "checkpoint_every": "checkpoint_dir",
    "tokenizer": "data",
    "eval_every": "eval_data",
    "eval_tokens": "eval_data",
    "data_workers": "data",
    "prefetch": "data",
}


def accepts(name: str, value: Any) -> bool:
    """Whether the trainer's own command line takes it."""
    words = [f"--{name.replace('_', '-')}={value}"]
    if name in TOGETHER:
        words.append(f"--{TOGETHER[name].replace('_', '-')}=x")
    try:
        parse_options(words)
    except SystemExit:
        return False
    return True


@given(
    st.sampled_from([name for name in OPTIONS if OPTIONS[name][0] in (int, float)]),
    st.sampled_from([-3, -1, 0, 1, 2, 7]),
)
def test_what_is_declared_is_what_the_trainer_takes(name: str, value: int) -> None:
    others = {TOGETHER[name]: "x"} if name in TOGETHER else {}
    if name.startswith("checkpoint_"):
        others = {"checkpoint_dir": "x"}
    try:
        trainer = Trainer(**{name: value, **others})  # type: ignore[arg-type]
    except SpecError:
        # 0 is the trainer's word for the end alone, which a job says by leaving it out
        assert not accepts(name, value) or (name.endswith("_every") and value == 0)
        return
    assert accepts(name, value)
    assert getattr(parse_options(trainer.words()), name) == value


def test_switches_are_words_only_where_they_change_something() -> None:
    assert Trainer(pack=True, numbers=True).words() == ("--pack",)
    off = Trainer(pack=False, numbers=False, checkpoint_dir="x", checkpoint_async=False)
    assert off.words() == ("--checkpoint-dir=x", "--no-checkpoint-async", "--no-numbers")
    assert not parse_options(off.words()).checkpoint_async


@pytest.mark.parametrize(
    ("text", "weight"),
    [
        ("web/", None),
        ("web=0.7", "0.7"),
        ("a=b=2", "2"),
        ("lr=0.3=1", "1"),
        ("a=.5", ".5"),
        ("a=1.", "1."),
        *((bare, None) for bare in ("=3", "a=", "a=1e3", "a=-1", "a=nan")),
    ],
)
def test_a_weight_is_a_number_behind_a_path(text: str, weight: str | None) -> None:
    path = text if weight is None else text.removesuffix(f"={weight}")
    assert data_share(text) == (path, weight)
    assert share_of(text) == (path, None if weight is None else Fraction(weight))


def test_sources_of_a_mixture_are_words_of_their_own() -> None:
    trainer = Trainer(data=("web crawl/=0.7", "code.tokens=0.3"), data_workers=2, prefetch=3)
    assert trainer.words() == (
        "--data=web crawl/=0.7",
        "--data=code.tokens=0.3",
        "--data-workers=2",
        "--prefetch=3",
    )
    shares = parse_options(trainer.words()).data
    assert [(share.path, float(share.weight or 0)) for share in shares] == [
        ("web crawl/", 0.7),
        ("code.tokens", 0.3),
    ]


@pytest.mark.parametrize(
    ("data", "words"),
    [(("a=1", "b"), "b=WEIGHT"), (("a=1", "b=0"), "weight of 0"), (("a=0.0",), "weight of 0")],
)
def test_weights_that_no_mixture_has_are_refused_here_and_there(
    data: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SpecError, match=words):
        Trainer(data=data)
    with pytest.raises(SystemExit):
        parse_options([f"--data={each}" for each in data])
    assert "weight" in capsys.readouterr().err


def test_no_setting_of_data_is_for_data_that_is_not_read() -> None:
    for values in ({"data_workers": 1}, {"prefetch": 2}):
        with pytest.raises(SpecError, match="give --data too"):
            Trainer(**values)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="leave one"):
        Trainer(data="text.jsonl", data_workers=0, prefetch=2)


def test_a_run_that_begins_with_a_model_has_the_rate_that_other_programs_are_told() -> None:
    tuning = Trainer(init_from="model")
    assert parse_options(tuning.words()).learning_rate == peak_learning_rate(tuning)
    said = replace(tuning, learning_rate=1e-3)
    assert parse_options(said.words()).learning_rate == peak_learning_rate(said) == 1e-3


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"epochs": 2.0}, "give --data too"),
        ({"epochs": 2.0, "steps": 9, "data": "d.bin"}, "give one of them"),
        ({"epochs": 0.0, "data": "d.bin"}, "above 0"),
    ],
)
def test_epochs_are_refused_alike(said: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        Trainer(**said)
    with pytest.raises(SystemExit):
        parse_options([f"--{name}={value}" for name, value in said.items()])


@given(
    epochs=st.sampled_from([0.5, 1.0, 3.0, 2.7]),
    sequences=st.integers(1, 10_000),
    batch=st.integers(1, 512),
    kind=st.sampled_from(schedule.SCHEDULES),
)
def test_epochs_are_the_steps_that_were_typed(
    epochs: float, sequences: int, batch: int, kind: Any
) -> None:
    """Counted steps come to the options that as many typed ones do."""
    program = Trainer(epochs=epochs, data="d.bin", lr_schedule=kind)
    counted = parse_options(program.words()).over(sequences=sequences, batch=batch)
    assert counted.steps - 1 < max(1, epochs * sequences / batch) <= counted.steps
    typed = parse_options(replace(program, epochs=None, steps=counted.steps).words())
    assert replace(counted, epochs=None, eval_every=0) == typed


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "steps": st.integers(1, 40_000),
            "lr_schedule": st.sampled_from(schedule.SCHEDULES),
            "learning_rate": st.sampled_from([1e-4, 3e-3]),
            "min_lr": st.sampled_from([0.0, 1e-4, 2e-3]),
            "warmup_steps": st.integers(0, 60),
            "decay_steps": st.integers(1, 60),
        },
    )
)
def test_a_schedule_is_settled_and_refused_alike(said: dict[str, Any]) -> None:
    words = [f"--{name.replace('_', '-')}={value}" for name, value in said.items()]
    try:
        program = Trainer(**said)
    except SpecError:
        with pytest.raises(SystemExit):
            parse_options(words)
        return
    own = parse_options(words)
    assert own == parse_options(program.words())
    assert own.warmup_steps == warmup_steps(program, own.steps)
    assert own.decay_steps == decay_steps(program, own.steps)


@pytest.mark.parametrize(
    ("said", "optimizer", "words"),
    [
        ({"muon_nesterov": False}, "adamw", "--muon-nesterov is of Muon"),
        ({"adamw": "loop"}, "adamw_8bit", "a kernel of its own"),
        ({"expert_bias_rate": 0.0}, "adamw", "balances experts, and tiny has none"),
    ],
)
def test_what_means_nothing_for_a_plan_is_refused_before_the_queue(
    said: dict[str, Any], optimizer: Any, words: str
) -> None:
    plan = make_plan("cpu")
    training = Training(seq_len=8, global_batch=1, optimizer=optimizer)
    require_meaning(Trainer(), training, plan.model)
    with pytest.raises(SpecError, match=words):
        require_meaning(Trainer(**said), training, plan.model)
