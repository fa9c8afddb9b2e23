"""`sweep`: its points are those of `recommend`, its CSV parses, what does not fit says why."""

from __future__ import annotations

import csv
import io
from math import exp
from pathlib import Path
from typing import Any

import pytest

from fsdpplan.cli.app import exit_code_of
from fsdpplan.cost.band import NORMAL_80
from fsdpplan.files.clusters import load_cluster
from fsdpplan.search.question import SearchResult
from fsdpplan.search.recommend import recommend
from tests.cli.small import answer, on_a_machine_without_gpus, show, words

QUICK = "--tp 1 --wrap-blocks 1 --loss-chunks 1 --sharding ddp"
QUESTION = "--model llama-3.2-1b --pp 1 --cp 1 --micro-batch 1 --no-ledger"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    on_a_machine_without_gpus(monkeypatch)


def test_a_point_is_what_recommend_says(capsys: pytest.CaptureFixture[str]) -> None:
    given = words(f"sweep {QUESTION} --gpus 4:16 --hardware dgx-h100,dgx-b200")
    found = answer(capsys, *given)
    curves = {(one["hardware"], one["scaling"]): one for one in found["curves"]}
    assert len(curves) == 4
    for (hardware, scaling), curve in curves.items():
        assert [point["gpus"] for point in curve["points"]] == [4, 8, 16]
        batches = [point["global_batch"] for point in curve["points"]]
        assert batches == ([1024] * 3 if scaling == "strong" else [256, 512, 1024])
        for point in curve["points"]:
            if hardware == "dgx-h100":
                direct = answer(
                    capsys,
                    *words(f"recommend {QUESTION} --no-save --hardware {hardware}"),
                    *("--gpus", str(point["gpus"])),
                    *("--global-batch", str(point["global_batch"])),
                )
                assert point["estimate"] == direct["plans"][0]["estimate"]
                assert point["layout"] == direct["plans"][0]["layout"]
        first = curve["points"][0]["estimate"]["tokens_per_second_per_gpu"]
        for point in curve["points"]:
            own = point["estimate"]["tokens_per_second_per_gpu"]
            assert point["efficiency_fraction"] == pytest.approx(own / first)


def test_csv_parses_and_says_why_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    given = words(
        f"sweep {QUESTION} --gpus 1,6,8,16 --hardware dgx-h100 --precision fp32 --dp-shard 8 "
        "--scaling strong --tokens 1T --csv"
    )
    rows = list(csv.DictReader(io.StringIO(show(capsys, *given))))
    assert [row["gpus"] for row in rows] == ["1", "6", "8", "16"]
    for row in rows[:2]:
        assert "does not divide" in row["problem"]
        assert row["step_seconds"] == row["efficiency_fraction"] == ""
    assert all(not row["problem"] and float(row["seconds_to_train"]) > 0 for row in rows[2:])
    assert float(rows[2]["efficiency_fraction"]) == 1
    assert (rows[3]["dp_replicate"], rows[3]["dp_shard"]) == ("2", "8")


def test_the_knee_of_a_slow_network_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    options = "--inter-bw 1Gb/s --hardware dgx-h100 --gpus 16,32,64 --global-batch 64"
    out = show(capsys, *words(f"sweep {QUESTION} {options} --scaling strong"))
    assert max(map(len, out.splitlines())) <= 60
    assert out.count(" knee") == 1
    assert "Knee: 16 GPUs" in out
    assert "GPU hours for each doubling" in " ".join(out.split())


def test_a_point_costs_one_search(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two machines, three points, two curves that share their last point; prices and bands and
    ratios search nothing."""
    asked: list[tuple[str, int, int]] = []

    def counted(**of: Any) -> SearchResult:
        cluster, training = of["cluster"], of["training"]
        asked.append((cluster.name, cluster.gpus, training.global_batch))
        return recommend(**of)

    monkeypatch.setattr("fsdpplan.cli.resolve.found.recommend", counted)
    given = words(f"sweep {QUESTION} {QUICK} --gpus 8:32 --hardware dgx-h100,dgx-b200 --tokens 1T")
    rows = list(csv.DictReader(io.StringIO(show(capsys, *given, "--price", "2,3.5", "--csv"))))
    assert len(rows) == 12
    assert len(asked) == len(set(asked)) == 10
    for row in rows:
        hours = float(row["gpu_seconds_to_train"]) / 3600
        price = 2 if row["hardware"] == "dgx-h100" else 3.5
        assert float(row["price_to_train"]) == pytest.approx(hours * price)


def test_ratios_have_the_error_of_what_does_not_cancel(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of one device the stack cancels, of two devices nothing does."""
    hardware = "--hardware dgx-h100 --inter-bw 20Gb/s,400Gb/s"
    given = words(f"sweep {QUESTION} {QUICK} --gpus 8,16,32 {hardware} --scaling strong")
    found = answer(capsys, *given)
    slow, fast = (one["points"] for one in found["curves"])
    assert [one["hardware"] for one in found["curves"]] == [
        "dgx-h100, inter-bw 2.50 GB/s",
        "dgx-h100, inter-bw 50.0 GB/s",
    ]
    assert slow[0]["estimate"] == fast[0]["estimate"]  # one node has no use for it
    assert all(point["over_first"] is None for point in slow)
    for one, other in zip(slow[1:], fast[1:], strict=True):
        steps = [point["estimate"]["step_seconds"] for point in (one, other)]
        over = other["over_first"]
        assert over["ratio"] == pytest.approx(steps[1]["expected"] / steps[0]["expected"])
        alone = steps[0]["upper"] / steps[0]["expected"] - 1
        assert 0 < over["error_fraction"] < 1.5 * (2**0.5) * alone
    smallest, *others = slow
    assert smallest["efficiency_error_fraction"] == 0
    assert all(0 < point["efficiency_error_fraction"] < 0.5 for point in others)
    device = load_cluster("dgx-h100", gpus=32).cluster.device
    least = exp(NORMAL_80 * device.error.layout_fraction) - 1
    assert all(point["efficiency_error_fraction"] >= least - 1e-9 for point in others)


def test_curves_stand_side_by_side(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = "--gpus 8,16 --hardware dgx-h100,dgx-b200 --scaling strong --price 2 --tokens 1T"
    for width in ("60", "80"):
        monkeypatch.setenv("COLUMNS", width)
        out = show(capsys, *words(f"sweep {QUESTION} {QUICK} {options}"))
        assert max(map(len, out.splitlines())) <= int(width)
        assert out.isascii()
        plain = " ".join(out.split())
        assert "Side by side, strong scaling: A dgx-h100; B dgx-b200" in plain
        assert "price" in plain


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ("--gpus 16:8", 2, "no range"),
        ("--gpus 9:15 --hardware dgx-h100", 2, "no power of two"),
        ("--gpus 8:x", 2, "--gpus"),
        ("--gpus 8 --hardware dgx-h100,nothing", 2, "nothing"),
        ("--gpus 8 --csv --json", 2, "contradict"),
        ("--gpus 8 --hardware dgx-h100 --price 1,2", 2, "--price has 2 values for 1 machines"),
        ("--gpus 8 --hardware dgx-h100 --price 0", 2, "--price"),
        ("--gpus 8 --hardware dgx-h100,dgx-b200 --gpu a,b,c", 2, "one for each"),
        ("--gpus 8 --hardware dgx-h100 --inter-bw 1Gb/s", 2, "has no use on one node"),
        ("--gpus 8 --hardware dgx-h100 --global-batch 1,2", 2, "--global-batch"),
        ("--gpus 1 --hardware dgx-h100 --offload none --headroom 98%", 3, "nothing fits"),
    ],
)
def test_bad_input_is_one_error(
    options: str, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(words(f"sweep {QUESTION} {options}")) == code
    out, err = capsys.readouterr()
    assert said in err
    assert err.count("\n") == 1
    assert code == 3 or "--json" in options or out == ""


def test_without_numbers_it_goes_from_one_gpu_to_many_nodes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = f"sweep {QUESTION} {QUICK} --hardware dgx-h100 --scaling strong"
    assert "up to 64 nodes, 512 GPUs (--gpus)" in show(capsys, *words(given))
    (curve,) = answer(capsys, *words(given))["curves"]
    assert [point["gpus"] for point in curve["points"]] == [2**n for n in range(10)]


@pytest.mark.parametrize(
    ("command", "last"),
    [
        ("sweep --scaling strong", "dgx-h100, 4 GPUs, strong (2 of 2)"),
        (
            "recommend --no-save --tokens 1B --objective fewest-gpus --deadline 9d",
            "4 GPUs (2 of 2)",
        ),
    ],
)
def test_what_is_searched_is_said_where_it_takes_long(
    command: str, last: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fsdpplan.cli.working.QUIET_SECONDS", 0.0)
    monkeypatch.setattr("fsdpplan.cli.working.LINES_SECONDS", 0.0)
    given = f"{command} {QUESTION} {QUICK} --gpus 2,4 --hardware dgx-h100 --global-batch 8"
    assert exit_code_of(words(given)) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "searching: " in line]
    assert len(said) == 2
    assert said[-1] == f"fsdpplan: searching: {last}"
