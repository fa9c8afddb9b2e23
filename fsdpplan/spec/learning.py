"""Learning: how far one measured run speaks for another."""

from __future__ import annotations

from dataclasses import dataclass, fields

from fsdpplan.spec.checks import require_fraction, require_positive


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
