"""`--plot`: charts of what the answer's JSON says, as wide as the terminal, plain in a pipe."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fsdpplan.cli.app import exit_code_of
from fsdpplan.run.plans import read_plan
from fsdpplan.search.advice.difference import step_terms
from fsdpplan.units import format_gib, format_seconds
from tests.cli.small import DEMO, answer, on_a_machine_without_gpus, show, words
from tests.run.test_verify import ON_GPUS, a_run

QUESTION = "--model llama-3.2-1b --gpus 16 --hardware dgx-h100 --no-ledger"
PINNED = "--pp 1 --cp 1 --micro-batch 1 --wrap-blocks 1"
ONE = words(f"estimate {QUESTION} --dp-shard 8 --plot")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_machine_without_gpus(monkeypatch)
    monkeypatch.chdir(tmp_path)


def charts(out: str, heading: str) -> list[str]:
    """The lines of a chart."""
    return out[out.index(heading) :].split("\n\n")[0].splitlines()[1:]


def test_estimates_are_drawn_by_the_numbers_of_their_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = answer(capsys, *(word for word in ONE if word != "--plot"))
    for width in (60, 80):
        monkeypatch.setenv("COLUMNS", str(width))
        out = show(capsys, *ONE)
        assert max(map(len, out.splitlines())) <= width
        assert out.isascii()
    memory = charts(out, "Memory at the peak of the fullest device")
    for term in ("parameters", "optimizer", "activations"):
        assert format_gib(found["memory"][f"{term}_bytes"]) in "\n".join(memory)
    shares = [int(share) for share in re.findall(r"(-?\d+) %$", out, flags=re.M)]
    assert sum(shares) == pytest.approx(100, abs=len(shares))
    exposed = charts(out, "Collectives of a step: exposed")
    for one in found["communication"]:
        said = f"{format_seconds(one['exposed_seconds'])} of {format_seconds(one['seconds'])}"
        assert any(line.endswith(said) for line in exposed)


def test_a_search_is_drawn_with_all_that_it_priced(capsys: pytest.CaptureFixture[str]) -> None:
    given = words(f"recommend {QUESTION} {PINNED} --loss-chunks 1")
    found = answer(capsys, *given, "--no-save")
    out = show(capsys, *given, "--plot")
    drawn = charts(out, "that were priced.")
    rows = [line.partition("|")[2] for line in drawn if "|" in line]
    ranks = [sign for row in rows for sign in row if sign not in " .*"]
    assert sorted(ranks) == sorted("123456789abcdefgh"[: len(found["plans"])])
    (priced,) = re.findall(r"The ([\d,]+) layouts that were priced", " ".join(out.split()))
    assert int(priced) == found["search"]["priced"]
    (step,) = re.findall(r"A step of (.*), by what", out)
    plan = read_plan("fsdpplan.json")
    assert step == format_seconds(sum(step_terms(plan.estimate).values()))


def test_other_numbers_of_gpus_are_drawn_where_they_were_looked_at(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = QUESTION.replace("--gpus 16", "--gpus 8:32") + " --sharding ddp --tp 1"
    out = show(capsys, *words(f"recommend {asked} {PINNED} --loss-chunks 1 --plot --no-save"))
    drawn = charts(out, "The numbers of GPUs that were looked at")
    assert sum(line.partition("|")[2].count("o") for line in drawn) == 2
    assert sum(line.partition("|")[2].count("#") for line in drawn) == 1


def test_saved_plans_are_drawn_beside_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    show(capsys, *DEMO)
    out = show(capsys, *words("what-if --global-batch 32 --plot"))
    assert [line.split()[0] for line in charts(out, "Tokens a second, with")][:1] == ["as"]
    out = show(capsys, *words("what-if --sensitivities --plot"))
    assert any("|" in line for line in charts(out, "1 % more of an input"))
    out = show(capsys, *words("compare fsdpplan.json fsdpplan.json --plot"))
    one, other = charts(out, "Tokens a second, with")
    assert one.split()[1:] == other.split()[1:]


def test_a_run_is_drawn_beside_its_prediction_and_step_by_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    a_run(tmp_path, metrics=ON_GPUS)
    monkeypatch.setenv("COLUMNS", "80")
    out = show(capsys, *words("verify --plot"))
    step, *_ = charts(out, "Measured (x) over predicted (o)")
    assert step.split()[-1] == "1.25"  # 0.25 s where 0.2 s were predicted
    assert "Loss, by steps" in out
    assert "Seconds of a step, by steps" in out


@pytest.mark.parametrize(
    ("given", "other"),
    [
        (ONE, "json"),
        (words("recommend --params 1e9 --gpus 8 --plot"), "json"),
        (words("sweep --params 1e9 --gpus 8 --plot"), "csv"),
        (words("what-if --plot --gain 5%"), "gain"),
        (words("verify --plot"), "json"),
    ],
)
def test_charts_are_of_the_screen_alone(
    given: tuple[str, ...], other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    show(capsys, *DEMO)
    more = () if f"--{other}" in given else (f"--{other}",)
    assert exit_code_of((*given, *more)) == 2
    assert f"--plot and --{other} contradict each other" in capsys.readouterr().err
