"""Pages as commands write them: their numbers are those of `--json`, and in a browser all is drawn,
nothing is complained of, and who points at a layout is shown it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from fsdpplan.cli.app import exit_code_of
from fsdpplan.files.ledger import append_row
from fsdpplan.report.frontier import SLOWEST
from fsdpplan.run.ledger import finished_row
from fsdpplan.run.verify import finished_run
from tests.cli.small import on_a_machine_without_gpus, words
from tests.report.browser import WIDTHS, Opened, browser, show
from tests.report.runs import gpu_run

QUESTION = (
    "--model llama-3.2-1b --global-batch 64 --tokens 1T --no-ledger --pp 1 --cp 1 "
    "--loss-chunks 1 --wrap-blocks 1 --hardware dgx-h100"
)


@dataclass(frozen=True, slots=True)
class Made:
    """Files by their names, and what commands printed."""

    folder: Path
    answers: dict[str, Any]

    def charts(self, name: str) -> dict[str, Any]:
        """The numbers of each chart of a page."""
        text = (self.folder / name).read_text(encoding="utf-8")
        found = re.search(r'<script type="application/json" id="report-data">(.*?)</script>', text)
        assert found is not None
        return {one["name"]: one["data"] for one in json.loads(found[1])["charts"]}

    def numbers(self, name: str) -> set[float]:
        """The exact numbers of facts and tables."""
        text = (self.folder / name).read_text(encoding="utf-8")
        return {float(value) for value in re.findall(r'<data value="([^"]+)">', text)}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    """What each command writes, once."""
    folder = tmp_path_factory.mktemp("pages")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        on_a_machine_without_gpus(patch)
        run = gpu_run(folder)
        past = finished_row(
            finished_run(run, plan_file=None, folder=folder), folder=run, exit_code=0
        )
        append_row(folder / "past.sqlite", past)
        commands = {
            "plan": f"recommend {QUESTION} --gpus 16 --json",
            "report": "report --gpus 8,16,4096 --price 2 --node-watts 7800 --no-ledger --json",
            "gpus": "what-if --gpus 8 --global-batch 64 --no-ledger --json",
            "inputs": "what-if --sensitivities --no-ledger --json",
            "quick": "report --quick --no-ledger --out quick.html --json",
            "run": f"report --run {run} --quick --ledger past.sqlite --out run.html --json",
            "verify": f"verify {run} --json",
            "compare": f"compare {QUESTION} --gpus 8,16 --report compare.html --json",
            "sweep": f"sweep {QUESTION},dgx-b200 --gpus 8,16 --price 2,3 --scaling strong "
            "--report sweep.html --json",
        }
        yield Made(folder, {name: _answer(text) for name, text in commands.items()})


def _answer(text: str) -> Any:
    """The JSON that a command prints."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = exit_code_of(words(text))
    assert code == 0, err.getvalue()
    return json.loads(out.getvalue())


def _sections(made: Made, name: str) -> list[str]:
    return [one["name"] for one in made.answers[name]["sections"]]


def test_a_report_has_what_was_asked_for_and_no_more(made: Made) -> None:
    whole, quick, run = (_sections(made, name) for name in ("report", "quick", "run"))
    assert {"bill", "scaling", "frontier", "sensitivities"} <= set(whole)
    assert {"scaling", "frontier", "sensitivities"} & {*quick, *run} == set()
    assert run[1:6] == ["measured", "steps", "went", "nccl", "learnt"]
    assert {"measured", "went"} & set(whole) == set()


def test_the_frontier_has_the_plan_and_nothing_better_than_its_line(made: Made) -> None:
    data, search = made.charts("report.html")["frontier"], made.answers["plan"]
    first = search["plans"][0]["estimate"]
    series = {one["name"]: one["points"] for one in data["series"]}
    (own,) = series["this plan"]
    assert (own["x"], own["y"]) == (
        first["memory"]["peak_device_bytes"],
        first["step_seconds"]["expected"],
    )
    assert (own["lower"], own["upper"]) == (
        first["step_seconds"]["lower"],
        first["step_seconds"]["upper"],
    )
    drawn = [point for points in series.values() for point in points]
    fastest = min(point["y"] for point in drawn)
    assert fastest == min(one["estimate"]["step_seconds"]["expected"] for one in search["plans"])
    assert all(point["y"] <= SLOWEST * fastest for point in drawn)
    assert len({point["x"] for point in drawn}) > len(search["plans"])
    # of the line, nothing that is drawn is better in both
    for best in series["best for its memory"]:
        assert not [
            one
            for one in drawn
            if one["x"] <= best["x"]
            and one["y"] <= best["y"]
            and one != best
            and one["name"]
            and (one["x"], one["y"]) != (best["x"], best["y"])
        ]
    # what the plan lists is on the chart
    times = {point["y"] for point in drawn}
    assert {one["estimate"]["step_seconds"]["expected"] for one in search["plans"]} <= times
    text = (made.folder / "report.html").read_text()
    assert f"{search['search']['candidates']:,} layouts were searched" in text


def test_what_it_hangs_on_is_what_what_if_says(made: Made) -> None:
    data = made.charts("report.html")["sensitivities"]
    more = {
        one["more"]["step_elasticity"]
        for one in made.answers["inputs"]["sensitivities"]
        if one["more"] is not None
    }
    drawn = data["series"][0]["values"]
    assert set(drawn) <= more
    strengths = [abs(value) for value in drawn]
    assert strengths[0] == max(strengths)
    worth = made.charts("report.html")["measure"]
    bands = {one["band_fraction"] for one in made.answers["inputs"]["measurements"]}
    assert set(worth["series"][0]["values"]) <= bands


def test_a_point_of_the_curve_is_what_what_if_says(made: Made) -> None:
    curve, *_ = made.charts("report.html")["scaling"]["series"]
    points = dict(map(tuple, curve["points"]))
    best = made.answers["gpus"]["best"]["estimate"]
    assert points[8] == best["tokens_per_second"]
    assert points[16] == made.answers["plan"]["plans"][0]["estimate"]["tokens_per_second"]
    ((gpus, lower, upper), *_) = curve["band"]
    step = best["step_seconds"]
    assert gpus == 8
    assert lower == pytest.approx(best["tokens_per_second"] * step["expected"] / step["upper"])
    assert lower < points[8] < upper
    # what does not work is said
    assert 4096 not in points
    assert "Nothing on 4,096 GPUs" in (made.folder / "report.html").read_text()


def test_a_run_is_what_verify_says_and_teaches_the_next_plan(made: Made) -> None:
    said, charts = made.answers["verify"], made.charts("run.html")
    shown = made.numbers("run.html")
    assert {row["measured"] for row in said["comparison"]} <= shown
    before, *_, after = charts["learnt"]["rows"]
    measured = said["measured"]["step_seconds"]
    assert abs(after["expected"] - measured) < abs(before["expected"] - measured)
    # the ledger had this run: it is not known before itself
    assert before["name"] == "by the cost model"
    assert len(charts["learnt"]["rows"]) == 2


def test_plans_side_by_side_are_what_compare_says(made: Made) -> None:
    said, charts = made.answers["compare"]["compared"], made.charts("compare.html")
    rates = [row["expected"] for row in charts["rates"]["rows"]]
    assert rates == [one["estimate"]["tokens_per_second"] for one in said]
    time = charts["time"]
    for at, one in enumerate(said):
        tokens = one["training"]["global_batch"] * one["training"]["seq_len"]
        million = sum(series["values"][at] for series in time["series"]) * tokens / 1e6
        assert million == pytest.approx(one["estimate"]["step_seconds"]["expected"])
    shown = made.numbers("compare.html")
    assert {one["estimate"]["mfu_fraction"] for one in said} <= shown


def test_curves_are_what_sweep_says(made: Made) -> None:
    said, charts = made.answers["sweep"]["curves"], made.charts("sweep.html")
    drawn = charts["scaling"]["series"]
    for curve, series in zip(said, drawn, strict=False):
        assert series["points"] == [
            [point["gpus"], point["estimate"]["tokens_per_second"]] for point in curve["points"]
        ]
    prices = [point[1] for series in charts["price"]["series"] for point in series["points"]]
    told = [point["price_to_train"] for curve in said for point in curve["points"]]
    assert prices == pytest.approx(told)


def test_a_sweep_says_in_words_what_more_gpus_bring(made: Made) -> None:
    text = (made.folder / "sweep.html").read_text(encoding="utf-8")
    short = text[text.index('<section id="summary"') : text.index('<section id="scaling"')]
    for curve in made.answers["sweep"]["curves"]:
        first, last = (curve["points"][at]["estimate"]["tokens_per_second"] for at in (0, -1))
        assert f"grow {last / first:.3g} times, from {first:,.0f} to {last:,.0f}" in short
        assert f"{50 * last / first:.1f} % of what it does" in short
        prices = [f", for {point['price_to_train']:,.0f}" for point in curve["points"]]
        assert "1.00 T tokens take" in short
        assert all(price in short for price in prices)


def test_a_sweep_of_which_nothing_fits_says_so(made: Made, tmp_path: Path) -> None:
    page = tmp_path / "none.html"
    asked = "sweep --model llama-3.1-405b --hardware dgx-h100 --gpus 1,2 --no-ledger"
    assert exit_code_of([*words(f"{asked} --report"), str(page)]) == 3
    assert "Nothing fits on dgx-h100" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("report --run nowhere --no-ledger", "nowhere does not exist"),
        ("report --gpus 8:4 --no-ledger", "no range"),
        ("report --price 2 --provider aws --no-ledger", "contradict"),
        ("report --quick --deadline-chance 80%", "--deadline"),
        ("report nothing.json --quick", "nothing.json"),
        ("compare fsdpplan.json fsdpplan.json --report .", "choose another --report"),
        ("sweep --params 1e9 --gpus 8 --report gone/sweep.html", "choose another --report"),
    ],
)
def test_bad_input_is_one_sentence_and_writes_nothing(
    given: str,
    says: str,
    made: Made,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(made.folder)
    before = sorted(made.folder.iterdir())
    assert exit_code_of(words(given)) == 2
    err = capsys.readouterr().err
    assert says in err
    assert "Traceback" not in err
    assert sorted(made.folder.iterdir()) == before


def test_a_bill_without_tokens_says_which_option_is_missing(
    made: Made,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    document = json.loads((made.folder / "fsdpplan.json").read_text())
    document["training"]["tokens"] = None
    (tmp_path / "fsdpplan.json").write_text(json.dumps(document))
    monkeypatch.chdir(tmp_path)
    assert exit_code_of(words("report --quick --price 2")) == 2
    assert "--tokens" in capsys.readouterr().err
    assert exit_code_of(words("report --quick --price 2 --tokens 2T --no-ledger")) == 0


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    with browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


PAGES = ("report.html", "run.html", "compare.html", "sweep.html")

DRAWN = """
return [...document.querySelectorAll(".drawing")].map((box) =>
  [box.id, box.querySelectorAll("svg path, svg rect, canvas").length]);
"""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", sorted(WIDTHS))
@pytest.mark.parametrize("name", PAGES)
def test_all_is_drawn_and_nothing_complained_of(
    chromium: Opened, made: Made, name: str, width: str, dark: bool
) -> None:
    assert show(chromium, made.folder / name, width=WIDTHS[width], dark=dark) == []
    assert chromium.complaints() == []
    drawn = dict(map(tuple, chromium.script(DRAWN)))
    assert set(drawn) >= {f"chart-{chart}" for chart in made.charts(name)}
    assert all(shapes > 2 for shapes in drawn.values()), drawn
    assert chromium.script("return document.documentElement.scrollWidth") <= WIDTHS[width]


POINT = """
const box = document.getElementById("chart-frontier");
box.scrollIntoView({block: "center", behavior: "instant"});
const chart = echarts.getInstanceByDom(box), bounds = box.getBoundingClientRect();
const [x, y] = chart.convertToPixel({gridIndex: 0}, arguments[0]);
return [bounds.left + x, bounds.top + y];
"""


def test_who_points_at_a_layout_is_shown_it(chromium: Opened, made: Made) -> None:
    show(chromium, made.folder / "report.html")
    (own,) = made.charts("report.html")["frontier"]["series"][0]["points"]
    chromium.hover(*chromium.script(POINT, [own["x"], own["y"]]))
    chromium.wait_for(
        f"document.getElementById('chart-frontier').textContent.includes({json.dumps(own['name'])})"
    )
    said = chromium.script("return document.getElementById('chart-frontier').textContent")
    policy = dict(map(tuple, own["details"]))["policy"]
    assert policy in said
