"""Ledger: one row a run: what was predicted, what was measured, and on which machines.

Learning: how far one measured run speaks for another.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import isclose
from typing import Literal

from fsdpplan.spec.cluster import Cluster, Level
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import Interval, TimeBreakdown
from fsdpplan.spec.training import Training
from fsdpplan.spec.values import require_fraction, require_positive

LEAST_STEPS = 5
"""Measured steps below which a run says nothing of its speed."""

OWN_SOFTWARE = "fsdpplan"
"""Software of runs that `fsdpplan run` made."""

Failure = Literal["out_of_memory", "stopped", "failed", "interrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """What a run trained on: enough to predict it again, and not which hosts."""

    cluster: str
    """Name of its profile, or of the host that it was found on."""
    device: str
    gpus: int
    gpus_per_node: int
    levels: tuple[Level, ...]
    is_weak: bool
    """Some part was known to be slower than its equals: such runs say nothing of the others."""

    @classmethod
    def of(cls, cluster: Cluster) -> Machines:
        """Those of a plan."""
        return cls(
            cluster=cluster.name,
            device=cluster.device.name,
            gpus=cluster.gpus,
            gpus_per_node=cluster.gpus_per_node,
            levels=cluster.levels,
            is_weak=bool(cluster.weak),
        )

    def are_of(self, cluster: Cluster) -> bool:
        """Whether they are like those of `cluster`: one device, the same links, nothing weak.

        Not by name: what is found on a machine is named after whichever host was asked.
        """
        pairs = zip(self.levels, cluster.levels, strict=False)
        return (
            self.device == cluster.device.name
            and not (self.is_weak or cluster.weak)
            and all(_same_links(one, other) for one, other in pairs)
        )


def _same_links(one: Level, other: Level) -> bool:
    return (one.name, one.ports) == (other.name, other.ports) and isclose(
        one.port_bandwidth_bytes_per_second, other.port_bandwidth_bytes_per_second, rel_tol=1e-6
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What was trained, and how."""

    model: Model
    training: Training
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What the plan said before the run."""

    step_seconds: Interval
    time: TimeBreakdown
    mfu_fraction: float
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    corrected_by_runs: int
    """Runs that the prediction had learned from; 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What the run reported. None: it did not."""

    steps: int
    """Steps that it reported."""
    measured_steps: int
    """Those that its median counts."""
    step_seconds: float | None
    tokens_per_second: float | None
    mfu_fraction: float | None
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    memory_kind: str | None
    exit_code: int
    failure: Failure | None
    """None: it ended well."""
    checkpoints: int = 0
    """Saves that were published."""
    checkpoint_seconds: float | None = None
    """Median of them, from the end of the step until it was published."""
    checkpoint_blocking_seconds: float | None = None
    """Median part of that in which training stood still."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRow:
    """One run."""

    ended_at: str
    """UTC, ISO 8601."""
    plan_sha256: str
    run_folder: str
    """Relative to where the run was started."""
    target: str
    """`here` or `slurm`."""
    job: Workload
    machines: Machines
    predicted: Predicted
    observed: Observed
    versions: tuple[tuple[str, str], ...]
    """(name, version) of fsdpplan, and of what the run reported."""
    origin: str = "run"
    """`run`, or the name of the file that it was learned from."""
    software: str = OWN_SOFTWARE
    """What trained."""
    cells: tuple[tuple[str, str], ...] = ()
    """(column, text) of a row of a table; it is read again by later fsdpplans."""

    @property
    def tells_speed(self) -> bool:
        """Whether its step time may be compared: enough steps, and no part known to be slow."""
        return (
            self.observed.step_seconds is not None
            and self.observed.measured_steps >= LEAST_STEPS
            and not self.machines.is_weak
        )

    @property
    def error_fraction(self) -> float | None:
        """Predicted over measured step time, less 1; None where there is none to compare."""
        measured = self.observed.step_seconds
        if not measured or not self.tells_speed:
            return None
        return self.predicted.step_seconds.expected / measured - 1

    @property
    def is_covered(self) -> bool:
        """Whether the measured step time lies in the band."""
        step, measured = self.predicted.step_seconds, self.observed.step_seconds
        return measured is not None and step.lower <= measured <= step.upper


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """Prior of log(measured / predicted) step time, as standard deviations unless said."""

    stack: float
    """What all runs of a stack share."""
    matmul: float
    """Of a step that is matmuls alone; likewise the next six."""
    attention: float
    element_wise: float
    launch: float
    inside: float
    """Exposed communication on the innermost level."""
    across: float
    """Exposed communication on outer levels."""
    bubble: float
    host: float
    """Of the log of how many times as long as predicted a program's host takes to start kernels:
    launches are off by what is left of that."""
    host_factor: float
    """The middle of those times."""
    step_seconds: float
    """Seconds that every step takes beside the predicted ones."""
    micro_batch_seconds: float
    """Seconds that every micro-batch takes beside them."""
    near: float
    """What runs that are near to each other share."""
    gpus_reach: float
    """How many e-folds of GPUs apart runs are still near."""
    degrees_reach: float
    """The same of e-folds of tensor, pipeline, context and expert parallelism."""
    batch_reach: float
    """Of tokens a micro-batch, micro-batches and sequence length."""
    model_reach: float
    """Of width and depth."""
    policy_reach: float
    """Of recomputation and compiling, in steps of each."""
    job: float
    """What runs of one job share with no other job."""
    run: float
    """What one run shares with none."""
    other_software: float
    """Correlation of what two stacks of different software share, 0..1."""
    other_precision: float
    """The same of two number formats."""
    other_device: float
    """The same of two devices."""
    degrees_of_freedom: float
    """Of Student's t: the fewer, the wilder a stack may be."""

    def __post_init__(self) -> None:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        shares = ("other_software", "other_precision", "other_device")
        require_fraction(**{name: values.pop(name) for name in shares})
        require_positive(**values)
