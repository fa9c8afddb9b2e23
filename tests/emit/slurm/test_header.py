from __future__ import annotations

from dataclasses import replace

import pytest

from fsdpplan.emit.job import Job
from fsdpplan.emit.slurm.header import (
    job_plan,
    layout_words,
    plan_digest,
    plan_lines,
    read_header,
    read_metrics_path,
    read_plan_json,
    read_trained,
)
from fsdpplan.emit.slurm.script import render_launch
from fsdpplan.emit.trainer_program import Trainer
from fsdpplan.errors import SpecError
from fsdpplan.files.plans import plan_from_json, plan_json
from fsdpplan.spec.plan import RankedLayout
from tests.emit.plans import make_plan


def emitted(job: Job | None = None) -> str:
    plan = make_plan(nodes=2)
    return render_launch(plan=plan, plan_json=plan_json(plan), job=job or Job(), version="1.2.3")


def test_a_script_gives_back_its_plan_and_its_header() -> None:
    script, plan = emitted(), make_plan(nodes=2)
    header, text = read_header(script), read_plan_json(script)
    assert header is not None
    assert text is not None
    assert header.version == "1.2.3"
    assert header.digest == plan_digest(text) == plan_digest(plan_json(plan))
    assert plan_from_json(text, where="script") == plan


@pytest.mark.parametrize("script", ["", "#!/bin/bash\n", "#!/bin/bash\n# fsdpplan\necho\n"])
def test_other_scripts_have_neither(script: str) -> None:
    assert read_header(script) is None
    assert read_plan_json(script) is None
    assert read_metrics_path(script) is None


@pytest.mark.parametrize("path", ["m.jsonl", "a b/it's.jsonl", "new\nline"])
def test_the_metrics_file_of_a_script_is_found(path: str) -> None:
    assert read_metrics_path(emitted(Job(metrics=path))) == path
    assert read_metrics_path(emitted()) is None


def test_the_head_tells_the_layout_and_the_prediction() -> None:
    head = "\n".join(emitted().splitlines()[:7])
    assert "dp_replicate 2 x dp_shard 2" in head
    assert "200 ms (80 % band 100 ms to 400 ms)" in head
    assert "7.6 MiB allocated, 8.6 MiB reserved, of 4.0 GiB" in head


def test_the_head_tells_what_is_trained() -> None:
    trial = "20 steps on made-up tokens, without checkpoints, so it starts once"
    assert read_trained(emitted()) == f"trains {trial}"
    hostile = Job(program=Trainer(data="a\n# Trains: b"))
    assert (read_trained(emitted(hostile)) or "").startswith("trains 20 steps on a # Trains: b, ")
    assert read_trained("#!/bin/bash\n") is None


def test_a_hostile_model_name_ends_no_comment() -> None:
    plan = make_plan()
    plan = replace(plan, model=replace(plan.model, name="x\necho pwned\r\u2028y"))
    script = render_launch(plan=plan, plan_json=plan_json(plan), job=Job(), version="1")
    assert not any(line.startswith(("echo pwned", "y ")) for line in script.splitlines())


def test_a_job_carries_no_alternatives() -> None:
    plan = make_plan()
    line = RankedLayout(rank=1, layout=plan.layout, estimate=plan.estimate, reason="fastest")
    assert job_plan(replace(plan, alternatives=(line,))) == plan


@pytest.mark.parametrize("text", ['{"a": "' + "x" * 130_000 + '"}', "FSDPPLAN_PLAN_END"])
def test_a_plan_that_cannot_travel_is_refused(text: str) -> None:
    with pytest.raises(SpecError):
        plan_lines(text)


def test_layouts_have_words() -> None:
    assert layout_words(make_plan(per_node=1)).startswith("one rank, fsdp, reshard always")
    ddp = make_plan(nodes=2, per_node=1, sharding="ddp")
    assert layout_words(ddp).startswith("dp_replicate 2, ddp, micro-batch 1 x 1")
