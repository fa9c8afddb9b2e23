"""Known: a row's model as the catalogue has it, where name and shape say that it is that one."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

from fsdpplan.cost.model.params import parameter_count
from fsdpplan.files.catalogue import load_model, model_names
from fsdpplan.files.runs.table import MeasuredRun
from fsdpplan.spec.model import Experts, Model
from fsdpplan.validate.runs.skipped import NotExpressed

MIXTURE = re.compile(r"(\d{1,5})/(\d{1,5})(?:\+(\d{1,3}))?")
"""Routed experts, those that a token visits, and shared ones: `128/8`, `64/6+2`."""

NEAR = 0.05
"""Counts of parameters that are further apart are not of the same model."""

WIDTH_MULTIPLE = 64
"""Experts are as wide as a multiple of this: a tile of matmuls."""


def catalogue_model(run: MeasuredRun, *, seq_len: int) -> Model | None:
    """The catalogue's model of that name with every column's number; None where there is none."""
    name = _by_plain_name().get(_plain(run.model_name))
    if name is None:
        return None
    model = load_model(name)
    expert_width = model.experts.hidden if model.experts else None
    same = (
        (run.layers, run.hidden, run.heads) == (model.layers, model.hidden, model.heads)
        and run.kv_heads in (None, model.kv_heads)
        and run.vocab in (None, model.vocab)
        and run.ffn_hidden in (None, model.ffn_hidden, expert_width)
        and _same_mixture(run, model)
        and (run.parameters is None or abs(run.parameters / parameter_count(model) - 1) < NEAR)
        and (run.attention_type == "mla") == (model.latent is not None)
    )
    return replace(model, name=run.model_name, max_positions=seq_len) if same else None


def _same_mixture(run: MeasuredRun, model: Model) -> bool:
    if not run.moe or model.experts is None:
        return not run.moe and model.experts is None
    routed, active, _ = mixture_of(run)
    return (routed, active) == (model.experts.experts, model.experts.active)


@lru_cache(maxsize=1)
def _by_plain_name() -> dict[str, str]:
    return {_plain(name): name for name in model_names()}


def _plain(name: str) -> str:
    """Letters and digits alone: `Llama3.1-8B` and `llama-3.1-8b` are the same."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def mixture_of(run: MeasuredRun) -> tuple[int, int, int]:
    """(routed experts, those that a token visits, shared experts) of a row with experts."""
    found = MIXTURE.fullmatch(run.moe)
    if found is None:
        raise NotExpressed("moe is not written as 128/8", run.moe)
    return int(found[1]), int(found[2]), int(found[3] or 0)


def experts_by_columns(run: MeasuredRun, said: list[str]) -> Experts | None:
    """The experts of a model that the catalogue does not have, in every block."""
    if not run.moe:
        return None
    routed, active, shared = mixture_of(run)
    if run.ffn_hidden is None and run.parameters is None:
        raise NotExpressed("the width of an expert is not given", "nor params_b")
    width = run.ffn_hidden or 1
    if run.ffn_hidden is not None:
        said.append(f"each expert {width} wide, as ffn_hidden, in every block")
    return Experts(experts=routed, active=active, hidden=width, shared_hidden=shared * width)


def with_expert_width(run: MeasuredRun, model: Model, said: list[str]) -> Model:
    """Experts as wide as the count of parameters needs, where no column gives their width."""
    if model.experts is None or run.ffn_hidden is not None or run.parameters is None:
        return model
    step = replace(model, experts=_widened(model.experts, WIDTH_MULTIPLE))
    twice = replace(model, experts=_widened(model.experts, 2 * WIDTH_MULTIPLE))
    one, two = parameter_count(step), parameter_count(twice)
    width = WIDTH_MULTIPLE * max(1, round(1 + (run.parameters - one) / (two - one)))
    said.append(f"each expert {width} wide, by params_b, in every block")
    return replace(model, ffn_hidden=width, experts=_widened(model.experts, width))


def _widened(experts: Experts, width: int) -> Experts:
    shared = experts.shared_hidden // experts.hidden
    return replace(experts, hidden=width, shared_hidden=shared * width)
