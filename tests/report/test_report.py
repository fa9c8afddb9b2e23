"""Reports as values and as text: their numbers are the plan's, their words are escaped."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from html.parser import HTMLParser
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.bill import bill
from fsdpplan.cost.network.placement import Group
from fsdpplan.cost.timeline.events import MemoryPoint
from fsdpplan.files.plans import estimate_document
from fsdpplan.report.memory import memory_section, thinned
from fsdpplan.report.network import groups, topology_data, traffic_of
from fsdpplan.report.of_plan import plan_report
from fsdpplan.report.page import ECHARTS_SHA256, ECHARTS_VERSION, asset, json_in_html, page
from fsdpplan.report.summary import subtitle, summary_section, title
from fsdpplan.report.timeline import laid_out
from fsdpplan.report.values import Cell, Chart, Facts, Notes, Report, Table, written
from fsdpplan.run.plans import read_plan
from fsdpplan.spec.layout import MESH_AXES, Layout
from fsdpplan.spec.plan import Interval, Plan, RankedLayout, Terms
from tests.report.plans import SIZES, plan_of, plan_with, report_of

PLANS = Path(__file__).parents[1] / "recordings" / "0.2.0" / "plans"
RECORDED = ("corrected", "fp8", "mixture", "offload", "pipeline", "reshard", "weak")
"""Plans of an earlier version, which predicted otherwise."""

HOSTILE = "</script><img src=x onerror=alert(1)>&'\"\u2028$policy ${title}"


def test_the_library_is_the_one_that_npm_has() -> None:
    script = asset("echarts/echarts.min.js")
    assert hashlib.sha256(script.encode()).hexdigest() == ECHARTS_SHA256
    assert f'version="{ECHARTS_VERSION}"' in script or f'"{ECHARTS_VERSION}"' in script
    assert len(script) < 1_200_000
    assert "Apache License" in asset("echarts/LICENSE")
    assert "Apache ECharts" in asset("echarts/NOTICE")


def numbers_of(report: Report) -> set[float]:
    """All exact numbers that a page shows, in facts, tables and drawings."""
    found: set[float] = set()

    def collect(value: object) -> None:
        if isinstance(value, bool) or value is None or isinstance(value, str):
            return
        if isinstance(value, int | float):
            found.add(float(value))
        elif isinstance(value, dict):
            for one in value.values():
                collect(one)
        elif isinstance(value, Cell):
            collect(value.exact)
        elif isinstance(value, list | tuple | set):
            for one in value:
                collect(one)

    for section in report.sections:
        for block in section.blocks:
            if isinstance(block, Facts):
                collect([one.exact for one in block.items])
            if isinstance(block, Table):
                collect(block.rows)
            if isinstance(block, Chart):
                collect(block.data)
                collect(() if block.table is None else block.table.rows)
    return found


@pytest.mark.sampled(6)
@pytest.mark.parametrize("of", [*SIZES, *RECORDED])
def test_the_numbers_are_those_of_the_plans_json(of: int | str) -> None:
    if isinstance(of, int):
        plan, shown = plan_of(of), numbers_of(report_of(of))
    else:
        plan = read_plan(PLANS / f"{of}.json")
        shown = numbers_of(plan_report(plan, about="p.json"))
    document = json.loads(json.dumps(estimate_document(plan.estimate)))
    memory, time = document["memory"], document["time"]
    wanted = {
        "step": document["step_seconds"]["expected"],
        "tokens": document["tokens_per_second"],
        "compute": time["compute_seconds"],
        "fits": memory["fits_fraction"],
        "allocated": memory["peak_allocated_bytes"],
        "reserved": memory["peak_reserved_bytes"],
        "device": memory["peak_device_bytes"],
        "activations": memory["activations_bytes"],
        **{f"stage {at}": peak for at, peak in enumerate(memory["stage_peak_device_bytes"])},
    }
    for at, row in enumerate(document["communication"]):
        for field in ("bytes", "seconds", "count", "ranks", "exposed_seconds"):
            wanted[f"{at} {field}"] = row[field]
    assert {name for name, value in wanted.items() if value and value not in shown} == set()


@pytest.mark.parametrize("gpus", SIZES)
def test_the_streams_of_the_drawn_step_are_those_of_the_estimate(gpus: int) -> None:
    plan = plan_of(gpus)
    report = report_of(gpus)
    charts = {chart.name: chart for chart in report.charts}
    assert ("schedule" in charts) == (plan.layout.pp > 1)
    time = plan.estimate.time
    if plan.layout.pp > 1:
        drawn = charts["schedule"].data
        assert drawn["tick"] * 1e6 == pytest.approx(time.total_seconds)
        shares = lane_seconds(drawn)
        assert len(shares) == plan.layout.pp
        table = charts["schedule"].table
        assert table is not None
        # the rank that computes most has the estimate's own terms
        rows = [[one.exact for one in row if isinstance(one, Cell)] for row in table.rows]
        assert any(
            row[0] == pytest.approx(time.compute_seconds)
            and row[1] == pytest.approx(time.exposed_communication_seconds)
            and row[2] == pytest.approx(time.bubble_seconds)
            for row in rows
        )
        for lane, row in zip(shares, rows, strict=True):
            # all of each lane is drawn: nothing is left out between two spans, or drawn twice
            assert lane == pytest.approx(time.total_seconds, rel=2e-3)
            assert sum(one for one in row[:4] if one) == pytest.approx(time.total_seconds)
    for choice in charts["timeline"].data["choices"]:
        for lane, start, length, kind, name, *_ in choice["spans"]:
            assert 0 <= start <= start + length <= 1_000_000
            assert lane < len(choice["lanes"])
            assert kind < len(choice["kinds"])
            assert name < len(choice["names"])


def lane_seconds(drawn: Mapping[str, Any]) -> list[float]:
    """How long each lane is busy, in what is drawn of it."""
    lanes = [0] * len(drawn["lanes"])
    for lane, _, length, *_ in drawn["spans"]:
        lanes[lane] += length
    return [ticks * drawn["tick"] for ticks in lanes]


@pytest.mark.parametrize("gpus", SIZES)
def test_memory_over_the_step_reaches_the_peak_of_the_plan(gpus: int) -> None:
    plan = plan_of(gpus)
    held = next(one for one in report_of(gpus).charts if one.name == "held").data
    chosen = held["choices"][held["chosen"]] if "choices" in held else held
    sums = map(sum, zip(*(one["values"] for one in chosen["series"]), strict=True))
    mib = max(sums)
    peak = plan.estimate.memory.peak_allocated_bytes / 2**20
    assert abs(mib - peak) <= len(chosen["series"])  # each is a whole number of them
    assert len(chosen["at"]) == len(chosen["series"][0]["values"]) <= 242


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=60), st.integers(1, 40))
def test_thinned_memory_keeps_its_peak_and_its_order(heights: list[int], most: int) -> None:
    points = [
        MemoryPoint(
            rank=0,
            start_seconds=float(at),
            phase="forward",
            parameters_bytes=height,
            optimizer_bytes=0,
            gradients_bytes=0,
            unsharded_parameters_bytes=0,
            unsharded_gradients_bytes=0,
            activations_bytes=0,
            logits_bytes=0,
            temporaries_bytes=0,
        )
        for at, height in enumerate(heights)
    ]
    kept = thinned(points, most)
    assert len(kept) == min(most, len(points))
    assert max(one.parameters_bytes for one in kept) == max(heights)
    assert [one.start_seconds for one in kept] == sorted({one.start_seconds for one in kept})


def test_a_plan_of_another_version_says_that_what_is_drawn_is_of_this_one() -> None:
    plan = plan_of(512)
    time = plan.estimate.time
    older = replace(time, compute_seconds=time.compute_seconds * 1.1)
    other = replace(
        plan, estimate=replace(plan.estimate, time=older), versions=(("fsdpplan", "0.0.1"),)
    )
    report = plan_report(other, about="p.json")
    said = [
        one.text
        for section in report.sections
        for block in section.blocks
        if isinstance(block, Notes)
        for one in block.items
    ]
    assert any("predicted by fsdpplan 0.0.1" in text for text in said)
    assert older.total_seconds in numbers_of(report) or older.compute_seconds in numbers_of(report)


class Seen(HTMLParser):
    """Elements, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.handlers: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(str(value))
            if name in ("src", "href"):
                self.addresses.append(str(value))
            if name.startswith("on"):
                self.handlers.append(name)


def hostile(plan: Plan) -> Plan:
    """The plan with words that would break out of HTML."""
    return replace(
        plan,
        model=replace(plan.model, name=HOSTILE),
        warnings=(HOSTILE,),
        assumptions=(HOSTILE,),
        sources=((HOSTILE, HOSTILE),),
        rules=tuple(replace(one, says=HOSTILE, advice=HOSTILE) for one in plan.rules),
    )


def test_words_of_others_stay_words() -> None:
    plan = plan_of(512)
    usual, seen = (
        Seen(page(plan_report(one, about=about)))
        for one, about in ((plan, "fsdpplan.json"), (hostile(plan), HOSTILE))
    )
    assert "img" not in seen.tags
    assert seen.handlers == []
    assert [tag for tag in seen.tags if tag == "script"] == ["script"] * 5
    assert seen.addresses == usual.addresses
    assert all(one.startswith(("#", "data:")) for one in seen.addresses)
    assert len(set(seen.ids)) == len(seen.ids)


@given(st.lists(st.text(max_size=8) | st.integers(), max_size=4))
def test_data_in_a_script_are_json_and_cannot_end_it(document: object) -> None:
    text = json_in_html(document)
    assert not set(text) & set("<>&\u2028\u2029")
    assert json.loads(text) == document


def test_the_page_lets_nothing_run_but_its_own_scripts_and_load_nothing() -> None:
    text = page(report_of(8))
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', text)
    assert policy is not None
    rules = dict(one.split(" ", 1) for one in policy[1].split("; "))
    assert rules["default-src"] == "'none'"
    assert "unsafe" not in rules["script-src"]
    assert rules["script-src"].count("sha256-") == 4


def test_the_summary_says_what_a_person_would() -> None:
    plan = plan_of(8)
    wide = replace(plan.estimate, step_seconds=Interval(lower=1.0, expected=3.0, upper=9.0))
    processes = replace(plan.cluster.device, kind="cpu")
    typed = replace(
        plan,
        estimate=wide,
        model=replace(plan.model, name="custom"),
        cluster=replace(plan.cluster, device=processes),
    )
    for one, sure in ((plan, "± "), (typed, "within a factor of 3.0")):
        facts = next(block for block in summary_section(one).blocks if isinstance(block, Facts))
        found = {fact.name: fact.note for fact in facts.items}
        assert found["One step"].startswith(sure)
    assert subtitle(typed).startswith("8 processes on one node of dgx-h100; ")
    assert title(typed) == "Training a model of your own"
    said = str(memory_section(typed, laid_out(typed)))
    assert "nvidia-smi" not in said
    assert "torch.cuda" not in said


def test_days_and_money_come_first_where_they_are_known() -> None:
    plan = plan_of(8)
    asked = replace(plan, training=replace(plan.training, tokens=10**12))

    def large(one: Plan) -> list[str]:
        blocks = (block for block in summary_section(one).blocks if isinstance(block, Facts))
        first = next(blocks)
        return [fact.name for fact in first.items] if first.large else []

    assert large(plan) == []
    assert large(asked) == ["The whole training", "GPU hours"]
    priced = replace(asked, terms=Terms(price=2.5))
    assert large(priced) == ["The whole training", "Cost"]
    found = bill(priced.case, priced.estimate, Terms(price=2.5))
    assert found is not None
    assert found.cost is not None
    facts = next(block for block in summary_section(priced).blocks if isinstance(block, Facts))
    assert facts.items[1].exact == found.cost.expected


def test_the_alternatives_come_before_the_machine() -> None:
    plan = plan_of(8)
    first = RankedLayout(rank=1, layout=plan.layout, estimate=plan.estimate, reason="the fastest")
    second = replace(first, rank=2, layout=replace(plan.layout, compile=False), reason="slower")
    listed = plan_report(replace(plan, alternatives=(first, second)), about="plan.json")
    names = [one.name for one in listed.sections]
    assert names.index("alternatives") < names.index("topology")
    (table,) = next(one for one in listed.sections if one.name == "alternatives").blocks
    assert isinstance(table, Table)
    assert [row[-1] for row in table.rows] == ["this one", "slower"]
    assert "alternatives" not in [one.name for one in report_of(8).sections]


@pytest.mark.parametrize("gpus", SIZES)
def test_a_page_is_below_2_mb(gpus: int) -> None:
    assert len(page(report_of(gpus)).encode()) < 2_000_000


def ranks_of(group: Group, world: int) -> set[frozenset[int]]:
    """All groups of a shape: every stride-th of neighbouring ranks."""
    block = group.ranks * group.stride
    return {
        frozenset(start + place + at * group.stride for at in range(group.ranks))
        for start in range(0, world, block)
        for place in range(group.stride)
    }


def mesh_groups(layout: Layout, axes: tuple[str, ...]) -> set[frozenset[int]]:
    """The groups over some axes, from the order of the mesh: the innermost axis counts fastest."""
    sizes = [getattr(layout, axis) for axis in MESH_AXES]
    found: dict[tuple[int, ...], set[int]] = {}
    for rank in range(prod(sizes)):
        rest, place = rank, []
        for size in reversed(sizes):
            rest, here = divmod(rest, size)
            place.append(here)
        fixed = tuple(
            here for axis, here in zip(MESH_AXES, reversed(place), strict=True) if axis not in axes
        )
        found.setdefault(fixed, set()).add(rank)
    return {frozenset(ranks) for ranks in found.values()}


degrees = st.sampled_from([1, 2, 3, 4])


@given(degrees, degrees, degrees, degrees, degrees)
def test_groups_are_those_of_the_mesh(
    pp: int, replicate: int, shard: int, cp: int, tp: int
) -> None:
    layout = Layout(
        pp=pp,
        dp_replicate=replicate,
        dp_shard=shard,
        cp=cp,
        tp=tp,
        schedule="none" if pp == 1 else "1f1b",
        num_microbatches=4,
    )
    for group in groups(layout):
        axes = tuple(group.axis.split("*"))
        # an axis of one rank may stand in a name or not
        assert ranks_of(group, layout.world) == mesh_groups(layout, axes)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama-3.1-8b", Layout(dp_shard=8, micro_batch=1, num_microbatches=2)),
        (
            "llama-3.1-8b",
            Layout(dp_replicate=4, dp_shard=8, tp=2, sequence_parallel=True, loss_parallel=True),
        ),
        ("llama-3.1-8b", Layout(dp_replicate=16, sharding="ddp", num_microbatches=2)),
        ("llama-3.1-8b", Layout(dp_replicate=2, dp_shard=8, sharding="zero1")),
        ("llama-3.1-8b", Layout(dp_shard=16, reshard_after_forward=8)),
        ("qwen3-30b-a3b", Layout(dp_shard=16, ep=8, micro_batch=1)),
        ("qwen3-30b-a3b", Layout(dp_shard=8, cp=2, ep=4, tp=2, sequence_parallel=True)),
    ],
)
def test_all_traffic_is_on_an_axis_that_is_drawn(name: str, layout: Layout) -> None:
    plan = plan_with(name, layout, rules=())
    drawn = {
        (one.axis, one.ranks, one.collective, one.dtype)
        for group in groups(layout)
        for one in traffic_of(group, plan)
    }
    sent = {
        (one.axis, one.ranks, one.collective, one.dtype)
        for one in plan.estimate.communication
        if one.ranks > 1
    }
    assert drawn == sent
    axes = topology_data(plan)["axes"]
    assert sum(len(axis["traffic"]) for axis in axes) == len(plan.estimate.communication)


@given(st.floats(1e-6, 1e7), st.sampled_from(["seconds", "bytes", "wire_bytes", "count"]))
def test_numbers_are_written_with_their_unit(number: float, unit: str) -> None:
    assert re.fullmatch(r"[\d.,e+-]+( [A-Za-z]+)?", written(number, unit))  # type: ignore[arg-type]
