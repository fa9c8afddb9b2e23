"""The plan as the trainer reads it: standard library only, strict, nothing planned again.

A plan is the JSON of five nouns. The trainer reads `model`, `training` and `layout` whole (a key
that it does not know might be a setting that it would ignore, so it refuses it), of `cluster` only
the device and the counts, and nothing of the prediction.
"""

from __future__ import annotations

import json
import math
import os
import types
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from .errors import TrainerError

PLAN_VARIABLE = "FSDPPLAN_PLAN"
"""Environment variable that carries the plan to every rank: JSON text, or the path of a file."""

SCHEMA_VERSION = 1
"""Version of the plan document that this trainer reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The `model` part of a plan, field by field."""

    name: str
    layers: int
    hidden: int
    ffn_hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    mlp: str
    norm: str
    positions: str
    max_positions: int
    tied_embeddings: bool
    attention_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope_theta: float
    norm_epsilon: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """What the trainer needs of `cluster.device`."""

    name: str
    kind: str
    peak_bf16_flops_per_second: float
    peak_fp32_flops_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """What the trainer needs of `cluster`."""

    device: DeviceConfig
    gpus: int
    gpus_per_node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """What the trainer needs of `training`."""

    seq_len: int
    global_batch: int
    precision: str
    reduce_dtype: str
    optimizer: str
    runtime: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutConfig:
    """The `layout` part of a plan, field by field."""

    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    pp: int
    ep: int
    sharding: str
    reshard_after_forward: int | str
    gradient_sync: str
    wrap_blocks: int
    ddp_bucket_bytes: int
    micro_batch: int
    num_microbatches: int
    schedule: str
    virtual_stages: int
    activation_checkpointing: str
    sequence_parallel: bool
    loss_parallel: bool
    async_tp: bool
    offload: str
    compile: bool

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def data_parallel(self) -> int:
        """Ranks over which the batch splits."""
        return self.dp_replicate * self.dp_shard


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """A plan, reduced to what a training run needs."""

    model: ModelConfig
    cluster: ClusterConfig
    training: TrainingConfig
    layout: LayoutConfig

    @property
    def peak_flops_per_second(self) -> float:
        """Dense peak of all devices together, at the precision of the matmuls."""
        device = self.cluster.device
        rate = {
            "bf16": device.peak_bf16_flops_per_second,
            "fp32": device.peak_fp32_flops_per_second,
        }[self.training.precision]
        return rate * self.cluster.gpus


ONLY_VALUES: dict[str, tuple[object, str]] = {
    "experts": (None, "a mixture of experts"),
    "latent": (None, "latent attention"),
    "norm_bias": (True, "layer norms without biases"),
    "qk_norm_width": ("head", "norms that span the queries or keys of all heads"),
    "post_norms": (False, "norms behind attention and feed-forward"),
    "embedding_norm": (False, "a norm behind the embedding"),
    "attention_sinks": (False, "attention sinks"),
}
"""Fields of a model that the decoder has in one form only: (the form, what the others are)."""

NOT_FOR_THE_TRAINER: dict[type, frozenset[str] | None] = {
    ModelConfig: frozenset({*ONLY_VALUES, "sliding_window", "full_attention_every"}),
    TrainingConfig: frozenset({"tokens", "headroom_fraction", "fp8_recipe", "fp8_all_gather"}),
    LayoutConfig: frozenset({"stage_blocks"}),
    ClusterConfig: None,
    DeviceConfig: None,
    PlanConfig: None,
}
"""Keys that may be present and are not read; None: any."""

Parsed = TypeVar("Parsed")


def load_plan(source: str | os.PathLike[str] | None = None) -> PlanConfig:
    """Read the plan from a file, or from JSON text; by default from `$FSDPPLAN_PLAN`."""
    if source is None:
        source = os.environ.get(PLAN_VARIABLE, "")
        if not source.strip():
            raise TrainerError(
                f"there is no plan: give --plan FILE, or set {PLAN_VARIABLE} to its JSON text"
            )
    text = os.fspath(source)
    if text.lstrip().startswith("{"):
        return parse_plan(text)
    try:
        return parse_plan(Path(text).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise TrainerError(f"the plan {text[:200]!r} cannot be read: {error}") from error


def parse_plan(text: str) -> PlanConfig:
    """The plan in `text`. Raises TrainerError (a ValueError) that names the field at fault."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TrainerError(f"the plan is not JSON: {error}; write it again") from error
    if not isinstance(document, dict):
        raise TrainerError("the plan must be a JSON object; write it again with recommend --save")
    version = document.get("schema_version")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise TrainerError(
            f"the plan's schema_version is {version!r}, this trainer reads {SCHEMA_VERSION}: "
            "plan again with the fsdpplan version that is installed here"
        )
    plan = _parse_object(PlanConfig, document, "")
    _check_decoder(document["model"], plan)
    _check_sums(plan)
    return plan


def _parse_object(cls: type[Parsed], document: Any, where: str) -> Parsed:
    """`document` as a `cls`, whose fields name the keys and their types."""
    if not isinstance(document, dict):
        raise TrainerError(f"the plan's {where} must be an object, not {_shown(document)}")
    hints = get_type_hints(cls)
    ignored = NOT_FOR_THE_TRAINER.get(cls, frozenset())
    unknown = set() if ignored is None else set(document) - set(hints) - ignored
    if unknown:
        raise TrainerError(
            f"the plan's {where} has {', '.join(map(repr, sorted(unknown)))}, which this trainer "
            "does not know: plan again with the fsdpplan version that is installed here"
        )
    values = {}
    for field in fields(cls):  # type: ignore[arg-type]
        path = f"{where}.{field.name}" if where else field.name
        if field.name not in document:
            raise TrainerError(f"the plan has no {path}: write it again with recommend --save")
        values[field.name] = _parse_value(hints[field.name], document[field.name], path)
    return cls(**values)


def _parse_value(hint: Any, value: Any, where: str) -> Any:
    """`value`, checked against a field type."""
    if get_origin(hint) in (types.UnionType, Union):
        if type(value) not in get_args(hint):
            raise TrainerError(f"the plan's {where} cannot be {_shown(value)}")
    elif hint is float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TrainerError(f"the plan's {where} must be a number, not {_shown(value)}")
        if not math.isfinite(value) or value <= 0:
            raise TrainerError(f"the plan's {where} must be a finite number above 0, not {value}")
        return float(value)
    elif hint in (int, str, bool):
        if type(value) is not hint:
            kind = {int: "a whole number", str: "a string", bool: "true or false"}[hint]
            raise TrainerError(f"the plan's {where} must be {kind}, not {_shown(value)}")
    else:
        return _parse_object(hint, value, where)
    if type(value) is int and value < 1:
        raise TrainerError(f"the plan's {where} must be at least 1, not {value}")
    return value


def _shown(value: Any) -> str:
    """`value` for a message, cut short."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _check_decoder(model: dict[str, Any], plan: PlanConfig) -> None:
    """Raise unless the reference decoder can be built in the shape of `model`."""
    lacks = [
        f"{words} (model.{name})"
        for name, (value, words) in ONLY_VALUES.items()
        if model.get(name, value) != value
    ]
    window = model.get("sliding_window", 0)
    if window and not (type(window) is int and plan.training.seq_len <= window):
        lacks.append(
            f"attention that looks back {_shown(window)} tokens only, in sequences of "
            f"{plan.training.seq_len} (model.sliding_window)"
        )
    if lacks:
        raise TrainerError(
            f"this trainer's decoder lacks {' and '.join(lacks)}, so it cannot train "
            f"{plan.model.name[:100]}: plan a dense model such as llama-3.1-8b, or launch a "
            "program of your own"
        )


def _check_sums(plan: PlanConfig) -> None:
    """Raise unless degrees, GPUs and batch agree with each other."""
    layout = plan.layout
    if layout.world != plan.cluster.gpus:
        raise TrainerError(
            f"the plan's layout has {layout.world} ranks but its cluster {plan.cluster.gpus} GPUs: "
            "plan again"
        )
    batch = layout.data_parallel * layout.micro_batch * layout.num_microbatches
    if batch != plan.training.global_batch:
        raise TrainerError(
            f"the plan's layout takes {batch} sequences a step but its training.global_batch is "
            f"{plan.training.global_batch}: plan again"
        )
