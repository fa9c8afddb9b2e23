"""Runs that watch themselves, on real gloo ranks."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from dataclasses import fields
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families as parsed

from fsdpplan.cost.goodput import checkpoint_bytes
from fsdpplan.files.clusters import load_cluster
from fsdpplan.run.follow.metrics import read_metrics
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import Case
from fsdpplan.spec.training import Training
from fsdpplan.trainer import step, train
from fsdpplan.trainer.checkpoint.storage import read_index
from fsdpplan.trainer.config import parse_plan
from fsdpplan.trainer.text import feed
from fsdpplan.trainer.train import main
from fsdpplan.trainer.watch.watch import peers
from tests.trainer import jobs, plans

pytestmark = pytest.mark.gloo

SLOW_RANK = 1


def slow_rank(folder: Path) -> None:
    """A job in which one rank's data takes long."""
    fast = feed.micro_batches

    def slow(*args: object, **options: object) -> object:
        if os.environ["RANK"] == str(SLOW_RANK):
            time.sleep(0.1)
        return fast(*args, **options)  # type: ignore[arg-type]

    feed.micro_batches = slow  # type: ignore[assignment]
    main(_arguments(folder, "--steps", "30"))


def full_device(folder: Path) -> None:
    """A job whose second step finds no memory."""
    steps = iter(range(100))
    real = step.model_inputs

    def full(*args: object, **options: object) -> object:
        if next(steps) == 1:
            raise train.torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return real(*args, **options)  # type: ignore[arg-type]

    step.model_inputs = full  # type: ignore[assignment]
    main(_arguments(folder))


def _arguments(folder: Path, *more: str) -> list[str]:
    plan, metrics = folder / "plan.json", folder / "metrics.jsonl"
    return ["--plan", str(plan), "--metrics", str(metrics), *more]


def run_function(folder: Path, function: str, *, exit_code: int, **plan: int) -> str:
    folder.joinpath("plan.json").write_text(plans.plan_text(**plan), encoding="utf-8")
    process = jobs.start_function(
        plan["dp_shard"], f"tests.trainer.watch.test_watch:{function}", folder
    )
    return jobs.finish(process, exit_code=exit_code)


def test_a_slow_rank_is_named_with_its_host(tmp_path: Path) -> None:
    out = run_function(tmp_path, "slow_rank", exit_code=0, dp_shard=2)
    events = jobs.lines(tmp_path, "straggler")
    assert [event["rank"] for event in events] == [SLOW_RANK], out
    assert events[0]["host"] == socket.gethostname()
    assert events[0]["factor"] > 1.2
    assert f"straggler: rank {SLOW_RANK} on {socket.gethostname()}" in out


def test_memory_that_runs_out_ends_in_a_postmortem(tmp_path: Path) -> None:
    out = run_function(tmp_path, "full_device", exit_code=1, dp_shard=1)
    (event,) = jobs.lines(tmp_path, "oom")
    assert (event["phase"], event["step"], event["rank"]) == ("forward", 1, 0)
    assert event["requested_bytes"] == 2 * 2**30
    assert event["needed_bytes"] is None  # a CPU has no allocator that could say
    assert "[rank 0] error: out of memory in forward, in step 2; 2.00 GiB more" in out
    assert "fsdpplan run --fallback" in out
    assert "Traceback" not in out


def test_prometheus_and_the_profiler_say_what_the_run_does(tmp_path: Path) -> None:
    prometheus = tmp_path / "run.prom"
    options = ("--steps", "6", "--prometheus", str(prometheus), "--profile", "4:2")
    saves = ("--checkpoint-dir", str(tmp_path / "saved"), "--checkpoint-every", "6")
    out = jobs.train(tmp_path, 2, *options, "--profile-stacks", *saves, dp_shard=2)
    families = parsed(prometheus.read_text())
    found = {one.name: one for family in families for one in family.samples}
    last = jobs.lines(tmp_path, "step")[-1]
    assert found["training_running"].value == 0.0
    assert found["training_step"].value == 6.0
    assert found["training_loss"].value == last["loss"]
    assert found["training_mfu"].value == last["mfu_fraction"]
    assert found["training_step"].labels["model"] == "tiny"
    trace = json.loads((tmp_path / "trace-rank-0.json").read_text())["traceEvents"]
    lines = {one["name"] for one in trace if one.get("cat") == "python_function"}
    assert any("trainer/step.py" in one for one in lines)
    assert not (tmp_path / "trace-rank-1.json").exists()
    events = {event["collective"]: event for event in jobs.lines(tmp_path, "communication")}
    gathered = events["all_gather"]
    assert (gathered["axis"], gathered["step"]) == ("dp_shard", 5)
    assert gathered["seconds"] > 0
    assert 0 <= gathered["exposed_seconds"] <= gathered["seconds"]
    (seen,) = jobs.lines(tmp_path, "profiled")
    assert 0 <= seen["idle_seconds"] < seen["step_seconds"]
    assert found["training_idle_seconds"].value == seen["idle_seconds"]
    assert "profiled 2 steps" in out
    _require_what_a_run_tells_to_be_understood(tmp_path)


def _require_what_a_run_tells_to_be_understood(folder: Path) -> None:
    """By what compares a run with its plan and learns from its saves."""
    measured = read_metrics((folder / "metrics.jsonl").read_text())
    (row, *_) = [one for one in measured.communication if one.collective == "all_gather"]
    assert row.exposed_seconds is not None
    assert measured.profiled is not None
    assert measured.profiled.idle_seconds < measured.profiled.step_seconds
    assert [one.step for one in measured.checkpoints] == [6]
    for saved in measured.checkpoints:
        assert saved.blocking_seconds is not None
        assert 0 < saved.blocking_seconds < saved.seconds
    # what goodput takes a checkpoint to be are its tensors, but for states of generators
    index = read_index(folder / "saved" / "step-00000006").state_dict_metadata
    written = sum(
        one.size.numel() * one.properties.dtype.itemsize
        for name, one in index.items()
        if not name.startswith("rng.")
    )
    model = json.loads((folder / "plan.json").read_text())["model"]
    known = {field.name for field in fields(Model)}
    shape = Model(**{name: value for name, value in model.items() if name in known})
    layout = Layout(dp_replicate=1, dp_shard=2, micro_batch=1, num_microbatches=1)
    case = Case(
        model=shape,
        cluster=load_cluster("cpu", gpus=2).cluster,
        training=Training(seq_len=64, global_batch=layout.global_batch, precision="fp32"),
        layout=layout,
    )
    assert written == pytest.approx(checkpoint_bytes(case), rel=1e-3)


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="there is no SIGSTOP here")
def test_where_a_rank_stops_the_others_say_what_they_wait_for_and_end(tmp_path: Path) -> None:
    options = ("--steps", "1000000", "--hang-seconds", "8")
    process = jobs.start(tmp_path, 2, *options, dp_shard=2)
    pids = jobs.rank_pids(process)
    jobs.wait_for_step(process, tmp_path, 3)
    os.kill(pids[1], signal.SIGSTOP)
    deadline = time.monotonic() + jobs.TIMEOUT_SECONDS
    while not jobs.lines(tmp_path, "hang") and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(pids[1], signal.SIGKILL)
    out = jobs.finish(process, exit_code=signal.SIGKILL)
    (event,) = jobs.lines(tmp_path, "hang")
    assert (event["rank"], event["host"]) == (0, socket.gethostname())
    assert event["axis"] in ("dp_shard", "all ranks")
    assert f"[rank 0 on {socket.gethostname()}] error: no step has ended for 8 s" in out
    assert f"it waits in {event['collective']} over {event['axis']}" in out
    assert "most recent call first" in out  # the stacks


def test_peers_are_the_ranks_of_one_stage() -> None:
    layout = parse_plan(
        plans.plan_text(pp=2, dp_shard=2, schedule="1f1b", num_microbatches=2)
    ).layout
    assert peers(layout) == [[0, 1], [2, 3]]
