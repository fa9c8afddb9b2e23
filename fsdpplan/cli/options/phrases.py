"""Phrases: what the screens print of a layout, read back as fields of it.

`search.advice.words` writes them. Each is taken out of a text before its other words are read, so
that a line can be typed as it was printed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fsdpplan.errors import SpecError
from fsdpplan.search.advice.words import ATTENTION_OVER_CP, SCHEDULES
from fsdpplan.spec.layout import MESH_AXES

Field = tuple[str, Any]
"""A field of a layout and its value, or a number that follows from its degrees: `shard_ranks`,
`expert_ranks`, `data_parallel`, `num_microbatches`. None: more than one."""

_UNIT = r"(?: groups of \d+)?(?: (?:nodes|GPUs|processes)\b)?(?: of a node\b| across nodes\b)?"
_SPAN = rf"(?:all |the )?(\d+)\b{_UNIT}"
_ALL_ONE = tuple((axis, 1) for axis in MESH_AXES)
_BYTES = {"mib": 2**20, "gib": 2**30}
_SCHEDULE = "|".join(re.escape(words) for words in SCHEDULES.values())
_NAMES = {words.lower(): name for name, words in SCHEDULES.items()}
_NAMES_OVER_CP = {words.lower(): name for name, words in ATTENTION_OVER_CP.items()}


def _bucket(number: str, unit: str) -> int:
    return round(float(number) * _BYTES[unit.lower()])


def _blocks(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))


def _zero(name: str, ranks: str, copies: str | None) -> tuple[Field, ...]:
    replicate = ("dp_replicate", int(copies or 1))
    return ("sharding", name.lower().replace("-", "")), ("shard_ranks", int(ranks)), replicate


_PHRASES: tuple[tuple[str, Callable[..., tuple[Field, ...]]], ...] = (
    # a near miss of an answer in full: its time, memory and chance
    (r"^\s*(?:\d+\s+)?[\d.,]+ \w+, [\d.,]+ \w+(?:, fits [^:]*)?: ", lambda: ()),
    # a row of the alternatives: behind the layout its step, its memory and a note
    (r"\s{2,}[\d.,]+ (?:us|ms|s|min|h|days)\s+[\d.,]+ [KMGT]iB\b.*$", lambda: ()),
    (r"^\s*(?:\d+|-|USE)\s{2,}", lambda: ()),
    (r"\bone GPU: nothing to spread|\bone GPU\b|\bone rank\b", lambda: _ALL_ONE),
    (
        rf"\bHSDP: shard over {_SPAN}, replicate over {_SPAN}",
        lambda n, m: (("sharding", "fsdp"), ("shard_ranks", int(n)), ("dp_replicate", int(m))),
    ),
    (
        r"\bHSDP (?:over )?(\d+) x (\d+)",
        lambda m, n: (("sharding", "fsdp"), ("dp_replicate", int(m)), ("shard_ranks", int(n))),
    ),
    (
        rf"\bDDP(?:: a whole copy on each of| over|) {_SPAN}",
        lambda n: (("sharding", "ddp"), ("dp_replicate", int(n))),
    ),
    (
        r"\b(ZeRO-[12]): (?:optimizer state|gradients and optimizer state) sharded over "
        rf"{_SPAN}(?:, replicated over {_SPAN})?",
        _zero,
    ),
    (
        r"\b(ZeRO-[12]) (?:(\d+) x )?(\d+)\b",
        lambda name, copies, ranks: _zero(name, ranks, copies),
    ),
    (
        rf"\bFSDP(?:: shard over| over|) {_SPAN}(?! blocks a unit)",
        lambda n: (("sharding", "fsdp"), ("shard_ranks", int(n))),
    ),
    (
        rf"\btensor parallel, overlapped, over {_SPAN}",
        lambda n: (("tp", int(n)), ("async_tp", True)),
    ),
    (rf"\btensor parallel over {_SPAN}", lambda n: (("tp", int(n)),)),
    (rf"\bcontext parallel over {_SPAN}", lambda n: (("cp", int(n)),)),
    (
        r"\bexperts over tp\b(?: (on|off)\b)?",
        lambda switch: (("experts_over_tp", (switch or "on").lower() == "on"),),
    ),
    (rf"\bwhole experts over {_SPAN}", lambda n: (("expert_ranks", int(n)),)),
    (rf"\bexperts over {_SPAN}", lambda n: (("ep", int(n)),)),
    (
        r"\bep (\d+) x tp (\d+)",
        lambda ep, tp: (("ep", int(ep)), ("tp", int(tp)), ("experts_over_tp", True)),
    ),
    (
        rf"\bpipeline of (\d+) stages(?: \(({_SCHEDULE})\))?",
        lambda n, words: (
            ("pp", int(n)),
            *((("schedule", _NAMES[words.lower()]),) if words else ()),
        ),
    ),
    (
        r"\bschedule (\w+) x (\d+)",
        lambda name, n: (("schedule", name.lower()), ("virtual_stages", int(n))),
    ),
    (r"\bone whole copy\b", lambda: (("sharding", "ddp"), ("dp_replicate", 1), ("dp_shard", 1))),
    (r"\bwhole copies\b", lambda: (("sharding", "ddp"),)),
    (
        r"\bcopies of shards(?: that fill no domain)?\b",
        lambda: (("sharding", "fsdp"), ("dp_replicate", None)),
    ),
    (r"\bshards\b", lambda: (("sharding", "fsdp"),)),
    (r"\ba split optimizer\b", lambda: (("sharding", "zero1"),)),
    (r"\bsplit gradients\b", lambda: (("sharding", "zero2"),)),
    (r"\bsequence parallel\b", lambda: (("tp", None),)),
    (
        rf"\b({'|'.join(ATTENTION_OVER_CP.values())})\b",
        lambda words: (("cp_attention", _NAMES_OVER_CP[words.lower()]),),
    ),
    (
        r"(?:\b(?:checkpointing|recomputation|recompute) )?\b(attention|op|full) in the first "
        r"(\d+) blocks?(?: of each stage)?",
        lambda mode, n: (
            ("activation_checkpointing", mode.lower()),
            ("checkpoint_blocks", int(n)),
        ),
    ),
    (r"\brecomputation by operation\b", lambda: (("activation_checkpointing", "op"),)),
    (
        r"\bgradients reduced in two stages\b",
        lambda: (("gradient_sync", "reduce_scatter_only"),),
    ),
    (r"\bstate and optimizer on the host\b", lambda: (("offload", "cpu"),)),
    (
        r"\bloss in (\d+) pieces?\b|\bpieces of the loss (\d+)",
        lambda one, other: (("loss_chunks", int(one or other)),),
    ),
    (
        r"\b(\d+) blocks a unit\b|\bblocks a unit (\d+)",
        lambda one, other: (("wrap_blocks", int(one or other)),),
    ),
    (
        r"\bbuckets? (?:of )?([\d.]+) ([MG]iB)\b",
        lambda number, unit: (("ddp_bucket_bytes", _bucket(number, unit)),),
    ),
    (r"\bstages a rank (\d+)", lambda n: (("virtual_stages", int(n)),)),
    (r"\bblocks of the stages \(([\d, ]*)\)", lambda text: (("stage_blocks", _blocks(text)),)),
    (
        r"\b(\d+) accumulation steps?\b|\b(\d+) of them in the pipeline\b",
        lambda one, other: (("num_microbatches", int(one or other)),),
    ),
    (r"\b(\d+) data-parallel ranks?\b", lambda ranks: (("data_parallel", int(ranks)),)),
    (r"\bno recomputation\b", lambda: (("activation_checkpointing", "none"),)),
)


def phrases_of(text: str) -> tuple[list[Field], str]:
    """What the phrases in `text` say, and the rest of it."""
    found: list[Field] = []
    for pattern, says in _COMPILED:
        while (match := pattern.search(text)) is not None:
            found += says(*match.groups())
            text = f"{text[: match.start()]} ; {text[match.end() :]}"
    return found, text


_COMPILED = tuple((re.compile(pattern, re.IGNORECASE), says) for pattern, says in _PHRASES)


def settled(said: Mapping[str, Any], *, name: str) -> Iterator[Field]:
    """`said` as pins: what follows from degrees is split by those that are said beside it."""
    for field, value in said.items():
        match field:
            case "shard_ranks":
                ranks = said.get("cp", 1)
                yield "dp_shard", _share(value, ranks, "shards over", "cp", name)
                yield "cp", ranks
            case "expert_ranks":
                ranks = said.get("tp", 1)
                yield "ep", _share(value, ranks, "experts over", "tp", name)
                yield "experts_over_tp", True
            case _:
                yield field, value


def _share(ranks: int, parts: int, what: str, axis: str, name: str) -> int:
    share, left = divmod(ranks, parts)
    if left:
        raise SpecError(
            f"{name}: {what} {ranks} ranks do not go with {axis} {parts}, which does not divide "
            "them: give other numbers"
        )
    return share
