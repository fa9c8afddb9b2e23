"""Reports in a real browser: drawn, quiet, offline, in the dark, on paper, at each width."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from fsdpplan.report.network import groups
from fsdpplan.report.of_plan import plan_report
from fsdpplan.report.page import page as page_of
from fsdpplan.report.values import Unit, written
from tests.report.browser import WIDTHS, Opened, browser, show
from tests.report.plans import SIZES, plan_of, report_of
from tests.report.test_report import HOSTILE, hostile, mesh_groups


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    with browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    return {gpus: tmp_path_factory.mktemp(f"{gpus}") / "report.html" for gpus in SIZES}


@pytest.fixture
def file(files: dict[int, Path], gpus: int) -> Path:
    return report_file(files, gpus)


def report_file(files: dict[int, Path], gpus: int) -> Path:
    if not files[gpus].exists():
        files[gpus].write_text(page_of(report_of(gpus)), encoding="utf-8")
    return files[gpus]


DRAWN = """
return [...document.querySelectorAll(".drawing")].map((box) => {
  let shapes = box.querySelectorAll("svg path, svg rect").length;
  const canvas = box.querySelector("canvas");
  if (canvas) { // as many as it has colours
    const pixels = new Uint32Array(
      canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.buffer);
    shapes += new Set(pixels.filter((_, place) => place % 5 === 0)).size;
  }
  const {width, height} = box.getBoundingClientRect();
  return [box.id, shapes, width, height];
});
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("gpus", SIZES)
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", sorted(WIDTHS))
def test_all_charts_are_drawn_and_nothing_is_complained_of_or_asked_for(
    chromium: Opened, file: Path, gpus: int, width: str, dark: bool
) -> None:
    asked = show(chromium, file, width=WIDTHS[width], dark=dark)
    assert asked == []
    assert chromium.complaints() == []
    drawn = chromium.script(DRAWN)
    assert drawn
    for name, shapes, wide, high in drawn:
        assert shapes > 2, name
        assert wide > 200, name
        assert high > 60, name
    # Nothing is wider than the window: no page to push about on a phone.
    assert chromium.script("return document.documentElement.scrollWidth") <= WIDTHS[width]


LIT = """
return Object.fromEntries([...document.querySelectorAll("#chart-topology li[data-axis]")]
  .map((one) => [one.dataset.axis, one.dataset.ranks.split(" ").map(Number)]));
"""
PLACE = """
const canvas = document.querySelector("#chart-topology canvas");
canvas.scrollIntoView({block: "center", behavior: "instant"});
const bounds = canvas.getBoundingClientRect(), cell = canvas.cellOf(arguments[0]);
return [bounds.left + cell.x + cell.size / 2, bounds.top + cell.y + cell.size / 2];
"""
COLOR = """
const canvas = document.querySelector("#chart-topology canvas"), cell = canvas.cellOf(arguments[0]);
const scale = canvas.width / canvas.clientWidth;
return [...canvas.getContext("2d").getImageData(
  (cell.x + cell.size * 0.12) * scale, (cell.y + cell.size * 0.12) * scale, 1, 1).data].slice(0, 3);
"""
OPENED = """
const all = document.querySelector("#chart-topology details:not([open])");
if (all) all.open = true;
return all !== null;
"""
"""Ranks of many nodes are behind a line that opens them: one node is drawn."""
RANK = "return Number(document.querySelector('#chart-topology input').value)"


def expected_groups(gpus: int, rank: int) -> dict[str, list[int]]:
    """The groups of a rank on each axis that has several, by the order of the mesh."""
    layout = plan_of(gpus).layout
    found = {}
    for group in groups(layout):
        its = next(
            ranks for ranks in mesh_groups(layout, tuple(group.axis.split("*"))) if rank in ranks
        )
        found[group.axis] = sorted(its)
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("gpus", SIZES)
@pytest.mark.parametrize("width", sorted(WIDTHS))
def test_a_rank_that_is_pointed_at_or_reached_by_keys_shows_its_groups(
    chromium: Opened, file: Path, gpus: int, width: str
) -> None:
    show(chromium, file, width=WIDTHS[width])
    assert chromium.script(OPENED) == (gpus > 128)
    rank = gpus * 3 // 7
    expected = expected_groups(gpus, rank)
    plain = chromium.script(COLOR, rank)
    if width == "phone":
        chromium.tap(*chromium.script(PLACE, rank))
    else:
        chromium.hover(*chromium.script(PLACE, rank))
    chromium.wait_for(f"document.querySelector('#chart-topology input').value == {rank}")
    lit = chromium.script(LIT)
    assert lit.items() <= expected.items()
    # an axis that joins others is drawn where something is sent over it
    assert all("*" in axis for axis in expected.keys() - lit.keys())
    narrowest = min(lit.values(), key=len)
    # read beside the numbers that stand in large cells
    colors = {tuple(chromium.script(COLOR, one)) for one in narrowest if one != rank}
    assert len(colors) == 1
    assert chromium.script(COLOR, rank) not in (plain, *map(list, colors))
    said = chromium.script("return document.querySelector('#chart-topology .rank').textContent")
    assert f"rank {rank:,}: GPU {rank % 8} of node {rank // 8:,}" in said
    for row in plan_of(gpus).estimate.communication:
        assert f"{row.collective} × {row.count:,} a step" in said
    # by keys: they move from where it stands, and stay inside
    chromium.script("document.querySelector('#chart-topology canvas').focus()")
    chromium.key("Home", code=36)
    assert chromium.script(RANK) == 0
    chromium.key("ArrowLeft", code=37)
    assert chromium.script(RANK) == 0
    chromium.key("ArrowRight", code=39)
    assert chromium.script(RANK) == 1
    assert chromium.script(LIT).items() <= expected_groups(gpus, 1).items()
    chromium.key("PageDown", code=34)
    assert chromium.script(RANK) == (9 if gpus > 8 else 1)
    chromium.key("End", code=35)
    assert chromium.script(RANK) == gpus - 1


def test_everything_is_reached_by_tab_and_what_has_focus_is_seen(
    chromium: Opened, files: dict[int, Path]
) -> None:
    show(chromium, report_file(files, 8))
    reached = []
    for _ in range(40):
        chromium.key("Tab", code=9)
        reached.append(
            chromium.script(
                "const one = document.activeElement; return [one.tagName, one.id || one.className"
                " || one.hash || '', getComputedStyle(one).outlineStyle]"
            )
        )
        if reached[-1][0] == "BODY":
            break
    tags = {tag for tag, _, _ in reached}
    assert {"A", "BUTTON", "CANVAS", "INPUT", "SUMMARY"} <= tags
    assert {outline for tag, _, outline in reached if tag != "BODY"} <= {"solid", "auto"}
    assert [reached[0][1]] == ["skip"]


def test_what_is_hovered_over_says_its_numbers(chromium: Opened, files: dict[int, Path]) -> None:
    show(chromium, report_file(files, 512))
    compute = written(plan_of(512).estimate.time.compute_seconds, "seconds")
    x, y = chromium.script(
        "const box = document.getElementById('chart-step');"
        "box.scrollIntoView({block: 'center', behavior: 'instant'});"
        "const {left, top, width, height} = box.getBoundingClientRect();"
        "return [left + width * 0.4, top + height * 0.55]"
    )
    chromium.hover(x, y)
    chromium.wait_for(f"document.getElementById('chart-step').innerText.includes('{compute}')")
    # a stage of the pipeline is chosen by its list, which keys reach
    chosen = "return document.querySelector('#chart-timeline').previousElementSibling.textContent"
    before = chromium.script(chosen)
    chromium.script(
        "const list = document.querySelector('.choice select'); list.value = '0';"
        "list.dispatchEvent(new Event('change'))"
    )
    assert chromium.script(chosen) == "Stage 1" != before
    assert chromium.complaints() == []


MOST = {"bytes": 1e14, "wire_bytes": 1e15, "count": 1e15}
"""Numbers up to which a unit is tried; others up to a billion."""


def test_the_browser_writes_numbers_as_python_does(
    chromium: Opened, files: dict[int, Path]
) -> None:
    show(chromium, report_file(files, 8))
    chance = random.Random(0)
    numbers = [10 ** chance.uniform(-4, 14) for _ in range(300)]
    numbers += [0, 999.4, 999.6]
    numbers += [99.94, 99.96, 9.994, 9.996, 0.9994, 0.9996, 119.9, 120, 7200, 172800]
    for unit in get_args(Unit):
        own = [one for one in numbers if one <= MOST.get(unit, 1e9)]
        if "bytes" in unit:
            own = [round(one) for one in own]
        said = chromium.script(
            "return arguments[0].map((one) => charts.written(one, arguments[1]))", own, unit
        )
        assert said == [written(one, unit) for one in own], unit


def test_the_button_changes_the_look_and_drawings_follow(
    chromium: Opened, files: dict[int, Path]
) -> None:
    show(chromium, report_file(files, 8))
    ground = "return getComputedStyle(document.body).backgroundColor"
    ink = "return document.querySelector('#chart-step text').getAttribute('fill')"
    before = chromium.script(ground), chromium.script(ink)
    chromium.script("document.getElementById('look').click()")
    after = chromium.script(ground), chromium.script(ink)
    assert before[0] != after[0]
    assert before[1] != after[1]
    assert chromium.script("return document.getElementById('look').ariaPressed") == "true"
    # what the system prefers is not what was chosen
    chromium.dark(False)
    assert chromium.script(ground) == after[0]


def test_on_paper_it_is_light_without_tools_and_no_chart_is_cut(
    chromium: Opened, files: dict[int, Path]
) -> None:
    show(chromium, report_file(files, 8), dark=True)
    printed = chromium.pdf()
    assert printed.startswith(b"%PDF")
    assert 1 <= len(re.findall(rb"/Type\s*/Page\b", printed)) <= 12
    assert chromium.complaints() == []
    chromium.command("Emulation.setEmulatedMedia", media="print")
    chromium.script("window.dispatchEvent(new Event('beforeprint'))")
    assert chromium.script("return getComputedStyle(document.body).backgroundColor") == (
        "rgb(255, 255, 255)"
    )
    assert (
        chromium.script("return getComputedStyle(document.querySelector('nav')).display") == "none"
    )
    widths = chromium.script(
        "return [...document.querySelectorAll('.drawing svg, .drawing canvas')]"
        ".map((one) => one.getBoundingClientRect().width)"
    )
    assert max(widths) <= 660
    chromium.script("window.dispatchEvent(new Event('afterprint'))")
    chromium.command("Emulation.setEmulatedMedia", media="")


def test_words_of_others_do_nothing_in_a_browser(chromium: Opened, tmp_path: Path) -> None:
    file = tmp_path / "hostile.html"
    file.write_text(page_of(plan_report(hostile(plan_of(512)), about=HOSTILE)), encoding="utf-8")
    assert show(chromium, file) == []
    assert chromium.complaints() == []
    title = chromium.script("return document.querySelector('h1').textContent")
    assert title == f"Training {HOSTILE}".replace("\u2028", "\\u2028")
