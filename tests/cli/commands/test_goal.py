"""Time, money, energy and objectives: `recommend` and `estimate`, against a scan by `--gpus`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fsdpplan.api as api
from fsdpplan.cli.app import exit_code_of
from fsdpplan.files.plans import read_plan
from fsdpplan.files.prices import price_of
from fsdpplan.units import format_money
from tests.cli.small import answer, on_a_machine_without_gpus, show, words

MODEL = "--model llama-3.2-1b --hardware dgx-h100 --pp 1 --cp 1 --tp 1 --micro-batch 1 --no-ledger"
ASKED = f"recommend {MODEL} --no-save --tokens 1T"
ONE = f"estimate {MODEL} --gpus 16 --dp-shard 16 --tokens 1T --activation-checkpointing full"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    on_a_machine_without_gpus(monkeypatch)


def test_the_cheapest_in_time_is_that_of_a_scan(capsys: pytest.CaptureFixture[str]) -> None:
    goal = "--gpus 8:64 --deadline 20d --price 2.50 --objective cost"
    found = answer(capsys, *words(f"{ASKED} {goal}"))
    tried = found["goal"]["tried"]
    left_out = [one["gpus"] for one in found["goal"]["left_out"]]
    assert [*left_out, *(one["gpus"] for one in tried)] == [8, 16, 32, 64]
    scan = {}
    for gpus in (8, 16, 32, 64):
        given = f"{ASKED} --gpus {gpus} --price 2.50"
        direct = answer(capsys, *words(given))
        scan[gpus] = direct["plans"][0]["estimate"], direct["goal"]["bills"][0]
    for one in tried:
        estimate, bill = scan[one["gpus"]]
        assert one["step_seconds"] == estimate["step_seconds"]
        assert one["bill"]["cost"] == bill["cost"]
        hours = one["bill"]["seconds"]["expected"] / 3600
        assert bill["cost"]["expected"] == pytest.approx(one["gpus"] * hours * 2.5)
        assert one["in_time"] == (one["bill"]["deadline_chance"] >= 0.8)
    for gpus in left_out:
        assert scan[gpus][1]["seconds"]["expected"] > 20 * 86400
    best = next(one for one in tried if one["is_best"])
    assert best["gpus"] == found["cluster"]["gpus"]
    able = [one["bill"]["cost"]["expected"] for one in tried if one["in_time"]]
    assert best["bill"]["cost"]["expected"] == min(able)
    # no row that is kept is beaten in both, and each other one is
    points = {
        one["gpus"]: (one["bill"]["seconds"]["expected"], one["bill"]["cost"]["expected"])
        for one in tried
    }
    for one in tried:
        mine = points[one["gpus"]]
        beaten = any(
            other != mine and other[0] <= mine[0] and other[1] <= mine[1]
            for other in points.values()
        )
        assert one["is_beaten"] == beaten


def test_the_number_of_gpus_is_found_where_none_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fsdpplan.cli.resolve.goal.MOST_GPUS", 32)
    given = f"{ASKED} --deadline 30d --price 2 --pue 1.2 --co2-per-kwh 350 --objective cost"
    given = given.replace(" --no-save", " --save cheap.json")
    out = show(capsys, *words(given))
    for said in (
        "GPU hours",
        "at $2.00 a GPU hour",
        "PUE 1.2",
        "350 g a kWh",
        "met, with a chance",
    ):
        assert said in " ".join(out.split()), said
    assert max(map(len, out.splitlines())) <= 80
    saved = json.loads(Path("cheap.json").read_text())
    assert saved["cluster"]["gpus"] in (8, 16)
    fewest = answer(capsys, *words(f"{ASKED} --deadline 15d"))
    assert fewest["goal"]["objective"] == "fewest-gpus"
    assert 8 < fewest["cluster"]["gpus"] <= 32
    with_all = answer(capsys, *words(f"{ASKED} --gpus 8,16 --objective throughput"))
    assert with_all["cluster"]["gpus"] == 16
    assert any("16 GPUs, of 2 numbers" in said for said in with_all["assumptions"])


def test_head_room_is_bought_by_time(capsys: pytest.CaptureFixture[str]) -> None:
    given = words(f"recommend {MODEL} --no-save --gpus 8 --objective headroom")
    found = answer(capsys, *given)
    tried = found["goal"]["tried"]
    free = [one["free_bytes"] for one in tried]
    assert free == sorted(set(free))
    assert [one["is_best"] for one in tried] == [False] * (len(tried) - 1) + [True]
    peak = found["plans"][0]["estimate"]["memory"]["peak_device_bytes"]
    assert free[-1] == found["cluster"]["device"]["memory_bytes"] - peak
    kept = [one for one in tried if not one["is_beaten"]]
    steps = [one["step_seconds"]["expected"] for one in kept]
    assert steps == sorted(steps)
    usual = answer(capsys, *words(f"recommend {MODEL} --no-save --gpus 8"))
    assert usual["plans"][0]["layout"] == tried[0]["layout"]
    assert found["training"] == usual["training"]


def bill(capsys: pytest.CaptureFixture[str], more: str) -> dict[str, Any]:
    """Of the one layout."""
    found: dict[str, Any] = answer(capsys, *words(f"{ONE} {more}"))["goal"]["bills"][0]
    return found


def test_each_option_changes_the_bill_as_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    one = bill(capsys, "--price 2")
    assert one["cost"]["expected"] == pytest.approx(2 * one["gpu_hours"]["expected"])
    assert one["energy_kwh"] is None
    twice = bill(capsys, "--price 2 --epochs 2")
    assert twice["cost"]["expected"] == pytest.approx(2 * one["cost"]["expected"], rel=1e-5)
    assert bill(capsys, "--provider lambda")["cost"]["expected"] == pytest.approx(
        3.99 * one["gpu_hours"]["expected"]
    )
    hours = one["seconds"]["expected"] / 3600
    watts = bill(capsys, "--node-watts 8000")
    assert watts["energy_kwh"]["expected"] == pytest.approx(2 * 8 * hours)
    assert watts["co2_kg"] is None
    site = bill(capsys, "--node-watts 8000 --pue 1.5 --co2-per-kwh 100")
    assert site["energy_kwh"]["expected"] == pytest.approx(2 * 8 * 1.5 * hours)
    assert site["co2_kg"]["expected"] == pytest.approx(2 * 8 * 1.5 * hours * 0.1)
    rated = bill(capsys, "--pue 1")
    assert rated["energy_kwh"]["expected"] == pytest.approx(2 * 0.76 * 10.2 * hours)
    days = hours / 24
    assert bill(capsys, f"--deadline {days:.6f}d --deadline-chance 40%")[
        "deadline_chance"
    ] == pytest.approx(0.5, abs=1e-3)
    assert exit_code_of(words(f"{ONE} --deadline {days:.6f}d --deadline-chance 60%")) == 3
    out, err = capsys.readouterr()
    assert "NOT MET, with a chance of" in " ".join(out.split())
    assert "use --deadline" in err


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        (f"{ASKED} --gpus 8 --price -2", 2, "--price"),
        (f"{ASKED} --gpus 8 --price nan", 2, "--price"),
        (f"{ASKED} --gpus 8 --price 2 --provider aws", 2, "contradict"),
        (f"{ASKED} --gpus 8 --provider nowhere", 2, "oci or runpod"),
        (f"{ASKED} --gpus 8 --deadline 14", 2, "such as 14h"),
        (f"{ASKED} --gpus 8 --deadline 0d", 2, "above 0"),
        (f"{ASKED} --gpus 8 --deadline-chance 90%", 2, "--deadline 14d"),
        (f"{ASKED} --gpus 8 --deadline 90d --deadline-chance 0", 2, "80%"),
        (f"{ASKED} --gpus 8 --pue 0.9", 2, "--pue"),
        (f"{ASKED} --gpus 8 --node-watts 0", 2, "--node-watts"),
        (f"{ASKED} --gpus 8 --objective uptime", 2, "fewest-gpus or headroom"),
        (f"{ASKED} --gpus 8 --objective cost", 2, "--price 2.10"),
        (f"{ASKED} --gpus 8 --objective fewest-gpus", 2, "leave it out"),
        (f"{ASKED} --gpus 8,16 --objective headroom", 2, "--gpus 64"),
        (f"{ASKED} --gpus 9:15", 2, "no power of two"),
        (f"{ASKED} --gpus 8:16 --min-gpus", 2, "leave one of them out"),
        (f"recommend {MODEL} --gpus 8 --price 2", 2, "--tokens 2T"),
        (f"recommend {MODEL} --gpus 8 --objective energy", 2, "--tokens 2T"),
        (f"{ASKED} --gpus 8 --deadline 1d", 3, "leave --gpus out"),
        (f"{ASKED} --gpus 8:16 --deadline 1d", 3, "of 2 numbers tried"),
        (
            "recommend --model llama-3.1-8b --hardware dgx-h100 --gpus 1,2 --sharding ddp --tp 1 "
            "--pp 1 --cp 1 --no-ledger --tokens 1T",
            3,
            "fits on any of 1, 2 GPUs",
        ),
    ],
)
def test_what_cannot_be_is_one_error(
    command: str, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(words(command)) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1


def test_on_one_number_of_gpus_the_fastest_is_said_to_be_the_cheapest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain = answer(capsys, *words(f"{ASKED} --gpus 8"))
    cheap = answer(capsys, *words(f"{ASKED} --gpus 8 --price 2 --objective cost"))
    assert cheap["plans"] == plain["plans"]
    assert any("the fastest layout is the cheapest" in said for said in cheap["assumptions"])


def test_a_deadline_goes_before_a_preference(capsys: pytest.CaptureFixture[str]) -> None:
    """Where the first is preferred to a faster one, and only that one ends in time."""
    plain = answer(capsys, *words(f"{ASKED} --gpus 16 --price 2"))
    seconds = [one["seconds"]["expected"] for one in plain["goal"]["bills"]]
    fastest = plain["fastest_rank"] - 1
    assert seconds[fastest] < seconds[0], "another example, please"
    days = (seconds[fastest] + min(seconds[:fastest])) / 2 / 86400
    goal = f"--deadline {days:.6f}d --deadline-chance 50%"
    found = answer(capsys, *words(f"{ASKED} --gpus 16 {goal}"))
    assert found["plans"][0]["layout"] == plain["plans"][fastest]["layout"]
    assert [one["rank"] for one in found["plans"]] == [*range(1, len(seconds) + 1)]
    assert found["fastest_rank"] == 1
    assert found["goal"]["bills"][0]["deadline_chance"] >= 0.5
    assert all(one["deadline_chance"] < 0.5 for one in found["goal"]["bills"][1:])
    out = show(capsys, *words(f"{ASKED} --gpus 16 {goal}"))
    assert "Chance to end in time, by rank: 1: 5" in " ".join(out.split())


def test_by_goodput_the_most_tokens_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    """Beside each number of GPUs asked by itself: more of them fail more often."""
    failures = "--mtbf-gpu 300h --mtbf-node 3000h --storage-bw 5GB/s --no-ledger"
    asked = f"recommend {MODEL} --no-save --global-batch 256 --pp 1 --cp 1 {failures}"
    goal = answer(capsys, *words(f"{asked} --gpus 16:64 --objective goodput"))["goal"]
    kept = {}
    for gpus in (16, 32, 64):
        one = answer(capsys, *words(f"{asked} --gpus {gpus} --goodput"))
        rate = one["plans"][0]["estimate"]["tokens_per_second"]
        kept[gpus] = rate * one["goodput"]["fraction"]["expected"]
    found = {row["gpus"]: row for row in goal["tried"]}
    assert set(found) == set(kept)
    for gpus, row in found.items():
        assert row["tokens_per_second"] * row["kept_fraction"] >= kept[gpus] * (1 - 1e-9)
    (best,) = [row["gpus"] for row in goal["tried"] if row["is_best"]]
    rates = {gpus: row["tokens_per_second"] * row["kept_fraction"] for gpus, row in found.items()}
    assert rates[best] == max(rates.values())
    assert found[64]["kept_fraction"] < found[16]["kept_fraction"] < 1


def test_a_plan_keeps_what_was_said_of_money(capsys: pytest.CaptureFixture[str]) -> None:
    typed = "--price 2.50 --pue 1.2 --deadline 90d --deadline-chance 70%"
    found = answer(
        capsys, *words(f"recommend {MODEL} --gpus 16 --tokens 1T {typed} --save plan.json")
    )
    plan = read_plan("plan.json")
    assert plan.terms is not None
    assert (plan.terms.price, plan.terms.pue) == (2.5, 1.2)
    assert (plan.terms.deadline_seconds, plan.terms.deadline_chance) == (90 * 86400, 0.7)
    assert plan.terms.draw is not None
    bill = found["goal"]["bills"][0]
    # the same money and energy without typing it again
    again = api.bill(plan)
    assert again.cost is not None
    assert again.energy_kwh is not None
    assert again.cost.expected == pytest.approx(bill["cost"]["expected"])
    assert again.energy_kwh.expected == pytest.approx(bill["energy_kwh"]["expected"])
    then = answer(capsys, *words("what-if plan.json --gpus 32 --no-ledger"))
    assert then["plan"]["cost_to_train"] == pytest.approx(bill["cost"]["expected"])
    for answered in (then["same_layout"], then["best"]):
        hours = answered["gpu_seconds_to_train"] / 3600
        assert answered["cost_to_train"] == pytest.approx(hours * 2.5)
    page = show(capsys, *words("report plan.json --out - --quick"))
    assert format_money(bill["cost"]["expected"]) in page
    assert "70.0 % are asked for" in page


def test_a_price_holds_for_its_gpus_alone(capsys: pytest.CaptureFixture[str]) -> None:
    answer(capsys, *words(f"recommend {MODEL} --gpus 16 --tokens 1T --price 2.50 --save plan.json"))
    other = answer(capsys, *words("what-if plan.json --hardware dgx-b200 --no-ledger"))
    assert other["plan"]["cost_to_train"] is not None
    assert other["best"]["cost_to_train"] is None
    assert any("b200-sxm-180g is not known" in said for said in other["assumptions"])


def test_plans_and_questions_are_compared_in_money(capsys: pytest.CaptureFixture[str]) -> None:
    asked = f"recommend {MODEL} --gpus 16 --tokens 1T"
    answer(capsys, *words(f"{asked} --price 2.50 --save a.json"))
    answer(capsys, *words(f"{asked} --save b.json"))
    hours = [one["gpu_seconds_to_train"] / 3600 for one in _compared(capsys, "a.json b.json")]
    said = [one["cost_to_train"] for one in _compared(capsys, "a.json b.json")]
    assert said == [pytest.approx(hours[0] * 2.5), None]
    for prices in ((3.0, 4.0), (5.0, 5.0)):
        typed = ",".join(map(str, dict.fromkeys(prices)))
        each = [one["cost_to_train"] for one in _compared(capsys, f"a.json b.json --price {typed}")]
        assert each == [pytest.approx(h * p) for h, p in zip(hours, prices, strict=True)]
    two = f"{MODEL} --gpus 16,32 --tokens 1T --provider lambda"
    for one in _compared(capsys, two):
        price = price_of("lambda", "h100-sxm-80g").usd_per_gpu_hour
        assert one["cost_to_train"] == pytest.approx(one["gpu_seconds_to_train"] / 3600 * price)


def _compared(capsys: pytest.CaptureFixture[str], what: str) -> Any:
    no_ledger = "" if "--no-ledger" in what else " --no-ledger"
    return answer(capsys, *words(f"compare {what}{no_ledger}"))["compared"]


@pytest.mark.parametrize(
    "typed",
    [
        f"{ASKED} --gpus 16 --provider foo",
        f"{ASKED} --gpus 8:64 --provider foo",
        f"{ASKED} --min-gpus --provider foo",
        f"{ASKED} --gpus 16 --hardware dgx-b300 --provider lambda".replace(
            "--hardware dgx-h100 ", ""
        ),
        f"compare {MODEL} --gpus 16,32 --tokens 1T --provider foo",
        f"compare {MODEL} --gpus 16,32 --price 2",
    ],
)
def test_a_price_that_is_not_known_is_refused_before_the_search(
    typed: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("searched")

    for module in ("recommend", "compare"):
        monkeypatch.setattr(f"fsdpplan.cli.commands.{module}.searched", never)
    monkeypatch.setattr("fsdpplan.cli.resolve.goal.searched", never)
    monkeypatch.setattr("fsdpplan.cli.resolve.fewest.fits_at_all", never)
    assert exit_code_of(words(typed)) == 2
    said = capsys.readouterr().err
    assert "--tokens" in said or "--price" in said
