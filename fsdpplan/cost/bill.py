"""Bill: how long a training takes, what it costs and which energy it draws, each with its band.

    seconds = steps x step
    money   = GPUs x hours x price of a GPU hour
    energy  = nodes x draw of a node x hours x PUE
    CO2     = energy x grams of a kWh

Time and money have the band of the step, in proportion. The draw of a node has an error of its own,
which is taken to be independent of the step's: squares add.

    draw of a node = 0.76 x (its GPUs x their power limit + the rest of the node)

The share is that of its rated 10.2 kW that a node of 8 H100 drew where it trained hardest, and 14 %
the error of the authors' own model of it (11.4 % in the mean, which is 0.114 sqrt(pi / 2) of a
normal distribution). Source: Newkirk, Fernandez, Koomey, Latif, Strubell, Shehabi and Samaras 2025,
*Empirically-Calibrated H100 Node Power Models*, arXiv:2506.14551. What it hangs on beyond the
machine, such as how long GPUs wait for the network, is in that error: the draw is the same for all
layouts.

The logarithm of the step time is taken as normal, so that a deadline is met with the chance

    Phi(log(deadline / expected) / error),   error = log(upper / expected) / 1.2816
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log, pi, sqrt

from fsdpplan.cost.band import NORMAL_80, faster_chance, widened
from fsdpplan.cost.model.params import useful_flops_per_token
from fsdpplan.spec.adapters import adapted
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import Case, Draw, Estimate, Interval, Terms
from fsdpplan.spec.training import Training

HOUR_SECONDS = 3600.0
RUNNING_FRACTION = 0.76
"""Of its rated power that a node draws in training."""
RUNNING_LOG_ERROR = 0.114 * sqrt(pi / 2)
"""Standard deviation of the logarithm of that share."""
REST_FRACTION = 4600 / 5600
"""Power of the rest of a node, as a share of its GPUs', where it is not known: a DGX H100 is rated
at 10.2 kW, and its 8 GPUs at 5.6."""


def rated_draw(
    *, gpu_watts: float, gpus_per_node: int, node_gpus: int, node_watts: float | None
) -> Draw:
    """The draw of a node of which `gpus_per_node` of `node_gpus` GPUs train: the rest of it is
    there for any number. `node_watts`: what the whole node is rated at; None: not known."""
    all_gpus = gpu_watts * node_gpus
    rest = all_gpus * REST_FRACTION if node_watts is None else max(0.0, node_watts - all_gpus)
    rated = gpu_watts * gpus_per_node + rest
    return Draw(node_watts=RUNNING_FRACTION * rated, log_error=RUNNING_LOG_ERROR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """Of a whole training; what was not asked is None."""

    gpus: int
    """That are paid for all of the time."""
    steps: int
    """Optimizer steps of the training."""
    seconds: Interval
    """The time to train."""
    gpu_hours: Interval
    """GPUs times hours."""
    cost: Interval | None
    """In the currency of the price."""
    energy_kwh: Interval | None
    """Of the site."""
    co2_kg: Interval | None
    """None: not asked."""
    deadline_chance: float | None
    """That it ends in time."""


def bill(case: Case, estimate: Estimate, terms: Terms) -> Bill | None:
    """What the training of a plan takes; None where its tokens are not said."""
    steps, cluster = case.training.steps, case.cluster
    if steps is None:
        return None
    seconds = estimate.step_seconds.scaled(steps)
    gpu_hours = seconds.scaled(cluster.gpus / HOUR_SECONDS)
    energy = _energy_kwh(seconds, cluster.nodes, terms)
    grams = terms.co2_grams_per_kwh
    return Bill(
        gpus=cluster.gpus,
        steps=steps,
        seconds=seconds,
        gpu_hours=gpu_hours,
        cost=None if terms.price is None else gpu_hours.scaled(terms.price),
        energy_kwh=energy,
        co2_kg=None if energy is None or grams is None else energy.scaled(grams / 1000),
        deadline_chance=_chance(seconds, terms.deadline_seconds),
    )


def least_seconds(model: Model, cluster: Cluster, training: Training) -> float | None:
    """Of a whole training, at the peak rate of all GPUs: an MFU of 1. None: its tokens are not
    said."""
    if training.steps is None:
        return None
    trained = adapted(model, training.adapters, training.activation_dtype)
    flops = training.tokens_per_step * useful_flops_per_token(
        model=trained, seq_len=training.seq_len, document_tokens=training.document_tokens
    )
    peaks = (
        (share, cluster.device.peak_flops_per_second(each.precision))
        for share, each in training.phases
    )
    return training.steps * sum(share * flops / (cluster.gpus * peak) for share, peak in peaks)


def _energy_kwh(seconds: Interval, nodes: int, terms: Terms) -> Interval | None:
    if terms.draw is None:
        return None
    kilowatts = nodes * terms.draw.node_watts * terms.pue / 1000
    return widened(seconds.scaled(kilowatts / HOUR_SECONDS), terms.draw.log_error)


def _chance(seconds: Interval, deadline_seconds: float | None) -> float | None:
    if deadline_seconds is None:
        return None
    return faster_chance(ratio=seconds.expected / deadline_seconds, log_error=_log_error(seconds))


def _log_error(seconds: Interval) -> float:
    """Standard deviation of the logarithm."""
    return log(seconds.upper / seconds.expected) / NORMAL_80


def chance_in_time(found: Bill | None) -> float:
    """That a training ends before its deadline; 0 where nobody asked."""
    return 0.0 if found is None or found.deadline_chance is None else found.deadline_chance


def seconds_of_chance(seconds: Interval, chance: float) -> float:
    """The deadline that is met with that chance."""
    from statistics import NormalDist  # not at start-up

    return seconds.expected * exp(NormalDist().inv_cdf(chance) * _log_error(seconds))
