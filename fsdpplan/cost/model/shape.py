"""Shapes: a dense decoder of about a given number of parameters, or of given widths.

The inferred shape is the one closest to the usual proportions of Llama 2 and 3, GPT-2 and Qwen:
hidden / layers near 110 (less in small models), feed-forward / hidden near 3.5, heads of 128.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from fsdpplan.cost.model.params import parameter_count
from fsdpplan.errors import SpecError
from fsdpplan.spec.model import Model

SMALLEST_PARAMETERS = 500_000
LARGEST_PARAMETERS = 4 * 10**12
TOLERANCE_FRACTION = 0.01
_BY_HAND = "--layers --hidden --ffn-hidden --heads --kv-heads --vocab"


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeClass:
    """What models of one order of magnitude have in common."""

    vocab: int
    tied_embeddings: bool
    head_dim: int
    kv_heads: int | None
    """None: as many as query heads."""
    hidden_step: int


def infer_model(parameters: int) -> Model:
    """The dense decoder of the most usual shape with `parameters` parameters, within 1 %."""
    if not SMALLEST_PARAMETERS <= parameters <= LARGEST_PARAMETERS:
        raise SpecError(
            f"a shape is inferred for {written(SMALLEST_PARAMETERS)} to "
            f"{written(LARGEST_PARAMETERS)} parameters, not for "
            f"{'more' if parameters > LARGEST_PARAMETERS else parameters}; "
            f"give the shape itself: {_BY_HAND}"
        )
    size = size_class(parameters)
    _, layers, hidden, ffn_hidden = min(_shapes(parameters, size))
    heads = hidden // size.head_dim
    model = Model(
        name=f"dense-{written(parameters)}",
        layers=layers,
        hidden=hidden,
        ffn_hidden=ffn_hidden,
        heads=heads,
        kv_heads=size.kv_heads or heads,
        head_dim=size.head_dim,
        vocab=size.vocab,
        tied_embeddings=size.tied_embeddings,
    )
    error = abs(parameter_count(model) / parameters - 1)
    assert error <= TOLERANCE_FRACTION, (parameters, model)
    return model


def model_from_shape(
    *, layers: int, hidden: int, ffn_hidden: int, heads: int, kv_heads: int, vocab: int
) -> Model:
    """A Llama-like decoder of exactly these widths."""
    if heads < 1 or hidden % heads:
        raise SpecError(
            f"hidden {hidden} does not split into {heads} heads: use a --hidden that is a "
            "multiple of --heads"
        )
    return Model(
        name="custom",
        layers=layers,
        hidden=hidden,
        ffn_hidden=ffn_hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        vocab=vocab,
    )


def written(parameters: int) -> str:
    """A count as people name models: `70b`, `1.5b`, `10m`."""
    for scale, suffix in ((10**12, "t"), (10**9, "b"), (10**6, "m"), (10**3, "k")):
        if parameters >= scale:
            return f"{parameters / scale:.4g}{suffix}"
    return str(parameters)


def size_class(parameters: int) -> SizeClass:
    """Vocabularies grow with the model, so that the embedding never dominates."""
    if parameters < 20e6:
        return SizeClass(
            vocab=256, tied_embeddings=True, head_dim=32, kv_heads=None, hidden_step=64
        )
    if parameters < 100e6:
        return SizeClass(
            vocab=4096, tied_embeddings=True, head_dim=64, kv_heads=None, hidden_step=128
        )
    if parameters < 600e6:
        return SizeClass(
            vocab=32000, tied_embeddings=True, head_dim=64, kv_heads=None, hidden_step=256
        )
    if parameters < 2.5e9:
        return SizeClass(
            vocab=128256, tied_embeddings=True, head_dim=64, kv_heads=8, hidden_step=512
        )
    return SizeClass(
        vocab=128256,
        tied_embeddings=parameters < 6e9,
        head_dim=128,
        kv_heads=8,
        hidden_step=1024,
    )


def _usual_aspect(parameters: int) -> float:
    """Usual hidden / layers: 110 from a few 10**9 parameters on, 50 at 10**7."""
    return 110 * min(1.0, math.pow(parameters / 3e9, 0.15))


def _shapes(parameters: int, size: SizeClass) -> Iterator[tuple[float, int, int, int]]:
    """(distance from the usual, layers, hidden, ffn_hidden) of shapes with this many parameters."""
    aspect = _usual_aspect(parameters)
    # N = 12.5 hidden**2 layers = 12.5 hidden**3 / aspect, in the middle of the search
    middle = (parameters * aspect / 12.5) ** (1 / 3)
    step = size.hidden_step
    for hidden in range(
        max(step, int(0.7 * middle) // step * step), int(1.5 * middle) + step, step
    ):
        kv_dim = hidden if size.kv_heads is None else size.kv_heads * size.head_dim
        outside = size.vocab * hidden * (1 if size.tied_embeddings else 2) + hidden
        besides_ffn = 2 * hidden * (hidden + kv_dim) + 2 * hidden
        inside = parameters - outside
        fewest = max(1, int(inside / (besides_ffn + 3 * 5.5 * hidden * hidden)))
        most = int(inside / (besides_ffn + 3 * 1.8 * hidden * hidden)) + 1
        for layers in range(fewest, most + 1):
            exact_ffn = (inside / layers - besides_ffn) / (3 * hidden)
            slack = TOLERANCE_FRACTION * 0.99 * parameters / layers / (3 * hidden)
            ffn_hidden, multiple = round_width(exact_ffn, slack)
            if ffn_hidden > 0:
                oddness = (
                    math.log(hidden / layers / aspect) ** 2
                    + math.log(ffn_hidden / hidden / 3.5) ** 2
                    + depth_oddness(layers)
                    + 0.01 * max(0.0, math.log2(512 / multiple))
                )
                yield oddness, layers, hidden, ffn_hidden


def round_width(exact: float, slack: float) -> tuple[int, int]:
    """The width within `slack` of `exact` that is a multiple of the largest power of two."""
    for power in range(10, -1, -1):
        multiple = 2**power
        width = round(exact / multiple) * multiple
        if abs(width - exact) <= slack and width > 0:
            return width, multiple
    return 0, 1


def depth_oddness(layers: int) -> float:
    """Deep models have a number of layers that pipeline stages divide."""
    if layers < 16:
        return 0.0 if layers % 2 == 0 else 0.02
    return 0.0 if layers % 8 == 0 else 0.01 if layers % 4 == 0 else 0.03
