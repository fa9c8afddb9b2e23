"""Shapes: a dense decoder of about a given number of parameters, or of given widths.

The inferred shape is the one closest to the usual proportions of Llama 2 and 3, GPT-2 and Qwen:
hidden / layers near 110 (less in small models), feed-forward / hidden near 3.5, heads of 128.

Mixture shapes: a decoder with experts of about given total and active parameters.

The inferred shape is the one closest to the proportions of the published mixture whose counts are
nearest. With D the parameters that each token meets whatever its experts, and R those of all E
routed experts of which k are active,

    total = D + R,  active = D + R * k / E,  so  R = (total - active) / (1 - k / E)

E and k are those of the published one where they can be; it is taken to be wider and deeper by the
cube root of what is more active, depth and width follow D from there, and the experts' width R.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from fsdpplan.cost.model.params import active_parameter_count, parameter_count
from fsdpplan.errors import SpecError
from fsdpplan.spec.model import Experts, Model

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
WIDE = 6144
"""From here on hidden steps are twice as large and depths even: the search stays short."""


def nearest_model(models: Iterable[Model], parameters: int, active_parameters: int) -> Model:
    """The one whose counts are nearest, each by the logarithm of its ratio; the first of equals."""

    def distance(model: Model) -> float:
        total = math.log(parameter_count(model) / parameters)
        return total**2 + math.log(active_parameter_count(model) / active_parameters) ** 2

    return min(models, key=distance)


def infer_mixture(parameters: int, active_parameters: int, *, published: Iterable[Model]) -> Model:
    """The mixture of experts with these counts, each within 1 % (2 % where no shape comes closer),
    in the proportions of the nearest one that is published."""
    _require_possible(parameters, active_parameters)
    like = nearest_model(published, parameters, active_parameters)
    size = size_class(active_parameters)
    size = replace(size, vocab=min(size.vocab, like.vocab))
    usual = _proportions(like, active_parameters)
    for tolerance in TOLERANCES:
        shapes = _mixture_shapes(parameters, active_parameters, size, usual, tolerance)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Proportions:
    """What a published mixture would have if it were as large as is asked for."""

    layers: float
    hidden: float
    query_fraction: float
    """Width of all heads over hidden."""
    ffn_fraction: float
    """Width of what one token meets of a feed-forward over hidden."""
    experts: int
    active: int
    has_shared: bool


def _proportions(like: Model, active_parameters: int) -> _Proportions:
    assert like.experts is not None, like.name
    scale = (active_parameters / active_parameter_count(like)) ** (1 / 3)
    met = like.experts.active * like.experts.hidden + like.experts.shared_hidden
    return _Proportions(
        layers=scale * like.layers,
        hidden=scale * like.hidden,
        query_fraction=like.heads * like.head_dim / like.hidden,
        ffn_fraction=met / like.hidden,
        experts=like.experts.experts,
        active=like.experts.active,
        has_shared=like.experts.shared_hidden > 0,
    )


def _mixture_shapes(
    parameters: int, active: int, size: SizeClass, usual: _Proportions, tolerance: float
) -> Iterator[_Shape]:
    ratio = parameters / active
    own = (usual.experts, usual.active)
    for experts, k in dict.fromkeys((own, *PUBLISHED_EXPERTS, *OTHER_EXPERTS)):
        routed = (parameters - active) / (1 - k / experts)
        common = parameters - routed
        if common <= 0 or experts / k > 3 * ratio:
            continue
        choice = math.log(experts / usual.experts) ** 2 + math.log(k / usual.active) ** 2
        for hidden, heads in _widths(size, usual):
            query_fraction = heads * size.head_dim / hidden
            wide = choice + math.log(hidden / usual.hidden) ** 2
            wide += 0.2 * math.log(query_fraction / usual.query_fraction) ** 2
            for shape in _depths(
                hidden=hidden,
                heads=heads,
                experts=experts,
                k=k,
                routed=routed,
                common=common,
                slack=0.45 * tolerance * active,
                routed_slack=0.45 * tolerance * min(active * experts / k, parameters),
                size=size,
                usual=usual,
            ):
                yield _Shape(
                    vocab=size.vocab,
                    oddness=wide + shape[0],
                    hidden=hidden,
                    heads=heads,
                    experts=experts,
                    active=k,
                    layers=shape[1],
                    expert_hidden=shape[2],
                    shared_hidden=shape[3],
                )


def _widths(size: SizeClass, usual: _Proportions) -> Iterator[tuple[int, int]]:
    """(hidden, heads): query heads as wide together as the model, or twice as wide (Qwen 3)."""
    step = max(size.head_dim, size.hidden_step // (4 if usual.hidden < WIDE else 2))
    least = max(step, int(0.6 * usual.hidden) // step * step)
    for hidden in range(least, int(1.6 * usual.hidden) + step, step):
        for times in (1, 2):
            heads = times * hidden // size.head_dim
            if heads and heads % (size.kv_heads or heads) == 0:
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
    usual: _Proportions,
) -> Iterator[tuple[float, int, int, int]]:
    """(oddness, layers, expert width, shared width) that meet both counts within `slack`."""
    query_dim = heads * size.head_dim
    kv_dim = (size.kv_heads or heads) * size.head_dim
    fixed = 2 * hidden * (query_dim + kv_dim) + 2 * hidden + experts * hidden
    outside = size.vocab * hidden * (1 if size.tied_embeddings else 2) + hidden
    fewest, most = max(1, int(usual.layers / 2)), int(2 * usual.layers) + 2
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
            math.log(layers / usual.layers) ** 2
            + 0.5 * math.log((k * width + shared) / hidden / usual.ffn_fraction) ** 2
            + (0.1 if (shared > 0) != usual.has_shared else 0.0)
            + depth_oddness(layers)
            + (0.0 if hidden % size.hidden_step == 0 else 0.01)
            + 0.02 * max(0.0, math.log2(256 / multiple))
            + 0.01 * max(0.0, math.log2(256 / shared_multiple)),
            layers,
            width,
            shared,
        )
