"""Cell: one thing to measure, told to a runner that knows nothing of what it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fsdpplan.spec.measurement import Measurement
from fsdpplan.topology.measure.clock import Call

Seconds = list[list[float]]
"""Of each repeat, for each rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One thing to measure, on all ranks at the same time."""

    name: str
    """For a person."""
    series: str
    """Cells of one series take time in proportion to their work, small ones apart."""
    work: float
    needed_bytes: int
    """Memory of one rank."""
    prepare: Callable[[], Call]
    """Makes what the call needs. It talks to nobody, and may fail for want of memory."""
    rows: Callable[[Seconds], Iterable[Measurement]]
    """What to log."""
    is_coarse: bool = False
    """To be measured before all that is not."""
    is_aligned: bool = False
    """Ranks wait for each other before each repeat."""
    by_host: bool = False
    """The time is the host's, not the device's."""
    lasts: bool = False
    """Repeated for seconds without a pause, to see what the device sustains."""
