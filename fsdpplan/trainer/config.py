"""The plan as the trainer reads it: standard library only, strict, nothing planned again.

A plan is the JSON of five nouns. The trainer reads `model`, `training` and `layout` whole (a key
that it does not know might be a setting that it would ignore, so it refuses it), of `cluster` only
the device, the counts and what the preflight compares, and nothing of the prediction.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import types
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from .checkpoint.whole_file import read_small
from .errors import TrainerError
from .shared import conventions

PLAN_VARIABLE = "FSDPPLAN_PLAN"
"""Environment variable that carries the plan to every rank: JSON text, or the path of a file."""

SCHEMA_VERSION = 1
"""Version of the plan document that this trainer reads."""


def _from_zero(default: int) -> int:
    """A whole number that may be 0, and may be left out of a plan."""
    number: int = field(default=default, metadata={"least": 0})
    return number


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """The `model.experts.router` part of a plan: how a token's experts are chosen."""

    scores: str = "softmax"
    normalised: bool = True
    scaling: float = 1.0
    groups: int = 1
    groups_chosen: int = 1
    group_best: int = 1
    aux_loss_coef: float | None = field(default=None, compare=False, metadata={"least": 0})
    """Of the auxiliary loss, as the config that was planned says it; None: it does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The `model.experts` part of a plan: the mixture in a block's place of one network."""

    experts: int
    active: int
    hidden: int
    shared_hidden: int = _from_zero(0)
    shared_gate: bool = False
    router_bias: bool = False
    bias: bool = False
    dense_layers: int = _from_zero(0)
    router: RouterConfig = field(default_factory=RouterConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerConfig:
    """The `model.latent.indexer` part of a plan, which this trainer refuses."""

    heads: int
    head_dim: int
    keys: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaConfig:
    """The `model.delta` part of a plan, which this trainer refuses."""

    key_heads: int
    value_heads: int
    key_head_dim: int
    value_head_dim: int
    convolution: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaConfig:
    """The `model.mamba` part of a plan, which this trainer refuses."""

    heads: int
    head_dim: int
    groups: int
    state: int
    convolution: int = 4
    convolution_bias: bool = True
    bias: bool = False
    chunk: int = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """The `model.latent` part of a plan: multi-head latent attention."""

    kv_rank: int
    rope_head_dim: int
    value_head_dim: int
    query_rank: int = _from_zero(0)
    indexer: IndexerConfig | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScalingConfig:
    """The `model.rope_scaling` part of a plan: how rotary positions are stretched."""

    kind: str
    factor: float
    original_positions: int = _from_zero(0)
    low: float = field(default=0.0, metadata={"least": 0})
    high: float = field(default=0.0, metadata={"least": 0})
    amplitude: float = 1.0
    score_factor: float = 1.0
    truncate: bool = True


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
    vocab_multiple: int = 1
    norm_bias: bool = True
    qk_norm_width: str = "head"
    post_norms: bool = False
    embedding_norm: bool = False
    attention_sinks: bool = False
    sliding_window: int = _from_zero(0)
    full_attention_every: int = 1
    window_kind: str = "sliding"
    attention_gate: bool = False
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None
    mixers: str = ""
    networks: str = ""
    delta: DeltaConfig | None = None
    mamba: MambaConfig | None = None
    rope_scaling: RopeScalingConfig | None = None

    @property
    def value_head_dim(self) -> int:
        """Width of a head's values."""
        return self.latent.value_head_dim if self.latent else self.head_dim

    def has_experts(self, layer: int) -> bool:
        """Whether block `layer` routes tokens to experts."""
        if self.networks:
            return self.networks[layer % len(self.networks)] == "E"
        return self.experts is not None and layer >= self.experts.dense_layers

    def vocab_rows(self, tp: int) -> int:
        """Rows of embedding and head over `tp` tensor-parallel ranks."""
        return conventions.padded_vocab(self.vocab, tp, self.vocab_multiple)

    def window(self, layer: int) -> int:
        """Tokens that attention looks back in block `layer`; 0: all."""
        return self.sliding_window if (layer + 1) % self.full_attention_every else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """What the trainer needs of `cluster.device`."""

    name: str
    kind: str
    peak_bf16_flops_per_second: float
    peak_fp32_flops_per_second: float
    peak_fp16_flops_per_second: float | None = None
    peak_fp8_flops_per_second: float | None = None
    memory_bytes: int | None = None
    multiprocessors: int | None = None
    host_link_bytes_per_second: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelConfig:
    """What the preflight needs of one of `cluster.levels`."""

    name: str
    domain_gpus: int
    ports: int
    port_bandwidth_bytes_per_second: float
    bandwidth_fraction: float
    half_bandwidth_bytes: float = field(metadata={"least": 0})
    gpudirect: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkConfig:
    """What the preflight needs of `cluster.network`."""

    transport: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """What the trainer needs of `cluster`."""

    device: DeviceConfig
    gpus: int
    gpus_per_node: int
    levels: tuple[LevelConfig, ...] = ()
    network: NetworkConfig | None = None

    def peerless_level(self, ranks: int) -> LevelConfig | None:
        """The innermost level among those that join `ranks` neighbouring GPUs over which they
        cannot map each other's memory; None where they can. Between nodes NVLink alone does."""
        below = 1
        for level in self.levels if self.device.kind != "cpu" else ():
            joins_nodes = level.domain_gpus > self.gpus_per_node
            maps = level.name == "nvlink" if joins_nodes else level.gpudirect
            if below < ranks and not maps:
                return level
            below = level.domain_gpus
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class DropoutConfig:
    """The `training.dropout` part of a plan: probabilities."""

    attention: float = field(default=0.0, metadata={"least": 0})
    residual: float = field(default=0.0, metadata={"least": 0})
    embedding: float = field(default=0.0, metadata={"least": 0})

    @property
    def drops(self) -> bool:
        """Whether any element is dropped."""
        return max(self.attention, self.residual, self.embedding) > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptersConfig:
    """The `training.adapters` part of a plan: low-rank matrices beside a frozen model."""

    rank: int
    alpha: float
    rslora: bool = False
    targets: tuple[str, ...] = ()
    dropout: float = field(default=0.0, metadata={"least": 0})
    dtype: str = "fp32"
    base: str = "bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """What the trainer needs of `training`."""

    seq_len: int
    global_batch: int
    precision: str
    reduce_dtype: str
    optimizer: str
    runtime: str
    fp8_recipe: str = "tensorwise"
    fp8_all_gather: bool = False
    precision_switch: str = "none"
    """`none`, or fp8@0.8: the precision behind this share of the steps."""
    param_dtype: str = "fp32"
    """In which parameters are kept and updated."""
    gradient_compression: str = "none"
    """How DDP sends gradients: `none`, `bf16` or `powersgd:RANK:FIRST`."""
    dropout: DropoutConfig | None = None
    """None: the plan does not say, and nothing is dropped."""
    adapters: AdaptersConfig | None = None
    """None: all of the model is trained."""
    tokens: int | None = None
    """Of the whole training; None: not planned."""
    torch: str | None = None
    """Release that was planned for, 2.13; None: not said."""
    packed: bool = False
    """The documents of a sequence are trained apart."""
    mean_document_tokens: int | None = None
    """How long these were planned to be, in the mean; None: not said."""


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
    stage_blocks: tuple[int, ...] = field(default=(), metadata={"least": 0})
    loss_chunks: int = 1
    """Pieces of a micro-batch's tokens whose logits exist at a time."""
    experts_over_tp: bool = False
    """Whole experts on each tensor-parallel rank."""
    checkpoint_blocks: int | str = "all"
    """Of each pipeline stage the first blocks, which `activation_checkpointing` is of."""
    cp_attention: str = "ring"
    """How context-parallel ranks see a whole sequence: ring or ulysses."""

    @property
    def shard_ranks(self) -> int:
        """Ranks over which FSDP shards parameters."""
        return self.dp_shard * self.cp

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def data_parallel(self) -> int:
        """Ranks over which the batch splits."""
        return self.dp_replicate * self.dp_shard


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchNeededConfig:
    """The `torch_needed` part of a plan: the oldest release that can train it."""

    oldest: str
    because: str = ""
    """What of the plan needs it; empty: nothing in particular."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleConfig:
    """One of the `rules` of a plan: a rule of the field that it breaks."""

    rule: str
    says: str
    """A sentence with the number that broke it."""
    advice: str
    change: str = ""
    """What to type to plan without it; empty: nothing that was tried helps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """A plan, reduced to what a training run needs."""

    model: ModelConfig
    cluster: ClusterConfig
    training: TrainingConfig
    layout: LayoutConfig
    torch_needed: TorchNeededConfig | None = None
    """None: the plan does not say."""
    rules: tuple[RuleConfig, ...] = ()
    """What it breaks of the rules of the field, the dearest first."""

    @property
    def trades_heads(self) -> bool:
        """Whether context-parallel ranks trade heads for tokens around attention: the ring's
        kernels are CUDA's."""
        return self.layout.cp_attention == "ulysses" or self.cluster.device.kind != "cuda"

    @property
    def peak_flops_per_second(self) -> float:
        """Dense peak of all devices together, at the precision of the matmuls."""
        device = self.cluster.device
        rate = {
            "bf16": device.peak_bf16_flops_per_second,
            "fp32": device.peak_fp32_flops_per_second,
            "fp16": device.peak_fp16_flops_per_second,
            "fp8": device.peak_fp8_flops_per_second,
        }[self.training.precision]
        if rate is None:
            raise TrainerError(
                f"the plan does not say the {self.training.precision} peak of {device.name}: write "
                "it again with recommend --save"
            )
        return rate * self.cluster.gpus


NOT_FOR_THE_TRAINER: dict[type, frozenset[str] | None] = {
    TrainingConfig: frozenset({"headroom_fraction", "fits_fraction", "program"}),
    ClusterConfig: None,
    DeviceConfig: None,
    LevelConfig: None,
    NetworkConfig: None,
    RuleConfig: None,
    PlanConfig: None,
}
"""Keys that may be present and are not read; None: any."""

Parsed = TypeVar("Parsed")


def load_plan(source: str | os.PathLike[str] | None = None) -> PlanConfig:
    """Read the plan from a file, or from JSON text; by default from `$FSDPPLAN_PLAN`."""
    return parse_plan(plan_text(source))


def plan_text(source: str | os.PathLike[str] | None = None) -> str:
    """The plan's JSON text, as in `load_plan`."""
    if source is None:
        source = os.environ.get(PLAN_VARIABLE, "")
        if not source.strip():
            raise TrainerError(
                f"there is no plan: give --plan FILE, or set {PLAN_VARIABLE} to its JSON text"
            )
    text = os.fspath(source)
    if text.lstrip().startswith("{"):
        return text
    try:
        return read_small(Path(text)).removeprefix("\ufeff")
    except (OSError, ValueError) as error:
        raise TrainerError(
            f"the plan {text[:200]!r} cannot be read: {error}; give --plan a file "
            "that fsdpplan recommend saved"
        ) from error


def plan_sha256(text: str) -> str:
    """What tells one plan from another: as in the head of a job script."""
    return hashlib.sha256(text.rstrip("\n").encode()).hexdigest()


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
    _check_sums(plan)
    return plan


def parse_model(document: Any) -> ModelConfig:
    """The model in a plan's `model`, or in a checkpoint's."""
    return _parse_object(ModelConfig, document, "model")


def parse_adapters(document: Any) -> AdaptersConfig:
    """The adapters in a plan's `training`, or in a checkpoint's."""
    return _parse_object(AdaptersConfig, document, "training.adapters")


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
    for each in fields(cls):  # type: ignore[arg-type]
        path = f"{where}.{each.name}" if where else each.name
        if each.name in document:
            values[each.name] = _parse_value(hints[each.name], document[each.name], path, each)
        elif each.default is each.default_factory is MISSING:
            raise TrainerError(f"the plan has no {path}: write it again with recommend --save")
    return cls(**values)


def _parse_value(hint: Any, value: Any, where: str, of: Field[Any]) -> Any:
    """`value`, checked against a field type."""
    if get_origin(hint) in (types.UnionType, Union):
        return _parse_choice(get_args(hint), value, where, of)
    if get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise TrainerError(f"the plan's {where} must be a list, not {_shown(value)}")
        (item, _) = get_args(hint)
        return tuple(_parse_value(item, one, where, of) for one in value)
    if is_dataclass(hint):
        return _parse_object(hint, value, where)  # type: ignore[arg-type]
    if hint is float:
        return _parse_number(value, where, of)
    if type(value) is not hint:
        kind = {int: "a whole number", str: "a string", bool: "true or false"}[hint]
        raise TrainerError(f"the plan's {where} must be {kind}, not {_shown(value)}")
    least = of.metadata.get("least", 1)
    if type(value) is int and value < least:
        raise TrainerError(f"the plan's {where} must be at least {least}, not {value}")
    return value


def _parse_choice(hints: tuple[Any, ...], value: Any, where: str, of: Field[Any]) -> Any:
    """`value` as the one of `hints` that it can be."""
    if value is None and type(None) in hints:
        return None
    for hint in hints:
        of_kind = (
            isinstance(value, dict)
            if is_dataclass(hint)
            else type(value) is hint or (hint is float and type(value) is int)
        )
        if of_kind:
            return _parse_value(hint, value, where, of)
    raise TrainerError(
        f"the plan's {where} cannot be {_shown(value)}; write it again with recommend --save"
    )


def _parse_number(value: Any, where: str, of: Field[Any]) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TrainerError(f"the plan's {where} must be a number, not {_shown(value)}")
    if not math.isfinite(value) or value < 0 or (value == 0 and "least" not in of.metadata):
        raise TrainerError(f"the plan's {where} must be a finite number above 0, not {value}")
    return float(value)


def _shown(value: Any) -> str:
    """`value` for a message, cut short."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


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
