"""Plans that are read to be run name the stages of their pipelines."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from fsdpplan.cost.estimate import estimate
from fsdpplan.cost.schedule.stages import layout_stage_blocks
from fsdpplan.emit.folder import SCRIPT_NAME
from fsdpplan.emit.job import Job
from fsdpplan.emit.slurm.header import PLAN_NAME
from fsdpplan.errors import SpecError
from fsdpplan.files import plans as files
from fsdpplan.run.launch import emit_script, read_launch, resolve_launch
from fsdpplan.run.plans import plan_from_json, read_plan, with_stages
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import Plan, RankedLayout
from fsdpplan.trainer.config import parse_plan
from fsdpplan.trainer.parallel.support import require_runnable

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "tests" / "recordings" / "0.2.0" / "plans"
OLD = RECORDED / "pipeline.json"


def unnamed(plan: Plan) -> Plan:
    """The plan as somebody makes it in Python, who names no stages."""
    return replace(
        plan,
        layout=replace(plan.layout, stage_blocks=()),
        alternatives=tuple(
            replace(one, layout=replace(one.layout, stage_blocks=())) for one in plan.alternatives
        ),
    )


def layouts(plan: Plan) -> list[Layout]:
    return [plan.layout, *(one.layout for one in plan.alternatives)]


def test_a_plan_that_names_no_stages_gets_those_by_which_it_was_priced(tmp_path: Path) -> None:
    old = unnamed(files.read_plan(OLD))
    files.write_plan(old, tmp_path / "plan.json")
    read = read_plan(tmp_path / "plan.json")
    assert plan_from_json(files.plan_json(old), where="plan") == read == with_stages(read)
    assert old.layout.pp > 1
    for before, after in zip(layouts(old), layouts(read), strict=True):
        if before.pp > 1:
            assert after.stage_blocks == layout_stage_blocks(model=old.model, layout=before)
        assert replace(after, stage_blocks=before.stage_blocks) == before
    assert read == files.read_plan(OLD)  # a release names them


def test_naming_the_stages_changes_no_prediction() -> None:
    read = read_plan(OLD)
    assert estimate(read.case) == estimate(unnamed(read).case)


@pytest.mark.parametrize("path", sorted(RECORDED.glob("*.json")), ids=lambda path: path.stem)
def test_what_is_emitted_of_an_old_plan_is_what_the_trainer_takes(path: Path) -> None:
    plan = read_plan(path)
    assert all(bool(layout.stage_blocks) == (layout.pp > 1) for layout in layouts(plan))
    if plan.layout.async_tp and plan.cluster.peerless_level(plan.layout.tp) is not None:
        # recommended then, and what would have failed at its first step
        plan = replace(plan, layout=replace(plan.layout, async_tp=False))
    require_runnable(parse_plan(files.plan_json(replace(plan, alternatives=()))))


def test_a_script_of_then_and_its_plan_run_the_same(tmp_path: Path) -> None:
    plan = read_plan(OLD)
    (tmp_path / PLAN_NAME).write_text(OLD.read_text())
    (tmp_path / SCRIPT_NAME).write_text(emit_script(files.read_plan(OLD), Job()))
    assert read_launch(tmp_path / SCRIPT_NAME).plan.layout == plan.layout
    assert resolve_launch(tmp_path).plan.layout == plan.layout


def test_stages_that_cannot_be_named_are_refused_with_the_file() -> None:
    plan = unnamed(files.read_plan(OLD))
    assert plan.layout.pp * plan.layout.virtual_stages > 3
    few = replace(plan.model, layers=3)
    text = files.plan_json(replace(plan, model=few))
    with pytest.raises(SpecError, match=r"^old\.json: .*pipeline stages.*plan again"):
        plan_from_json(text, where="old.json")


def test_alternatives_are_named_too() -> None:
    plan = files.read_plan(OLD)
    line = RankedLayout(rank=1, layout=plan.layout, estimate=plan.estimate, reason="")
    named = with_stages(replace(plan, alternatives=(line,)))
    assert named.alternatives[0].layout == named.layout


def test_no_other_module_reads_a_plan_that_it_hands_on() -> None:
    """`verify` asks beside what a file said word by word."""
    readers = {
        path.relative_to(ROOT / "fsdpplan").as_posix()
        for room in ("run", "cli", "validate", "search")
        for path in (ROOT / "fsdpplan" / room).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        and (
            (node.module == "fsdpplan.files" and any(name.name == "plans" for name in node.names))
            or (
                node.module == "fsdpplan.files.plans"
                and {name.name for name in node.names} & {"read_plan", "plan_from_json"}
            )
        )
    }
    assert readers == {"run/plans.py", "run/verify.py"}
