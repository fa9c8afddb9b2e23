"""The screen of derivatives: kinks are named, and what does not show now."""

from __future__ import annotations

from dataclasses import replace

from fsdpplan.cli.resolve.inputs import Inputs
from fsdpplan.cli.views.sensitivity import MOST_KINKS, Followed, sensitivity_screen
from fsdpplan.cost.estimate import estimate
from fsdpplan.search.advice.difference import Priced
from fsdpplan.search.advice.measurement import measurements
from fsdpplan.search.advice.sensitivity import rates_and_constants, sensitivities, with_value
from fsdpplan.search.pins import Pins
from fsdpplan.spec.plan import Case
from fsdpplan.validate.calibrate.calibrated import measured_error
from tests.cost.problems import case

FIELD = "cluster.levels.infiniband.port_bandwidth_bytes_per_second"


def screen(of: Case) -> str:
    """What is shown of it."""
    device = replace(of.cluster.device, error=replace(of.cluster.device.error, across_fraction=1.0))
    of = replace(of, cluster=replace(of.cluster, device=device))
    answer = Followed(
        inputs=Inputs(
            model=of.model,
            cluster=of.cluster,
            training=of.training,
            pins=Pins(),
            sources=((FIELD, "flag --inter-bw"),),
            assumptions=(),
            warnings=(),
        ),
        subject=Priced(case=of, estimate=estimate(of)),
        found=sensitivities(of, among={FIELD, "cluster.device.fit.matmul_fraction"}),
        measurements=measurements(of, measured=measured_error()),
        plan="plan.json",
    )
    return sensitivity_screen(answer, width=80)


def test_kinks_and_what_hides_are_named() -> None:
    base = case(
        "llama-3.1-8b",
        dp_shard=16,
        micro_batch=4,
        sharding="fsdp",
        reshard_after_forward="always",
        gradient_sync="every",
    )
    now = dict(rates_and_constants(base))[FIELD]
    shown = [screen(with_value(base, FIELD, now * 2 ** (n / 4))) for n in range(-8, 5)]
    assert all(max(map(len, one.splitlines())) <= 80 for one in shown)
    with_kinks = [one for one in shown if "Kinks near" in one]
    assert 0 < len(with_kinks) < len(shown)
    assert all(one.count("slope says") <= MOST_KINKS for one in with_kinks)
    said = [" ".join(one.split()) for one in with_kinks]
    assert any("infiniband port bandwidth:" in one for one in said)
    hidden = [one for one in shown if "Beyond the band" in one]
    assert hidden
    assert all("bandwidth of infiniband" in one for one in hidden)
    assert "typed" in shown[0]
