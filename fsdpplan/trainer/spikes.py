"""Loss spikes: steps whose loss or gradient norm is far off that of the steps before them.

Judged on the device, between backward pass and update, from numbers that are equal on all ranks:
so all ranks judge alike, the host waits for nothing, and a step can be left out before it has
changed a weight. That costs one all-reduce of two numbers a step and some small kernels.

A value x is a spike beside the last WINDOW steps that were none, of which there are LEAST_STEPS,
if

    x > median + max(SPREADS * 1.4826 * MAD, least * |median|)

MAD is the median distance from the median, 1.4826 of which are a standard deviation of normal
noise (Rousseeuw and Croux, "Alternatives to the median absolute deviation", 1993, section 1):
neither is moved by spikes. `least` is LEAST_RISE_OF_LOSS or LEAST_RISE_OF_NORM, for runs that
hardly vary. What is no number is a spike whatever came before. Going back and leaving out the data
seen since is from PaLM (arXiv 2204.02311, section 5.1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

WINDOW = 128
LEAST_STEPS = 20
SPREADS = 8.0
SPREAD_OF_MAD = 1.4826
LEAST_RISE_OF_LOSS = 0.1
LEAST_RISE_OF_NORM = 1.0
MOST_IN_A_ROW = 5
"""Then it is no spike but how the run is from here on, and the window begins anew."""
MOST_TRIES = 3
"""Times that a run goes back to one checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spike:
    """What is found of a step, on the device."""

    is_spike: Tensor
    """Boolean."""
    usual: Tensor
    """(2): medians of loss and gradient norm; NaN in the first steps."""


class SpikeGuard:
    """Judges steps; its window is of this process, and begins anew in a run that is resumed."""

    def __init__(self, device: torch.device, *, stages: int, scales_loss: bool) -> None:
        """`stages`: of so many pipeline ranks one has the loss; `scales_loss`: a norm that is no
        number is the loss scaler's."""
        ranks = dist.get_world_size()
        self._scales_loss = scales_loss
        self._shares = torch.tensor([stages / ranks, 1 / ranks], device=device)
        self._least = torch.tensor([LEAST_RISE_OF_LOSS, LEAST_RISE_OF_NORM], device=device)
        self._places = torch.arange(WINDOW, device=device)
        self._window = torch.full((2, WINDOW), torch.nan, device=device)
        self._steps = torch.zeros((), dtype=torch.int64, device=device)
        self._in_a_row = torch.zeros((), dtype=torch.int64, device=device)

    def judge(self, loss: Tensor, grad_norm: Tensor) -> Spike:
        """Whether a step is a spike; all ranks call this for each step."""
        both = torch.stack([loss.float(), grad_norm.to(loss.device).float()]) * self._shares
        dist.all_reduce(both)
        return self.judge_equal(both)

    def judge_equal(self, both: Tensor) -> Spike:
        """The same of (loss, gradient norm) as they are over all ranks."""
        known = self._steps.clamp(max=WINDOW)
        usual = _median(self._window, known)
        spread = SPREADS * SPREAD_OF_MAD * _median((self._window - usual[:, None]).abs(), known)
        limit = usual + torch.maximum(spread, self._least * usual.abs())
        finite = both.isfinite()
        is_far = ((both > limit) & finite).any() & (known >= LEAST_STEPS)
        is_broken = ~(finite[0] if self._scales_loss else finite.all())
        in_a_row = torch.where(is_far | is_broken, self._in_a_row + 1, 0)
        gives_in = (in_a_row > MOST_IN_A_ROW) & ~is_broken
        is_spike = (is_far & ~gives_in) | is_broken
        self._in_a_row = torch.where(gives_in, 0, in_a_row)
        first = torch.where(gives_in, 0, self._steps)
        joins = ~is_spike & finite.all()
        here = joins & (self._places == first % WINDOW)
        self._window = torch.where(here, both[:, None], self._window)
        # values behind the first `steps` places are of before
        self._window = torch.where(self._places < first + 1, self._window, torch.nan)
        self._steps = first + joins
        return Spike(is_spike=is_spike, usual=usual)


def _median(rows: Tensor, known: Tensor) -> Tensor:
    """Of the first `known` values of each row, the others being NaN, which are sorted last."""
    place = ((known - 1) // 2).clamp(min=0).expand(len(rows), 1)
    return rows.sort(dim=1).values.gather(1, place)[:, 0]
