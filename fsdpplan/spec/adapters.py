"""Adapters: low-rank matrices that are trained beside frozen ones (LoRA), and in which format what
is frozen is stored (QLoRA: 4 bits).

A matrix W (out x in) that is adapted computes W x + scale * B (A x), with A (rank x in) and
B (out x rank), of which B begins at zero; all that is no A or B is frozen.

NF4 stores the weights of the blocks' matrices as 4-bit codes of 16 values, two a byte; 64 weights
share a scale, which is stored in 8 bits; 256 of these share an fp32 scale, after an fp32 mean of
the matrix's scales has been subtracted.

Sources: LoRA (arXiv 2106.09685), section 4.1; rank-stabilised scale (arXiv 2312.03732); QLoRA
(arXiv 2305.14314), section 3, NF4 and double quantisation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Literal, get_args

from fsdpplan.errors import SpecError
from fsdpplan.spec.model import Model
from fsdpplan.spec.values import (
    remembered_hash,
    require_choice,
    require_positive,
    require_positive_int,
)

AdapterTarget = Literal["q", "k", "v", "o", "gate", "up", "down"]
"""A matrix of a block, by the field's name: Hugging Face's `q_proj` and so on, without `_proj`."""
AdapterDtype = Literal["fp32", "bf16"]
BaseFormat = Literal["bf16", "nf4"]

TARGETS: tuple[AdapterTarget, ...] = get_args(AdapterTarget)
TARGET_GROUPS: dict[str, tuple[str, ...]] = {
    "all": TARGETS,
    "attention": ("q", "k", "v", "o"),
    "mlp": ("gate", "up", "down"),
}
"""Names that stand for several targets."""

NF4_BLOCK = 64
"""Weights that share a scale, along the flattened matrix."""
NF4_SCALE_GROUP = 256
"""Scales that share an fp32 scale of their own."""

USUAL_ALPHA = 2
"""Alpha for each rank, where none is said: the scale of the adapters is this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """What is trained beside a frozen model, and how that is stored."""

    rank: int
    alpha: float
    rslora: bool = False
    """Scale by the root of the rank (rsLoRA)."""
    targets: tuple[str, ...] = TARGETS
    """The matrices of a block that have adapters, in the order of `TARGETS`."""
    dropout: float = 0.0
    """Probability with which an element of an adapter's input is set to 0."""
    dtype: AdapterDtype = "fp32"
    """Number format in which adapters are kept and updated, with AdamW's moments."""
    base: BaseFormat = "bf16"
    """Format of the frozen matrices of the blocks; embedding, head, norms, biases and routers are
    in the compute dtype. `bf16`: these matrices, too."""

    def __post_init__(self) -> None:
        require_positive_int(rank=self.rank)
        require_positive(alpha=self.alpha)
        require_choice("dtype of adapters", self.dtype, get_args(AdapterDtype))
        require_choice("base", self.base, get_args(BaseFormat))
        if isinstance(self.dropout, bool) or not 0 <= self.dropout < 1:
            raise SpecError(
                f"dropout of adapters must be at least 0 and below 1, not {self.dropout!r}: such "
                "as 0.05"
            )
        for target in self.targets:
            require_choice("target of adapters", target, TARGETS)
        if not self.targets or self.targets != _ordered(self.targets):
            raise SpecError(
                f"targets of adapters must be some of {', '.join(TARGETS)}, each once and in this "
                f"order, not {', '.join(self.targets) or 'none'}"
            )

    @property
    def scale(self) -> float:
        """What the product of B and A is multiplied with."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def __str__(self) -> str:
        return self.words

    @property
    def words(self) -> str:
        """`LoRA rank 16 over a 4-bit base`."""
        base = "4-bit" if self.base == "nf4" else self.base
        return f"LoRA rank {self.rank} over a {base} base"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedModel(Model):
    """A frozen model with adapters: what is trained of it, as a case has it."""

    __hash__ = remembered_hash

    adapters: Adapters
    frozen_dtype: Literal["bf16", "fp32"]
    """Of what is frozen and not in 4 bits: the compute dtype."""


def adapted(model: Model, adapters: Adapters | None, frozen_dtype: str) -> Model:
    """`model` as it is trained: with `adapters`, and else frozen; or as it is, without."""
    if adapters is None and type(model) is Model:
        return model
    return _adapted(plain(model), adapters, frozen_dtype)


def plain(model: Model) -> Model:
    """`model` without what training adds to it."""
    return model if type(model) is Model else _plain(model)


@lru_cache(maxsize=64)
def _adapted(model: Model, adapters: Adapters | None, frozen_dtype: str) -> Model:
    if adapters is None:
        return model
    dtype: Literal["bf16", "fp32"] = "fp32" if frozen_dtype == "fp32" else "bf16"
    return AdaptedModel(**_values(model), adapters=adapters, frozen_dtype=dtype)


@lru_cache(maxsize=64)
def _plain(model: Model) -> Model:
    return Model(**_values(model))


def _values(model: Model) -> dict[str, Any]:
    return {field.name: getattr(model, field.name) for field in fields(Model)}


def _ordered(targets: Sequence[str]) -> tuple[str, ...]:
    return tuple(each for each in TARGETS if each in targets)


def parsed_targets(text: str, *, name: str = "lora_targets") -> tuple[str, ...]:
    """`q,v`, or `all`, `attention`, `mlp`, as plans have it. Raises SpecError."""
    known: dict[str, tuple[str, ...]] = {**TARGET_GROUPS}
    known |= {each: (each,) for each in TARGETS}
    known |= {f"{each}_proj": (each,) for each in TARGETS}
    words = [word.strip() for word in text.split(",")]
    found = {target for word in words for target in known.get(word, ())}
    if not found or any(word not in known for word in words):
        raise SpecError(
            f"{name} must be some of {','.join(TARGETS)}, or {', '.join(TARGET_GROUPS)}, not "
            f"{text!r}: such as q,v"
        )
    return _ordered(tuple(found))


def nf4_parts(elements: int) -> tuple[tuple[int, int], ...]:
    """(length, bytes of one) of the tensors of a matrix of so many weights: codes, scales of blocks
    in 8 bits, scales of these in fp32 and their mean.

        elements / 2 + elements / 64 + 4 elements / (64 * 256) + 4 bytes
    """
    blocks = -(-elements // NF4_BLOCK)
    return ((-(-elements // 2), 1), (blocks, 1), (-(-blocks // NF4_SCALE_GROUP) + 1, 4))


def nf4_bytes(elements: int) -> int:
    """Bytes of all of them."""
    return sum(length * each for length, each in nf4_parts(elements))
