"""Heap: what a rank has allocated beside its state, moment by moment, while its step goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One candidate for the peak: bytes beside the parameter shards and optimizer state."""

    name: str
    gradients_bytes: int = 0
    """Gradient shards in the dtype of the parameters."""
    unsharded_parameters_bytes: int = 0
    """Gathered parameters, gather buffers, and autocast's copies of weights."""
    unsharded_gradients_bytes: int = 0
    """Gradients before reduction, and reduce-scatter inputs."""
    activations_bytes: int = 0
    """Saved for backward or recomputed."""
    logits_bytes: int = 0
    """Logits, log-probabilities and their gradients."""
    temporaries_bytes: int = 0
    """Of the operation at hand."""
    gathers_bytes: int = 0
    """Part of `unsharded_parameters` that the streams of all-gathers allocated."""

    @property
    def total_bytes(self) -> int:
        """Sum of the parts."""
        return (
            self.gradients_bytes
            + self.unsharded_parameters_bytes
            + self.unsharded_gradients_bytes
            + self.activations_bytes
            + self.logits_bytes
            + self.temporaries_bytes
        )


class Moment(NamedTuple):
    """When what is there."""

    part: Literal["first", "forward", "ends", "backward", "last"]
    """Of the micro-batch: the embedding, a unit's forward, head and loss, a unit's backward, what
    is left."""
    unit: int
    """Of blocks, in the order of forward; -1 of no such."""
    phase: Phase


COPIED = ("root", "tables", "head", "unit", "kept", "kept of the unit", "experts", "kept experts")
"""Gathered parameters, as they are computed with."""

BUFFERS = ("buffer", "buffer behind", "ahead")
"""Flat buffers of gathers: of the one at work, of the one behind it, of the one ahead."""

_BY_PART = {
    "gradients_bytes": ("gradient shards", "reduced shard", "gradients that stay"),
    "unsharded_parameters_bytes": (*COPIED, *BUFFERS, "casts", "casts of the head"),
    "unsharded_gradients_bytes": (
        "earlier gradients",
        "gradients",
        "gradient of the head",
        "embedding's gradient",
        "gradient of the table",
        "buckets",
        "reduced",
        "reduced behind",
    ),
    "activations_bytes": ("saved", "stream", "remade", "beside the logits", "messages"),
    "logits_bytes": ("logits",),
    "temporaries_bytes": ("temporaries",),
}
_PART_OF = {name: part for part, names in _BY_PART.items() for name in names}


class Heap:
    """Named allocations, each so large as it was said last."""

    def __init__(self, *, gathers_in_place: bool) -> None:
        """`gathers_in_place`: parameters are gathered where they are computed with (FSDP1)."""
        self._live: dict[str, int] = {}
        self._gathered = {*BUFFERS, *(COPIED if gathers_in_place else ())}

    def hold(self, name: str, size: int) -> None:
        """From now on there are so many bytes of it."""
        self._live[name] = size

    def free(self, *names: str) -> None:
        """There is nothing of these any more."""
        for name in names:
            self._live.pop(name, None)

    def moment(self, name: str) -> Phase:
        """All that is there now, in a phase of that name."""
        parts = dict.fromkeys(_BY_PART, 0)
        gathers = 0
        for of, size in self._live.items():
            parts[_PART_OF[of]] += size
            if of in self._gathered:
                gathers += size
        return Phase(name=name, gathers_bytes=gathers, **parts)
