"""Pipelines: stages as they are priced, and every schedule on real gloo as one process."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, fields
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fsdpplan.cost.schedule import stages as priced
from fsdpplan.cost.traffic.rank import step_calls
from fsdpplan.files.clusters import load_cluster
from fsdpplan.search.rules import rule as legality
from fsdpplan.spec.layout import SPLIT_BACKWARD_SCHEDULES, Layout, Schedule
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import Case
from fsdpplan.spec.training import Training
from fsdpplan.trainer.config import PlanConfig, parse_plan
from fsdpplan.trainer.errors import TrainerError
from fsdpplan.trainer.parallel.pipeline_stages import rank_shares
from fsdpplan.trainer.parallel.support import SCHEDULES, pipeline_problems, require_runnable
from fsdpplan.trainer.step import require_gradients
from tests.trainer import jobs, pipeline_layouts, plans

LOSS_TOLERANCE = 5e-6
"""Sums in another order: 5e-7 was the largest difference seen in losses near 4."""
NORM_TOLERANCE = 1e-4
"""Adam turns rounding into differences of about 1e-5 in the weights; norms are near 1."""

gloo = pytest.mark.gloo

Results = dict[str, Any]


@pytest.fixture(scope="module")
def measured(
    tmp_path_factory: pytest.TempPathFactory, asked: Callable[[str], set[Any]]
) -> dict[int, Results]:
    """World -> name -> losses and norms."""
    folder = tmp_path_factory.mktemp("pipelines")
    function = "tests.trainer.pipeline_layouts:measure_layouts"
    return {
        world: jobs.measured(world, function, folder / f"{world}.json", asked=asked("name"))
        for world in {4, *asked("world")}
    }


@pytest.fixture(scope="module")
def others(measured: dict[int, Results]) -> Results:
    """What else 4 ranks measured."""
    return measured[4]


FP32_CASES = [
    (world, model, name)
    for world, models in pipeline_layouts.FP32.items()
    for model, layouts in models.items()
    for name in layouts
]


@pytest.mark.sampled(1)
@gloo
@pytest.mark.parametrize(("world", "model", "name"), FP32_CASES)
def test_a_pipeline_loses_as_one_process(
    measured: dict[int, Results], world: int, model: str, name: str
) -> None:
    expected, found = measured[world][f"reference_{model}"], measured[world][name]
    steps = pipeline_layouts.STEPS
    assert found["losses"] == pytest.approx(expected["losses"][:steps], abs=LOSS_TOLERANCE)
    assert found["norms"] == pytest.approx(expected["norms"][:steps], abs=NORM_TOLERANCE)


@gloo
@pytest.mark.parametrize("name", pipeline_layouts.HALF)
def test_half_precision_begins_as_fp32_does(
    measured: dict[int, Results], others: Results, name: str
) -> None:
    expected, found = measured[4]["reference_plain"], others[name]
    assert found["losses"][0] == pytest.approx(expected["losses"][0], abs=0.01)
    assert found["norms"][0] == pytest.approx(expected["norms"][0], rel=0.03)
    assert found["losses"][-1] < found["losses"][0]


PRICED_ROWS = {("send", "pp"), ("all_gather", "dp_shard"), ("reduce_scatter", "dp_shard")}
PRICED_ROWS |= {("all_reduce", "dp_replicate")}
"""Beside these, the gradient norm and what tensor parallelism does: tested elsewhere."""


@gloo
@pytest.mark.parametrize("name", pipeline_layouts.MESSAGES)
def test_ranks_send_gather_and_reduce_what_is_priced(others: Results, name: str) -> None:
    layout_of, model_of = pipeline_layouts.MESSAGES[name], pipeline_layouts.counted_model(name)
    case = _case(plans.plan_document(model=model_of, **layout_of))
    layout = case.layout
    stages = priced.pipeline_ranks(model=case.model, layout=layout)
    for rank, counted in enumerate(others[f"counted_{name}"]):
        stage = stages[rank // (layout.world // layout.pp)]
        expected: dict[str, list[int]] = {}
        for call in step_calls(case, stage):
            collective = "send" if call.collective == "send_recv" else call.collective
            if (collective, call.group.axis) in PRICED_ROWS and call.group.ranks > 1 and call.count:
                row = expected.setdefault(f"{collective} {call.group.axis} {call.dtype}", [0, 0])
                row[0] += call.count
                row[1] += call.count * call.call_bytes
        found = {key: row for key, row in counted.items() if tuple(key.split()[:2]) in PRICED_ROWS}
        assert found == expected, f"rank {rank}"


@gloo
@pytest.mark.parametrize("name", pipeline_layouts.DOCUMENTS)
def test_every_stage_keeps_documents_apart(others: Results, name: str) -> None:
    found, expected = others[f"documents_{name}"]
    assert found == pytest.approx(expected, abs=LOSS_TOLERANCE)


@gloo
def test_a_stage_that_fails_ends_the_job(tmp_path: Path) -> None:
    function = "tests.trainer.pipeline_layouts:fail_on_the_last_stage"
    finished = jobs.forked(2, function, tmp_path / "plan.json")
    assert finished.returncode == 1
    assert "the last stage fails" in finished.stderr


def _case(document: dict[str, Any]) -> Case:
    """A plan's document as the planner has it."""
    named = {field.name for field in fields(Training)}
    layout = Layout(
        **{**document["layout"], "stage_blocks": tuple(document["layout"]["stage_blocks"])}
    )
    return Case(
        model=Model(**document["model"]),
        cluster=load_cluster("cpu", gpus=layout.world).cluster,
        training=Training(**{k: v for k, v in document["training"].items() if k in named}),
        layout=layout,
    )


def test_a_parameter_without_a_gradient_is_named() -> None:
    model = torch.nn.ModuleDict({"used": torch.nn.Linear(2, 1), "unused": torch.nn.Linear(2, 1)})
    model["used"](torch.ones(2)).backward()
    with pytest.raises(TrainerError, match=r"unused\.weight has no gradient"):
        require_gradients(model)


def _plan(layout: Layout, *, layers: int) -> PlanConfig:
    """Of a layout, its stages named."""
    said = asdict(layout)
    if not layout.stage_blocks:
        del said["stage_blocks"]
    return parse_plan(plans.plan_text(model={"layers": layers}, **said))


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Layout, int]:
    """(layout with a pipeline, blocks); most are legal."""
    schedule, pp = draw(st.sampled_from(SCHEDULES)), draw(st.integers(2, 6))
    several = {"gpipe": (1,), "1f1b": (1,), "zbv": (2,), "dualpipev": (2,)}
    virtual_stages = draw(st.sampled_from(several.get(schedule, (1, 2, 3))))
    stages = pp * virtual_stages
    named = draw(st.lists(st.integers(0, 3), min_size=stages, max_size=stages) | st.just([]))
    sharding = draw(st.sampled_from(("ddp", "fsdp")))
    splits = schedule in SPLIT_BACKWARD_SCHEDULES
    layout = Layout(
        pp=pp,
        virtual_stages=virtual_stages,
        stage_blocks=tuple(named),
        schedule=schedule,
        num_microbatches=draw(st.sampled_from((pp, 2 * pp, 3 * pp)) | st.integers(1, 14)),
        sharding=sharding,
        reshard_after_forward="never" if sharding == "fsdp" else "always",
        gradient_sync="last",
        activation_checkpointing=draw(st.sampled_from(("none", "full"))),
        compile=not splits and draw(st.booleans()),
    )
    return layout, sum(named) or stages + draw(st.integers(0, 30))


def test_the_planner_names_the_same_schedules() -> None:
    assert set(SCHEDULES) == set(get_args(Schedule)) - {"none"}


@settings(deadline=None)
@given(pipelines())
def test_the_ranks_share_all_blocks_as_priced(drawn: tuple[Layout, int]) -> None:
    layout, layers = drawn
    plan = _plan(layout, layers=layers)
    assume(not pipeline_problems(plan))
    shares = [rank_shares(plan, pp_rank=rank) for rank in range(layout.pp)]
    held = tuple(tuple(share.index for share in of_rank) for of_rank in shares)
    assert held == priced.layout_rank_stages(layout)
    everyones = sorted((share for of_rank in shares for share in of_rank), key=attrgetter("index"))
    assert [block for share in everyones for block in share.blocks] == list(range(layers))
    assert [share.is_first for share in everyones] == [True] + [False] * (len(everyones) - 1)
    assert [share.is_last for share in everyones] == [False] * (len(everyones) - 1) + [True]


@settings(deadline=None)
@given(pipelines())
def test_what_the_search_may_return_is_not_refused(drawn: tuple[Layout, int]) -> None:
    layout, layers = drawn
    model = Model(**{**plans.MODEL, "layers": layers})
    assume(not list(legality.pipeline_problems(model=model, layout=layout)))
    assert pipeline_problems(_plan(layout, layers=layers)) == []


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"schedule": "1f1b", "pp": 1}, "schedule 1f1b with 1 virtual stages and pp 1"),
        ({"schedule": "none"}, "schedule none with pp 2"),
        ({"schedule": "gpipe", "virtual_stages": 2}, "virtual_stages 2 (1 works)"),
        ({"schedule": "zbv", "virtual_stages": 1}, "virtual_stages 1 (2 works)"),
        ({"schedule": "1f1b", "num_microbatches": 1}, "at least 2 work"),
        ({"schedule": "dualpipev", "virtual_stages": 2, "num_microbatches": 2}, "at least 4"),
        ({"schedule": "interleaved_1f1b", "num_microbatches": 7}, "a multiple of 3 works"),
        ({"stage_blocks": []}, "does not name the blocks of its 2 stages, as older plans do not"),
        ({"pp": 5, "stage_blocks": [1] * 5}, "for 5 stages and 4 blocks"),
        ({"stage_blocks": [3, 2]}, "which add up to all blocks"),
        ({"pp": 3, "stage_blocks": [2, 0, 2]}, "each rank needs a block"),
        ({"gradient_sync": "every"}, "gradient_sync every with pp 2 (last works"),
        ({"reshard_after_forward": "always"}, "reshard_after_forward always with pp 2"),
        (
            {"schedule": "zbv", "virtual_stages": 2, "activation_checkpointing": "op"},
            "activation_checkpointing op with schedule zbv",
        ),
        ({"schedule": "zbv", "virtual_stages": 2, "compile": True}, "compile with schedule zbv"),
    ],
)
def test_a_pipeline_that_torch_cannot_run_is_refused_in_words(
    layout: dict[str, Any], said: str
) -> None:
    plan = parse_plan(plans.plan_text(**{**pipeline_layouts.PIPED, "micro_batch": 1, **layout}))
    with pytest.raises(TrainerError, match=re.escape(said)):
        require_runnable(plan)
