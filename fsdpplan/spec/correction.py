"""Correction: what finished runs on a cluster say of its profile's numbers."""

from __future__ import annotations

from dataclasses import dataclass

from fsdpplan.spec.checks import require_positive, require_positive_int

PARTS = ("matmul", "attention", "element_wise", "launch", "inside", "across")
"""Parts of a step whose time has a factor of its own; the same words as in a device's errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Factors on the times of the parts of a step, and the runs that they come from.

    A factor is the time here over the time by the profile: above 1, the part is slower here.
    """

    matmul_factor: float
    """Of the matmuls of blocks."""
    attention_factor: float
    """Of attention."""
    element_wise_factor: float
    """Of all other kernels."""
    launch_factor: float
    """Of what one kernel costs on the host."""
    inside_factor: float
    """Of collectives on the innermost level of the network."""
    across_factor: float
    """Of collectives on outer levels."""
    runs: int
    """Finished runs behind the factors."""
    jobs: int
    """Different jobs (model, training, layout) among them."""
    step_factor: float
    """Corrected over uncorrected step time: the median of those jobs."""
    half_width_fraction: float
    """Half of the 80 % band over the expected step time: the median of those jobs."""

    def __post_init__(self) -> None:
        named = {f"{part}_factor": factor for part, factor in self.factors.items()}
        require_positive(**named, step_factor=self.step_factor)
        require_positive(half_width_fraction=self.half_width_fraction)
        require_positive_int(runs=self.runs, jobs=self.jobs)

    @property
    def factors(self) -> dict[str, float]:
        """The factor of each part."""
        return {part: getattr(self, f"{part}_factor") for part in PARTS}
