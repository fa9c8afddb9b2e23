"""A change of precision in mid-run: when it is, and that each part is what a run of it would be."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

from fsdpplan.trainer.config import TrainingConfig
from fsdpplan.trainer.precision import parsed_switch, precision_of_step, precisions
from tests.trainer import jobs
from tests.trainer.switch_ranks import AT, CASES, STEPS


def training(switch: str, precision: str = "bf16") -> TrainingConfig:
    return TrainingConfig(
        seq_len=8,
        global_batch=1,
        precision=precision,
        reduce_dtype="fp32",
        optimizer="adamw",
        runtime="fsdp2",
        precision_switch=switch,
    )


@pytest.mark.parametrize(
    ("switch", "steps", "first"),
    [("fp8@0.8", 20, 16), ("fp8@0.7", 10, 7), ("fp8@0.5", 3, 2), ("fp8@0.999", 10, 10)],
)
def test_the_share_is_of_the_steps(switch: str, steps: int, first: int) -> None:
    each = [precision_of_step(training(switch), step, steps) for step in range(steps)]
    assert each == ["bf16"] * first + ["fp8"] * (steps - first)
    # of a plan as it is behind the change, too
    assert each == [
        precision_of_step(training(switch, "fp8"), step, steps) for step in range(steps)
    ]


def test_it_may_go_the_other_way_and_not_at_all() -> None:
    assert precisions(training("bf16@0.1", "fp8")) == ("fp8", "bf16")
    assert precisions(training("none")) == ("bf16",)


@pytest.mark.parametrize("text", ["none", "fp16@0.5", "fp8@1.0", "fp8@0.0", "fp8", "fp8@80%"])
def test_nothing_else_is_a_change(text: str) -> None:
    assert parsed_switch(text) is None


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, asked: Callable[[str], set[Any]]) -> Any:
    if importlib.util.find_spec("torchao") is None:
        pytest.skip("torchao is not installed")
    out = tmp_path_factory.mktemp("switch") / "found.json"
    return jobs.measured(2, "tests.trainer.switch_ranks:measure_all", out, asked=asked("name"))


@pytest.mark.gloo
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CASES)
def test_each_part_is_what_a_run_of_it_from_that_checkpoint_is(found: Any, name: str) -> None:
    whole = found[name]["whole"]
    assert [step for step, *_ in whole] == list(range(1, STEPS + 1))
    parts = ("fp8", "bf16") if name == "back" else ("bf16", "fp8")
    assert [precision for _, precision, *_ in whole] == [parts[0]] * AT + [parts[1]] * 2
    assert [one["step"] for one in found[name]["changes"]] == [AT]
    assert found[name]["alone"] == whole
    for again in found[name]["resumed"].values():
        assert again == whole


@pytest.mark.gloo
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CASES)
def test_there_are_never_two_models(found: Any, name: str) -> None:
    assert found[name]["left"] == [0]
