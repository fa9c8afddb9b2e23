"""The options that planning commands share, as groups of flags. Help says units, and per what."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, get_args

import typer

from fsdpplan.cli.options import synonyms
from fsdpplan.cli.options.expand import Flag
from fsdpplan.cli.options.parse import (
    checkpoint_blocks,
    choice,
    fraction,
    line,
    path,
    release,
    reshard,
    size,
    stage_blocks,
    whole,
)
from fsdpplan.spec.layout import (
    ActivationCheckpointing,
    CheckpointBlocks,
    GradientSync,
    Offload,
    Reshard,
    Schedule,
    Sharding,
)
from fsdpplan.spec.program import ProgramName
from fsdpplan.spec.runtime import RuntimeName as Runtime
from fsdpplan.spec.torch_release import TorchRelease
from fsdpplan.spec.training import Fp8Recipe, Optimizer, Precision, ReduceDtype
from fsdpplan.units import parse_bandwidth_bytes_per_second, parse_bytes, parse_count

DEFAULT_PLAN = "fsdpplan.json"
"""Where `recommend` saves and the other commands look."""

_OTHER_RUNTIMES = ", ".join(name for name in get_args(Runtime) if name != "fsdp2")

PlanFile = Annotated[
    str,
    typer.Argument(
        metavar="PLAN", help="A saved plan. Default: fsdpplan.json.", show_default=False
    ),
]
Save = Annotated[
    str,
    typer.Option(
        "--save",
        metavar="PATH",
        help="Where to save the plan. Default: fsdpplan.json.",
        show_default=False,
    ),
]
NoSave = Annotated[bool, typer.Option("--no-save", help="Save no plan.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, nothing else.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Which model: by one of the four ways."""

    HEADING: ClassVar[str] = "Model (one of --params, --model, --config, or the six shape options)"

    params: Annotated[
        int | None,
        Flag(
            metavar="70e9|70B",
            parse=parse_count,
            help="Parameters; the shape is inferred: a dense decoder, but with --active-params.",
        ),
    ] = None
    active_params: Annotated[
        int | None,
        Flag(
            metavar="22e9|22B",
            parse=parse_count,
            help="With --params: those that one token meets, of a mixture of experts.",
        ),
    ] = None
    model: Annotated[
        str | None,
        Flag(metavar="NAME", parse=line, help="A catalogue name: see `fsdpplan models`."),
    ] = None
    config: Annotated[
        Path | None, Flag(metavar="PATH", parse=path, help="A Hugging Face config.json.")
    ] = None
    layers: Annotated[
        int | None, Flag(metavar="N", parse=whole(example=32), help="Transformer blocks.")
    ] = None
    hidden: Annotated[
        int | None,
        Flag(metavar="N", parse=size(example="4096"), help="Width of the model."),
    ] = None
    ffn_hidden: Annotated[
        int | None,
        Flag(metavar="N", parse=size(example="14336"), help="Inner width of the feed-forward."),
    ] = None
    heads: Annotated[
        int | None, Flag(metavar="N", parse=whole(example=32), help="Query heads.")
    ] = None
    kv_heads: Annotated[
        int | None, Flag(metavar="N", parse=whole(example=8), help="Key and value heads.")
    ] = None
    vocab: Annotated[
        int | None, Flag(metavar="N", parse=whole(example=128256), help="Rows of the embedding.")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """Which machines."""

    HEADING: ClassVar[str] = "Cluster"

    gpus: Annotated[
        int | None,
        Flag(
            metavar="N",
            parse=size(example="64"),
            help="GPUs in all (CPU processes with --hardware cpu).",
        ),
    ] = None
    hardware: Annotated[
        str | None,
        Flag(
            metavar="NAME|PATH",
            parse=line,
            help="A profile: see `fsdpplan profiles`. Default: what is found here, else dgx-h100.",
        ),
    ] = None
    gpus_per_node: Annotated[
        int | None, Flag(metavar="N", parse=whole(example=8), help="GPUs used on each node.")
    ] = None
    gpu: Annotated[
        str | None,
        Flag(metavar="NAME", parse=line, help="Device profile in place of the profile's own."),
    ] = None
    intra_bw: Annotated[
        float | None,
        Flag(
            metavar="450GB/s",
            parse=parse_bandwidth_bytes_per_second,
            help="Bandwidth inside a node, per GPU, one direction.",
        ),
    ] = None
    inter_bw: Annotated[
        float | None,
        Flag(
            metavar="400Gb/s",
            parse=parse_bandwidth_bytes_per_second,
            help="Bandwidth between nodes, per GPU (not per node), one direction.",
        ),
    ] = None


LedgerFile = Annotated[
    Path | None,
    Flag(
        metavar="FILE",
        parse=path,
        help="Default: $FSDPPLAN_LEDGER, else ~/.local/state/fsdpplan/ledger.sqlite.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerOptions:
    """What is remembered of finished runs."""

    HEADING: ClassVar[str] = "Ledger (finished runs)"

    ledger: LedgerFile = None
    no_ledger: Annotated[
        bool | None, Flag(name="--no-ledger", help="Neither learn from past runs nor add one.")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceOptions(LedgerOptions):
    """Measured runs that a prediction learns from."""

    HEADING: ClassVar[str] = "Measured runs to learn from"

    runs: Annotated[
        Path | None,
        Flag(
            metavar="FILE",
            parse=path,
            help="A table of measured runs (docs/reference/runs.md), a run's folder or an export: "
            "learned from beside the ledger, and not kept.",
        ),
    ] = None
    software: Annotated[
        str | None,
        Flag(
            metavar="NAME",
            parse=line,
            help="Framework that will train, as those runs call theirs. Default: that of most of "
            "those with this --runtime.",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """What one optimizer step is asked to do."""

    HEADING: ClassVar[str] = "Training"

    seq_len: Annotated[
        int | None,
        Flag(
            metavar="N|128k",
            parse=size(example="4096 or 128k"),
            help="Tokens a sequence. Default 4096.",
        ),
    ] = None
    global_batch: Annotated[
        int | None,
        Flag(
            metavar="N",
            parse=size(example="1024 or 1k"),
            help="Sequences an optimizer step, over all GPUs. Default: about 4 Mi tokens.",
        ),
    ] = None
    precision: Annotated[
        str | None,
        Flag(
            metavar="bf16|fp16|fp32|fp8",
            parse=choice(Precision, synonyms.FORMATS),
            help="Number format of the matmuls. Default bf16.",
        ),
    ] = None
    fp8_recipe: Annotated[
        str | None,
        Flag(
            metavar="tensorwise|rowwise|delayed",
            parse=choice(Fp8Recipe),
            help="Scales of fp8 matmuls, with --precision fp8. Default tensorwise.",
        ),
    ] = None
    fp8_all_gather: Annotated[
        bool | None,
        Flag(
            name="--fp8-all-gather/--no-fp8-all-gather",
            help="FSDP gathers weights already cast to fp8. Default no.",
        ),
    ] = None
    reduce_dtype: Annotated[
        str | None,
        Flag(
            metavar="fp32|bf16",
            parse=choice(ReduceDtype, synonyms.FORMATS),
            help="Number format of gradient reduction. Default fp32.",
        ),
    ] = None
    optimizer: Annotated[
        str | None,
        Flag(
            metavar="adamw|adamw_8bit|muon",
            parse=choice(Optimizer, synonyms.OPTIMIZERS),
            help="Muon: for the blocks' matrices. Default adamw.",
        ),
    ] = None
    tokens: Annotated[
        int | None,
        Flag(metavar="15T", parse=parse_count, help="Tokens in all, for the time to train."),
    ] = None
    runtime: Annotated[
        str | None,
        Flag(
            metavar="NAME",
            parse=choice(Runtime),
            help=f"What trains: fsdp2 (default), or, priced only, {_OTHER_RUNTIMES}.",
        ),
    ] = None
    program: Annotated[
        ProgramName | None,
        Flag(
            metavar="reference|own|hf",
            parse=choice(ProgramName),
            help="What trains: fsdpplan's decoder (default), a model of yours, or Hugging Face's; "
            "only what it can run is planned.",
        ),
    ] = None
    headroom: Annotated[
        float | None,
        Flag(metavar="8%", parse=fraction, help="Device memory to leave free. Default 8%."),
    ] = None
    fits: Annotated[
        float | None,
        Flag(
            metavar="95%",
            parse=fraction,
            help="Least chance that a layout fits in device memory. Default 95%.",
        ),
    ] = None


Torch = Annotated[
    TorchRelease | None,
    Flag(metavar="2.9", parse=release, help="Release of PyTorch that the job will run."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOptions:
    """Which PyTorch the job will run: what an older one lacks is not searched."""

    HEADING: ClassVar[str] = "PyTorch of the job (one of these). Default: the one installed here"

    torch: Torch = None
    python: Annotated[
        str | None,
        Flag(metavar="PATH", parse=line, help="The job's Python, which is asked for its release."),
    ] = None
    container: Annotated[
        str | None,
        Flag(
            metavar="IMAGE",
            parse=line,
            help="The job's image: a .sqsh or .sif file here, or a public one of known contents.",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutOptions:
    """Parts of the layout that the user fixes."""

    HEADING: ClassVar[str] = "Layout (each one given is kept; the others are searched)"

    dp_replicate: Annotated[
        int | None,
        Flag(metavar="N", parse=whole(example=8), help="Copies of the parameters."),
    ] = None
    dp_shard: Annotated[
        int | None,
        Flag(metavar="N", parse=whole(example=8), help="Ranks that share one copy."),
    ] = None
    tp: Annotated[
        int | None, Flag(metavar="N", parse=whole(example=8), help="Tensor-parallel ranks.")
    ] = None
    cp: Annotated[
        int | None,
        Flag(metavar="N", parse=whole(example=2), help="Context-parallel ranks."),
    ] = None
    pp: Annotated[int | None, Flag(metavar="N", parse=whole(example=4), help="Pipeline ranks.")] = (
        None
    )
    ep: Annotated[
        int | None,
        Flag(
            metavar="N",
            parse=whole(example=8),
            help="Expert-parallel ranks, of those that share one copy.",
        ),
    ] = None
    experts_over_tp: Annotated[
        bool | None,
        Flag(
            name="--experts-over-tp/--no-experts-over-tp",
            help="Whole experts on each tensor-parallel rank, over ep x tp ranks: Megatron's "
            "expert tensor parallelism of 1. Default: where the runtime has both ways, both are "
            "tried.",
        ),
    ] = None
    micro_batch: Annotated[
        int | None,
        Flag(metavar="N", parse=whole(example=2), help="Sequences a forward pass and rank."),
    ] = None
    schedule: Annotated[
        Schedule | None,
        Flag(
            metavar="NAME",
            parse=choice(Schedule, synonyms.SCHEDULES),
            help="Pipeline schedule: none, gpipe, 1f1b, interleaved_1f1b, looped_bfs, "
            "interleaved_zero_bubble, zbv, dualpipev.",
        ),
    ] = None
    virtual_stages: Annotated[
        int | None,
        Flag(metavar="N", parse=whole(example=2), help="Model chunks a pipeline rank."),
    ] = None
    stage_blocks: Annotated[
        tuple[int, ...] | None,
        Flag(
            metavar="N,N,...",
            parse=stage_blocks,
            help="Blocks of each pipeline stage, first to last; with --pp. Default: as even as "
            "can be, the head counted.",
        ),
    ] = None
    sharding: Annotated[
        Sharding | None,
        Flag(
            metavar="ddp|zero1|zero2|fsdp",
            parse=choice(Sharding, synonyms.SHARDING),
            help="Whole copies; sharded optimizer state; gradients too; FSDP2.",
        ),
    ] = None
    reshard_after_forward: Annotated[
        Reshard | None,
        Flag(
            metavar="always|never|N",
            parse=reshard,
            help="Free gathered blocks, keep them, or reshard to groups of N ranks.",
        ),
    ] = None
    gradient_sync: Annotated[
        GradientSync | None,
        Flag(
            metavar="every|reduce_scatter_only|last",
            parse=choice(GradientSync),
            help="Which micro-batches reduce gradients.",
        ),
    ] = None
    activation_checkpointing: Annotated[
        ActivationCheckpointing | None,
        Flag(
            metavar="none|attention|op|full",
            parse=choice(ActivationCheckpointing, synonyms.CHECKPOINTING),
            help="What backward recomputes.",
        ),
    ] = None
    checkpoint_blocks: Annotated[
        CheckpointBlocks | None,
        Flag(
            metavar="all|N",
            parse=checkpoint_blocks,
            help="Which blocks of each stage recompute: all, or only the first N.",
        ),
    ] = None
    async_tp: Annotated[
        bool | None,
        Flag(
            name="--async-tp/--no-async-tp",
            help="Tensor-parallel collectives beside their matmuls.",
        ),
    ] = None
    offload: Annotated[
        Offload | None,
        Flag(
            metavar="none|cpu",
            parse=choice(Offload, synonyms.OFFLOAD),
            help="Where shards and optimizer state live. Default none: on the device.",
        ),
    ] = None
    wrap_blocks: Annotated[
        int | None,
        Flag(metavar="N", parse=whole(example=2), help="Blocks an FSDP unit: FSDP's bucket."),
    ] = None
    ddp_bucket_bytes: Annotated[
        int | None,
        Flag(name="--ddp-bucket", metavar="25MiB", parse=parse_bytes, help="Bucket of DDP."),
    ] = None
    loss_chunks: Annotated[
        int | None,
        Flag(
            metavar="N",
            parse=whole(example=8),
            help="Pieces in which head and loss are computed.",
        ),
    ] = None
    compile: Annotated[
        bool | None, Flag(name="--compile/--no-compile", help="torch.compile of each block.")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OneLayoutOptions(LayoutOptions):
    """The parts of one layout."""

    HEADING: ClassVar[str] = "Layout (what is not given is derived, or a default, never searched)"
