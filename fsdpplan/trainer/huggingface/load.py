"""Load: published weights into the reference decoder, whatever its layout; each rank reads the
bytes of its own parts, and none holds a whole model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.whole_file import read_small
from ..config import ModelConfig, PlanConfig
from ..errors import TrainerError
from ..model.weights import (
    VOCABULARIES,
    fill_quantised,
    is_adapter,
    is_quantised,
    named_parameters,
    quantised_layers,
)
from ..parallel.shards import local, own_box
from ..parallel.tied_tables import HEAD, TABLE
from ..precision import compute_dtype
from ..user.safetensors_load import Files, Stored, read_headers
from .names import Published, published_tensors
from .same import require_same_model

CONFIG_NAME = "config.json"
COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_alpha")
"""Keys of a config, the second one of DeepSeek-V2."""
COMPUTED = (".inv_freq", ".attn.bias", ".attn.masked_bias")
"""Ends of names of buffers that releases of before held."""
PREFIXES = ("transformer.", "model.")
"""Of names, which the files of some releases lack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where one of our parameters is, or a row of a stack of them."""

    stored: Stored
    published: Published
    index: int
    """Its place among what the published tensor holds."""


def read_config(folder: Path) -> dict[str, Any]:
    """The `config.json` of a published model."""
    path = folder / CONFIG_NAME
    try:
        config = json.loads(read_small(path))
    except (OSError, ValueError, RecursionError) as error:
        raise TrainerError(
            f"cannot read {path}: {error}; give --init-from the folder of a model of the Hugging "
            "Face hub, with its config.json and *.safetensors"
        ) from error
    if not isinstance(config, dict):
        raise TrainerError(f"{path} is not a JSON object; download it again")
    return config


def read_coefficient(folder: Path) -> float | None:
    """That of the auxiliary loss, as a published model's config says it; None: it does not, or is
    not to be read here."""
    try:
        config = read_config(folder)
    except TrainerError:  # which loading it raises again
        return None
    for found in (config[key] for key in COEFFICIENTS if key in config):
        if isinstance(found, int | float) and not isinstance(found, bool) and found >= 0:
            return float(found)
    return None


def require_loadable(plan: PlanConfig, folder: Path) -> str:
    """The family of the model in `folder`. Raises TrainerError where it is not the plan's model."""
    config = read_config(folder)
    where = str(folder / CONFIG_NAME)
    training = plan.training
    return require_same_model(
        config, plan.model, seq_len=training.seq_len, where=where, dropout=training.dropout
    )


@torch.no_grad()
def load_published(model: nn.Module, plan: PlanConfig, folder: Path) -> None:
    """Fill this rank's part of the reference decoder, but for adapters, which are not published.
    Raises TrainerError, before anything is written, where names or shapes differ.

    What is kept in NF4 is quantised a matrix at a time.
    """
    family = require_loadable(plan, folder)
    headers = read_headers(folder)
    sources = _sources(family, plan.model, headers, folder)
    wanted, quantised = list(_wanted(model, plan)), dict(quantised_layers(model))
    shapes = {name: tensor.shape for name, tensor in wanted}
    shapes |= {name: layer.whole_shape for name, layer in quantised.items()}
    for name, shape in shapes.items():
        _require_shapes(name, tuple(shape), sources.get(name, ()), plan, folder)
    for buffer in model.buffers():
        buffer.zero_()
    dtype = compute_dtype(plan.training)
    with Files() as files:
        for name, tensor in wanted:
            _fill(tensor, sources[name], files)
        for name, layer in quantised.items():
            (source,) = sources[name]
            whole = _part(source, files).to(device=local(layer.codes).device, dtype=dtype)
            fill_quantised(layer, whole)


class PublishedWeights:
    """A published model's weights by our names, each read when it is asked for."""

    def __init__(self, sources: dict[str, list[Source]]) -> None:
        self._sources, self._files = sources, Files()

    def names(self) -> list[str]:
        """All of them."""
        return list(self._sources)

    def has(self, name: str) -> bool:
        """Whether it is there."""
        return name in self._sources

    def read(self, name: str) -> Tensor:
        """The whole, as it is stored."""
        (source,) = self._sources[name]
        return _part(source, self._files)


def published_weights(family: str, model: ModelConfig, folder: Path) -> PublishedWeights:
    """The weights of a dense model in `folder`."""
    return PublishedWeights(_sources(family, model, read_headers(folder), folder))


def _wanted(model: nn.Module, plan: PlanConfig) -> Iterator[tuple[str, Tensor]]:
    """(name in the whole model, tensor) of what is published and kept as it is; a head that is a
    copy of the embedding under its name."""
    for name, parameter in named_parameters(model):
        if is_adapter(name) or is_quantised(name):
            continue
        yield TABLE if name == HEAD and plan.model.tied_embeddings else name, parameter
    router = plan.model.experts.router if plan.model.experts else None
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias") and router is not None and router.scores == "sigmoid":
            yield name.removeprefix("module."), buffer


def _sources(
    family: str, model: ModelConfig, headers: dict[str, Stored], folder: Path
) -> dict[str, list[Source]]:
    """Name of ours -> where it is: one place, or one of each expert."""
    found: dict[str, list[Source]] = {}
    left = set(headers)
    for published in published_tensors(family, model):
        name = _spelled(published.name, headers)
        if name is None:
            raise TrainerError(
                f"{folder} has no weight {published.name!r}: it is not whole; download it again"
            )
        left.discard(name)
        for index, ours in enumerate(published.ours):
            source = Source(stored=headers[name], published=published, index=index)
            found.setdefault(ours, []).append(source)
    unknown = sorted(name for name in left if not _is_left_out(name, model))
    if unknown:
        raise TrainerError(
            f"{folder} has {len(unknown)} weights that a {family} of the plan's shape has not, "
            f"such as {unknown[0]!r}: plan again with its config (recommend --config)"
        )
    return found


def _spelled(name: str, headers: dict[str, Stored]) -> str | None:
    """`name` as the files have it."""
    without = [name.removeprefix(prefix) for prefix in PREFIXES]
    return next((each for each in (name, *without) if each in headers), None)


def _is_left_out(name: str, model: ModelConfig) -> bool:
    """What says nothing: computed buffers, a second copy of a tied table, DeepSeek's layers behind
    the last one, which predict a second token."""
    if name.endswith(COMPUTED) or (model.tied_embeddings and name == "lm_head.weight"):
        return True
    words = name.split(".")
    return words[:2] == ["model", "layers"] and int(words[2]) >= model.layers


def _require_shapes(
    name: str,
    wanted: tuple[int, ...],
    sources: list[Source] | tuple[()],
    plan: PlanConfig,
    folder: Path,
) -> None:
    if not sources:
        raise TrainerError(f"{folder} has no weight for {name}: plan again with its config")
    if name in VOCABULARIES:  # what is padded has no rows there
        wanted = (plan.model.vocab, *wanted[1:])
    for source in sources:
        found = _shape_of(source)
        shape = wanted if source.published.expert is None else wanted[1:]
        if found != shape:
            raise TrainerError(
                f"{source.published.name} in {source.stored.file.name} holds {name} with shape "
                f"{list(found)}, the plan's is {list(shape)}: plan again with its config"
            )


def _shape_of(source: Source) -> tuple[int, ...]:
    whole = torch.empty(source.stored.shape, device="meta")
    try:
        parts = source.published.form.split(whole)
    except (RuntimeError, IndexError):  # it does not divide as the plan's would
        return tuple(whole.shape)
    return tuple(parts[source.index].shape)


def _fill(tensor: Tensor, sources: list[Source], files: Files) -> None:
    own, box = local(tensor), own_box(tensor)
    if sources[0].published.expert is None:
        # a slice ends where the tensor does: rows beyond are padding
        part = _part(sources[0], files)[box]
        own[: len(part)].copy_(part)
        own[len(part) :].zero_()
        return
    by_expert = {source.published.expert: source for source in sources}
    for row, expert in enumerate(range(box[0].start, box[0].stop)):
        own[row].copy_(_part(by_expert[expert], files)[box[1:]])


def _part(source: Source, files: Files) -> Tensor:
    """The whole of ours, as a view of the file where its form is one."""
    everything = (slice(None),) * len(source.stored.shape)
    return source.published.form.split(files.part(source.stored, everything))[source.index]
