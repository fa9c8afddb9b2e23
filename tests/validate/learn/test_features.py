"""What makes two runs one job, and a pass a launch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdpplan.cost.estimate import step_time
from fsdpplan.files.catalogue import load_model
from fsdpplan.files.clusters import load_cluster
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import Case
from fsdpplan.spec.training import Training
from fsdpplan.validate.learn.features import HOST_LOGS, KINDS, Features, Stack, features_of

MODEL = load_model("llama-3.1-8b")
CLUSTER = load_cluster("dgx-h100", gpus=8).cluster
LAYOUT = Layout(dp_shard=8)
TRAINING = Training(seq_len=8192, global_batch=8, precision="fp8")


def features(
    training: Training = TRAINING, *, layout: Layout = LAYOUT, host: float = 1.0
) -> Features:
    fit = CLUSTER.device.fit
    fit = replace(fit, kernel_launch_seconds=host * fit.kernel_launch_seconds)
    cluster = replace(CLUSTER, device=replace(CLUSTER.device, fit=fit))
    time = step_time(Case(model=MODEL, cluster=cluster, training=training, layout=layout)).time
    stack = Stack.of(software="mine", training=training, device=CLUSTER.device.name)
    return features_of(
        model=MODEL, training=training, layout=layout, gpus=8, time=time, stack=stack
    )


def launch(one: Features) -> float:
    return one.shares[KINDS.index("launch")]


def test_another_kernel_or_batch_is_another_job() -> None:
    changes: list[dict[str, str | int]] = [
        {"fp8_recipe": "rowwise"},
        {"reduce_dtype": "bf16"},
        {"optimizer": "adamw_8bit"},
        {"global_batch": 16},
    ]
    jobs = {features(replace(TRAINING, **change)).job for change in changes}  # type: ignore[arg-type]
    assert len({*jobs, features().job}) == len(changes) + 1


def test_a_longer_training_with_more_room_is_the_same_job() -> None:
    longer = replace(TRAINING, tokens=10**12, torch="2.9", headroom_fraction=0.2, fits_fraction=0.5)
    assert features(longer).job == features().job


@pytest.mark.parametrize("host", [0.01, 0.5, 1.0, 3.0, 100.0])
def test_shares_are_of_the_whole_step(host: float) -> None:
    one = features(host=host, layout=replace(LAYOUT, compile=False))
    assert min(one.shares) >= 0
    assert sum(one.shares) == pytest.approx(1.0)


def test_a_pass_is_more_of_a_launch_the_nearer_its_host_is_to_being_too_slow() -> None:
    short = Training(seq_len=1024, global_batch=8)
    eager = replace(LAYOUT, compile=False)
    found = [launch(features(short, layout=eager, host=host)) for host in (0.01, 0.4, 0.6, 1, 50)]
    assert found == sorted(found)
    assert found[0] == pytest.approx(0, abs=1e-6)
    assert 0 < found[1] < found[3]
    assert found[4] > 0.8


def test_a_slower_host_delays_a_step_more_the_more_it_waits() -> None:
    short = Training(seq_len=1024, global_batch=8)
    eager = replace(LAYOUT, compile=False)
    busy, near, waiting = (features(short, layout=eager, host=host) for host in (0.01, 0.6, 3.0))
    assert set(busy.delays) == {0.0}
    for one in (near, waiting):
        assert list(one.delays) == sorted(one.delays)
        as_predicted = [delay for delay, at in zip(one.delays, HOST_LOGS, strict=True) if not at]
        assert as_predicted in ([0.0], [])
    assert 0 < near.delays[-1] < waiting.delays[-1] <= HOST_LOGS[-1]
