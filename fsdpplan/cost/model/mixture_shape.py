"""Mixture shapes: a decoder with experts of about given total and active parameters.

The inferred shape is the one closest to the usual proportions of Mixtral (8 experts as wide as a
dense network), Qwen 3 and DeepSeek (64 to 384 narrow experts). With D the parameters that each
token meets whatever its experts, and R those of all E routed experts of which k are active,

    total = D + R,  active = D + R * k / E,  so  R = (total - active) / (1 - k / E)

E and k are chosen by total / active; depth and width by D, the experts' width by R.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from fsdpplan.cost.model.params import active_parameter_count, parameter_count
from fsdpplan.cost.model.shape import (
    LARGEST_PARAMETERS,
    SMALLEST_PARAMETERS,
    SizeClass,
    depth_oddness,
    round_width,
    size_class,
    written,
)
from fsdpplan.errors import SpecError
from fsdpplan.spec.model import Experts, Model

LEAST_RATIO = 1.25
"""Total over active parameters; below, a model is as good as dense."""
LARGEST_RATIO = 40.0
"""No published mixture has more than 31 (Kimi K2)."""
TOLERANCES = (0.01, 0.02)
"""Relative errors of both counts; the second where no usual shape meets the first."""

PUBLISHED_EXPERTS = ((8, 2), (64, 8), (64, 6), (128, 8), (160, 8), (256, 8), (384, 8))
"""(experts, active) of Mixtral, Qwen 2, DeepSeek-V2-Lite, Qwen 3 (twice), DeepSeek-V3, Kimi K2."""
OTHER_EXPERTS = ((4, 2), (8, 4), (16, 4), (32, 4), (512, 8))
"""Those between and beyond, for counts that the published pairs cannot meet."""
FEW_EXPERTS = 16
"""Up to so many, experts are as wide as a dense network, and the vocabulary is Mixtral's."""
FEW_EXPERTS_VOCAB = 32000

USUAL_MOST_LAYERS = 96
WIDE = 6144
"""From here on hidden steps are twice as large and depths even: the search stays short."""
USUAL_ASPECTS = {1: 100.0, 2: 45.0}
"""hidden / layers by width of all heads over hidden: 117 in DeepSeek-V3, 128 and 110 in Mixtral; 44
in Qwen 3, whose heads are twice as wide together as the model."""


def infer_mixture(parameters: int, active_parameters: int) -> Model:
    """The mixture of experts of the most usual shape with these counts, each within 1 % (2 % where
    no usual shape comes closer)."""
    _require_possible(parameters, active_parameters)
    size = size_class(active_parameters)
    for tolerance in TOLERANCES:
        shapes = _shapes(parameters, active_parameters, size, tolerance)
        best = min(shapes, default=None, key=lambda shape: shape.oddness)
        if best is not None:
            model = _model(best, size, f"moe-{written(parameters)}-a{written(active_parameters)}")
            assert abs(parameter_count(model) / parameters - 1) <= tolerance, model
            assert abs(active_parameter_count(model) / active_parameters - 1) <= tolerance, model
            return model
    raise SpecError(
        f"no usual mixture of experts has {written(parameters)} parameters of which "
        f"{written(active_parameters)} are active; use another --active-params, or a Hugging Face "
        "config.json by --config"
    )


def _require_possible(parameters: int, active: int) -> None:
    if not SMALLEST_PARAMETERS <= parameters <= LARGEST_PARAMETERS or active < SMALLEST_PARAMETERS:
        raise SpecError(
            f"a shape is inferred for {written(SMALLEST_PARAMETERS)} to "
            f"{written(LARGEST_PARAMETERS)} parameters, active ones included; change --params or "
            "--active-params"
        )
    shown = f"{written(active)} active of {written(parameters)} parameters"
    if active > parameters:
        raise SpecError(
            f"{shown}: a token cannot meet more parameters than there are; exchange --params and "
            "--active-params?"
        )
    if active * LEAST_RATIO > parameters:
        raise SpecError(
            f"{shown} is as good as dense: leave out --active-params, or give at most "
            f"{written(int(parameters / LEAST_RATIO))}"
        )
    if active * LARGEST_RATIO < parameters:
        raise SpecError(
            f"{shown}: no usual mixture of experts has fewer than one in {LARGEST_RATIO:g} active; "
            f"use an --active-params of at least {written(math.ceil(parameters / LARGEST_RATIO))}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """Widths of one candidate, and its distance from the usual."""

    oddness: float
    vocab: int
    layers: int
    hidden: int
    heads: int
    experts: int
    active: int
    expert_hidden: int
    shared_hidden: int


def _model(shape: _Shape, size: SizeClass, name: str) -> Model:
    return Model(
        name=name,
        layers=shape.layers,
        hidden=shape.hidden,
        ffn_hidden=shape.expert_hidden * shape.active + shape.shared_hidden,
        heads=shape.heads,
        kv_heads=size.kv_heads or shape.heads,
        head_dim=size.head_dim,
        vocab=shape.vocab,
        tied_embeddings=size.tied_embeddings,
        experts=Experts(
            experts=shape.experts,
            active=shape.active,
            hidden=shape.expert_hidden,
            shared_hidden=shape.shared_hidden,
        ),
    )


def _shapes(parameters: int, active: int, size: SizeClass, tolerance: float) -> Iterator[_Shape]:
    ratio = parameters / active
    for experts, k in PUBLISHED_EXPERTS + OTHER_EXPERTS:
        routed = (parameters - active) / (1 - k / experts)
        common = parameters - routed
        if common <= 0 or experts / k > 3 * ratio:
            continue
        usual_ratio = 1.1 if experts <= FEW_EXPERTS else 1.6
        of = size
        if experts <= FEW_EXPERTS:
            of = replace(size, vocab=min(size.vocab, FEW_EXPERTS_VOCAB))
        choice = math.log(experts / k / ratio / usual_ratio) ** 2
        choice += 0.0 if (experts, k) in PUBLISHED_EXPERTS else 0.15
        for hidden, heads in _widths(active, of):
            for shape in _depths(
                hidden=hidden,
                heads=heads,
                experts=experts,
                k=k,
                routed=routed,
                common=common,
                slack=0.45 * tolerance * active,
                routed_slack=0.45 * tolerance * min(active * experts / k, parameters),
                size=of,
            ):
                yield _Shape(
                    vocab=of.vocab,
                    oddness=choice + shape[0],
                    hidden=hidden,
                    heads=heads,
                    experts=experts,
                    active=k,
                    layers=shape[1],
                    expert_hidden=shape[2],
                    shared_hidden=shape[3],
                )


def _widths(active: int, size: SizeClass) -> Iterator[tuple[int, int]]:
    """(hidden, heads): query heads as wide together as the model, or twice as wide (Qwen 3)."""
    # active = 13 hidden**2 layers = 13 hidden**3 / 70, in the middle of the search
    middle = (active * 70 / 13) ** (1 / 3)
    step = size.hidden_step if middle > WIDE else size.hidden_step // 2
    for hidden in range(
        max(step, int(0.5 * middle) // step * step), int(1.5 * middle) + step, step
    ):
        for times in (1, 2):
            heads = times * hidden // size.head_dim
            if heads % (size.kv_heads or heads) == 0:
                yield hidden, heads


def _depths(
    *,
    hidden: int,
    heads: int,
    experts: int,
    k: int,
    routed: float,
    common: float,
    slack: float,
    routed_slack: float,
    size: SizeClass,
) -> Iterator[tuple[float, int, int, int]]:
    """(oddness, layers, expert width, shared width) that meet both counts within `slack`."""
    query_dim = heads * size.head_dim
    kv_dim = (size.kv_heads or heads) * size.head_dim
    fixed = 2 * hidden * (query_dim + kv_dim) + 2 * hidden + experts * hidden
    outside = size.vocab * hidden * (1 if size.tied_embeddings else 2) + hidden
    usual_aspect = USUAL_ASPECTS[query_dim // hidden]
    usual_width = 3.5 * k if experts <= FEW_EXPERTS else 3.2
    fewest, most = max(1, int(hidden / 160)), int(hidden / 30) + 2
    for layers in range(fewest + fewest % 2, most, 2) if hidden > WIDE else range(fewest, most):
        shared_exact = ((common - outside) / layers - fixed) / (3 * hidden)
        shared_slack = slack / layers / (3 * hidden)
        if shared_exact < -shared_slack:
            break  # more layers leave even less
        if shared_exact <= shared_slack:
            shared, shared_multiple = 0, 1024
        else:
            shared, shared_multiple = round_width(shared_exact, shared_slack)
        of_width = layers * 3 * hidden * experts
        width, multiple = round_width(routed / of_width, routed_slack / of_width)
        if width == 0 or (shared == 0 and shared_exact > shared_slack):
            continue
        yield (
            0.5 * math.log(hidden / layers / usual_aspect) ** 2
            + math.log((k * width + shared) / hidden / usual_width) ** 2
            + (0.1 if shared else 0.0)
            + depth_oddness(layers)
            + 2 * max(0.0, math.log(layers / USUAL_MOST_LAYERS))
            + (0.0 if hidden % size.hidden_step == 0 else 0.03)
            + 0.02 * max(0.0, math.log2(256 / multiple))
            + 0.01 * max(0.0, math.log2(256 / shared_multiple)),
            layers,
            width,
            shared,
        )
