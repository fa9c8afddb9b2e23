"""Which model: one of the four ways to name one, with the source of its numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fsdpplan.cli.options.question import ModelOptions
from fsdpplan.cli.resolve import Resolved, flag
from fsdpplan.cost.model.params import active_parameter_count, parameter_count
from fsdpplan.cost.model.shape import (
    infer_mixture,
    infer_model,
    model_from_shape,
    nearest_model,
)
from fsdpplan.errors import SpecError
from fsdpplan.files.catalogue import catalogue_models, load_model, model_source
from fsdpplan.files.table import short
from fsdpplan.spec.model import Experts, Model
from fsdpplan.spec.training import Dropout
from fsdpplan.units import format_count

OFFERED_FRACTION = 0.1
"""Of the parameters, up to which a model of the catalogue may be what was meant."""

SHAPE_FLAGS = ("layers", "hidden", "ffn_hidden", "heads", "kv_heads", "vocab")


def resolve_model(options: ModelOptions) -> Resolved[Model]:
    """The model, by the one way that was given, its vocabulary padded as asked."""
    found = _named(options)
    if options.vocab_multiple is None:
        return found
    return replace(
        found,
        value=replace(found.value, vocab_multiple=options.vocab_multiple),
        sources=(*found.sources, ("model.vocab_multiple", "flag --vocab-multiple")),
    )


def _named(options: ModelOptions) -> Resolved[Model]:
    shape = [name for name in SHAPE_FLAGS if getattr(options, name) is not None]
    ways = [name for name in ("params", "model", "config") if getattr(options, name) is not None]
    given = [*map(flag, ways), *map(flag, shape[:1])]
    if len(given) > 1:
        raise SpecError(f"{' and '.join(given)} both say which model: keep one of them")
    if options.active_params is not None and options.params is None:
        raise SpecError(_active_alone(given))
    if options.params is not None and options.active_params is not None:
        return _from_both_counts(options.params, options.active_params)
    if options.params is not None:
        return _from_parameters(options.params)
    if options.model is not None:
        return _from_catalogue(options.model)
    if options.config is not None:
        return _from_config(options.config)
    if shape:
        return _from_shape(options, shape)
    raise SpecError(
        "no model was given: type --params 70e9, --model llama-3.1-8b, --config config.json, "
        "or a shape from --layers to --vocab"
    )


def _active_alone(given: list[str]) -> str:
    if not given:
        return (
            "--active-params says how many of the parameters a token meets: add --params, such as "
            "--params 235e9 --active-params 22e9"
        )
    return (
        f"--active-params goes with --params only: {given[0]} says already which model, its "
        "experts included; leave out --active-params"
    )


def _from_both_counts(parameters: int, active_parameters: int) -> Resolved[Model]:
    published = catalogue_models(with_experts=True)
    model = infer_mixture(parameters, active_parameters, published=published)
    real, active = parameter_count(model), active_parameter_count(model)
    near = nearest_model(published, parameters, active_parameters)
    inferred = f"inferred from --params and --active-params, in the proportions of {near.name}"
    counts = f"{format_count(parameter_count(near))}, {format_count(active_parameter_count(near))}"
    return Resolved(
        value=model,
        sources=tuple((f"model.{name}", inferred) for name in (*SHAPE_FLAGS, "experts")),
        assumptions=(
            f"the shape is inferred from {format_count(parameters)} parameters, "
            f"{format_count(active_parameters)} active: {_shape(model)}; "
            f"that has {real:,} ({(real / parameters - 1) * 100:+.2f} %), {active:,} active "
            f"({(active / active_parameters - 1) * 100:+.2f} %)",
            f"its proportions are those of {near.name}, the nearest of the catalogue ({counts} "
            f"active): --model {near.name} takes that one",
        ),
    )


def _experts(experts: Experts) -> str:
    shared = f" and {experts.shared_hidden} for every token" if experts.shared_hidden else ""
    return f"{experts.experts} experts of {experts.hidden} ({experts.active} a token){shared}"


def _from_parameters(parameters: int) -> Resolved[Model]:
    model = infer_model(parameters)
    real = parameter_count(model)
    return Resolved(
        value=model,
        sources=tuple((f"model.{name}", "inferred from --params") for name in SHAPE_FLAGS),
        assumptions=(
            f"the shape is inferred from {format_count(parameters)} parameters: {_shape(model)}; "
            f"that has {real:,} ({(real / parameters - 1) * 100:+.2f} %)",
            *_offered(parameters),
        ),
    )


def _offered(parameters: int) -> tuple[str, ...]:
    """The model of the catalogue that is about as large, by name."""
    near = nearest_model(catalogue_models(with_experts=False), parameters, parameters)
    real = parameter_count(near)
    if abs(real / parameters - 1) > OFFERED_FRACTION:
        return ()
    return (
        f"the nearest of the catalogue is {near.name} ({format_count(real)}): --model {near.name} "
        "takes its shape",
    )


def _shape(model: Model) -> str:
    feed_forward = _experts(model.experts) if model.experts else f"feed-forward {model.ffn_hidden}"
    return (
        f"{model.layers} layers, hidden {model.hidden}, {feed_forward}, {model.heads} heads, "
        f"{model.kv_heads} key/value heads, vocabulary {model.vocab}"
    )


def _from_catalogue(name: str) -> Resolved[Model]:
    model, source = load_model(name), model_source(name)
    typed = name.strip().lower().rsplit("/", 1)[-1]
    is_itself = typed == model.name or typed in source.lower()
    taken = f"{short(name)} is taken as {model.name} of the catalogue (--config for another shape)"
    return Resolved(
        value=model,
        sources=(("model", f"catalogue {model.name}: {source}"),),
        assumptions=() if is_itself else (taken,),
    )


def _from_config(path: Path) -> Resolved[Model]:
    from fsdpplan.files.huggingface.config import read_hf_config  # the other three ways do without

    loaded = read_hf_config(path)
    return Resolved(
        value=loaded.model, sources=(("model", f"config {path}"),), assumptions=loaded.notes
    )


def published_dropout(options: ModelOptions) -> Dropout | None:
    """What the config drops, if it is by one that the model was named."""
    if options.config is None:
        return None
    from fsdpplan.files.huggingface.config import read_hf_config  # the other three ways do without

    return read_hf_config(options.config).dropout


def _from_shape(options: ModelOptions, given: list[str]) -> Resolved[Model]:
    missing = [name for name in SHAPE_FLAGS if name not in given]
    if missing:
        raise SpecError(
            f"a shape needs all six numbers, and has {', '.join(map(flag, given))}: "
            f"add {', '.join(map(flag, missing))}"
        )
    model = model_from_shape(**{name: getattr(options, name) for name in SHAPE_FLAGS})
    return Resolved(
        value=model,
        sources=tuple((f"model.{name}", f"flag {flag(name)}") for name in SHAPE_FLAGS),
        assumptions=(
            "a Llama-style decoder has this shape: SwiGLU, RMSNorm, rotary positions, "
            "no biases, untied output head",
        ),
    )
