"""Columns of a table of measured runs, and what may stand in them: docs/reference/runs.md."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from fsdpplan.errors import SpecError
from fsdpplan.files.table import short
from fsdpplan.spec.model import MAX_LAYERS, MAX_WIDTH

MAX_TEXT = 2000
MAX_RANKS = 1_000_000
MAX_BATCH = 1_000_000_000
MAX_NUMBER = 1e18


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A column of one line of text."""

    choices: tuple[str, ...] = ()
    """What may stand there; empty: anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A column of whole numbers."""

    highest: int
    least: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A column of finite numbers above 0."""


Kind: TypeAlias = Text | Whole | Number
Cell: TypeAlias = str | int | float | None

YES_NO = Text(choices=("y", "n"))
RANKS = Whole(highest=MAX_RANKS)
WIDTH = Whole(highest=MAX_WIDTH)
BATCH = Whole(highest=MAX_BATCH)

COLUMNS: Mapping[str, Kind] = {
    "source_id": Text(),
    "source_url": Text(),
    "source_location": Text(),
    "date": Text(),
    "framework": Text(),
    "model_name": Text(),
    "params_b": Number(),
    "layers": Whole(highest=MAX_LAYERS),
    "hidden": WIDTH,
    "ffn_hidden": WIDTH,
    "heads": WIDTH,
    "kv_heads": WIDTH,
    "head_dim": WIDTH,
    "vocab": WIDTH,
    "tied": YES_NO,
    "seq_len": WIDTH,
    "attention_type": Text(),
    "moe": Text(),
    "gpu": Text(),
    "gpus": RANKS,
    "gpus_per_node": RANKS,
    "intra_bw_note": Text(),
    "inter_net_note": Text(),
    "cpu": Text(),
    "torch": Text(),
    "allocator": Text(choices=("fixed", "growing")),
    "dtype": Text(),
    "zero_stage": Text(choices=("0", "1", "2", "3", "hsdp")),
    "dp_replicate": RANKS,
    "dp_shard": RANKS,
    "tp": RANKS,
    "sp": YES_NO,
    "cp": RANKS,
    "pp": RANKS,
    "vpp": RANKS,
    "schedule": Text(),
    "ep": RANKS,
    "micro_batch": BATCH,
    "global_batch": BATCH,
    "grad_accum": BATCH,
    "act_ckpt": Text(choices=("none", "selective", "op", "full")),
    "compile": YES_NO,
    "async_tp": YES_NO,
    "offload": Text(),
    "step_time_s": Number(),
    "tokens_per_s_per_gpu": Number(),
    "tflops_per_gpu": Number(),
    "mfu": Number(),
    "hfu": Number(),
    "peak_mem_gib": Number(),
    "oom": Text(choices=("n", "y", "fail")),
    "notes": Text(),
}
"""Every column that a table may have."""

REQUIRED = ("model_name", "layers", "hidden", "heads", "seq_len", "gpu", "gpus")
"""Columns that a table must have; a field in them may still be empty."""


def cell_value(name: str, text: str, place: str) -> Cell:
    """The value of one field, or None where it is empty."""
    if not text:
        return None
    match COLUMNS[name]:
        case Text(choices=choices):
            value: Cell = text if _is_text(text, choices) else None
            wanted = f"one of {', '.join(choices)}" if choices else "one line of printable text"
        case Whole(least=least, highest=highest):
            value = int(text) if text.isascii() and text.isdigit() and len(text) <= 15 else None
            value = value if value is not None and least <= value <= highest else None
            wanted = f"a whole number from {least} to {highest}"
        case Number():
            value = _number(text)
            wanted = "a number above 0, with a point and no unit"
    if value is None:
        raise SpecError(
            f"{place}, column {name}: {short(text)} must be {wanted}, or empty where it is not "
            "known"
        )
    return value


def _is_text(text: str, choices: tuple[str, ...]) -> bool:
    return text in choices if choices else text.isprintable() and len(text) <= MAX_TEXT


def _number(text: str) -> float | None:
    try:
        value = float(text) if text.isascii() and len(text) <= 40 else math.nan
    except ValueError:
        return None
    return value if 0 < value <= MAX_NUMBER else None
