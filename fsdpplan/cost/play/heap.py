"""Heap: what a rank has allocated beside its state, moment by moment, while its step goes on."""

from __future__ import annotations

from fsdpplan.cost.memory.rank_quantities import Phase

COPIED = ("root", "tables", "head", "unit", "kept", "kept of the unit", "experts", "kept experts")
"""Gathered parameters, as they are computed with."""

BUFFERS = ("buffer", "buffer behind", "ahead")
"""Flat buffers of gathers: of the one at work, of the one behind it, of the one ahead."""

_BY_PART = {
    "gradients_bytes": ("gradient shards", "reduced shard"),
    "unsharded_parameters_bytes": (*COPIED, *BUFFERS, "casts", "casts of the head"),
    "unsharded_gradients_bytes": (
        "earlier gradients",
        "gradients",
        "gradient of the head",
        "last gradient",
        "embedding's gradient",
        "reduced",
        "reduced behind",
    ),
    "activations_bytes": ("saved", "stream", "remade", "beside the logits"),
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
