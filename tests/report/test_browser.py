"""Reports in a real browser: drawn, quiet, offline, in the dark, on paper, at each width."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdpplan.report.of_plan import plan_report
from fsdpplan.report.page import page as page_of
from tests.report.browser import WIDTHS, Opened, browser, show
from tests.report.plans import SIZES, plan_of


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    with browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    return {gpus: tmp_path_factory.mktemp(f"{gpus}") / "report.html" for gpus in SIZES}


@pytest.fixture
def file(files: dict[int, Path], gpus: int) -> Path:
    if not files[gpus].exists():
        report = plan_report(plan_of(gpus), about="fsdpplan.json")
        files[gpus].write_text(page_of(report), encoding="utf-8")
    return files[gpus]


DRAWN = """
return [...document.querySelectorAll(".drawing")].map((box) => {
  const shapes = box.querySelectorAll("svg path, svg rect, canvas").length;
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
