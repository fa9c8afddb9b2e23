"""The options of a question: which model, on which machines, trained how, under which PyTorch. Help
says units, and per what."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, get_args

from fsdpplan.cli.options import offered, synonyms
from fsdpplan.cli.options.expand import Flag
from fsdpplan.cli.options.parse import choice, fraction, line, path, positive, release, size, whole
from fsdpplan.spec.adapters import AdapterDtype, BaseFormat, parsed_targets
from fsdpplan.spec.runtime import RuntimeName as Runtime
from fsdpplan.spec.training import (
    Dropout,
    Fp8Recipe,
    Optimizer,
    ParamDtype,
    Precision,
    ProgramName,
    ReduceDtype,
    TorchRelease,
    normal_compression,
    normal_switch,
    parsed_dropout,
)
from fsdpplan.units import parse_bandwidth_bytes_per_second, parse_bytes, parse_count

_OTHER_RUNTIMES = ", ".join(name for name in get_args(Runtime) if name != "fsdp2")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Which model: by one of the four ways."""

    HEADING: ClassVar[str] = "Model (one of --params, --model, --config, or the six shape options)"

    params: Annotated[
        int | None,
        Flag(
            metavar="70e9|70B",
            parse=parse_count,
            help="Parameters in all; the shape is inferred: dense, or MoE with --active-params.",
        ),
    ] = None
    active_params: Annotated[
        int | None,
        Flag(
            metavar="22e9|22B",
            parse=parse_count,
            help="With --params: parameters active per token (MoE).",
        ),
    ] = None
    model: Annotated[
        str | None,
        Flag(
            metavar="NAME",
            parse=line,
            help="A catalogue name: see `fsdpplan models`.",
            offered=offered.models,
        ),
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
    vocab_multiple: Annotated[
        int | None,
        Flag(
            metavar="64",
            parse=whole(example=64),
            help="Pad the vocabulary to a multiple of this on each tensor-parallel rank; 1: only "
            "where tensor parallelism needs it. Default: 64 where that is faster.",
        ),
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
            help="GPUs in all (with --hardware cpu: processes).",
        ),
    ] = None
    hardware: Annotated[
        str | None,
        Flag(
            metavar="NAME|PATH",
            parse=line,
            help="A profile: see `fsdpplan profiles`. Default: what is found here, else dgx-h100.",
            offered=offered.machines,
        ),
    ] = None
    gpus_per_node: Annotated[
        int | None, Flag(metavar="N", parse=whole(example=8), help="GPUs used on each node.")
    ] = None
    domain_gpus: Annotated[
        int | None,
        Flag(
            metavar="N",
            parse=whole(example=64),
            help="GPUs used in each NVLink domain that joins nodes (NVL72). Default: the largest "
            "equal share, such as 64 of 72.",
        ),
    ] = None
    gpu: Annotated[
        str | None,
        Flag(
            metavar="NAME",
            parse=line,
            help="Another device in the nodes of --hardware.",
            offered=offered.devices,
        ),
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
    host_memory: Annotated[
        int | None,
        Flag(
            metavar="512GiB",
            parse=parse_bytes,
            help="Host memory of a node, shared by its ranks: the limit of --offload cpu.",
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
            help="Tokens per sequence. Default 4096.",
        ),
    ] = None
    global_batch: Annotated[
        int | None,
        Flag(
            metavar="N",
            parse=size(example="1024 or 1k"),
            help="Sequences per optimizer step, over all GPUs. Default: about 4 Mi tokens; for "
            "fine-tuning about 64 sequences.",
        ),
    ] = None
    fine_tune: Annotated[
        bool | None,
        Flag(
            name="--fine-tune",
            help="Plan fine-tuning, with the batch that is usual for it. Chats in --data imply it.",
        ),
    ] = None
    data: Annotated[
        str | None,
        Flag(
            metavar="PATH",
            parse=line,
            help="Training data on this host: its tokens are counted, in place of --tokens.",
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
    precision_switch: Annotated[
        str | None,
        Flag(
            metavar="none|fp8@80%|bf16@10%",
            parse=normal_switch,
            help="Switch to bf16 or fp8 after this share of the steps; both parts are planned. "
            "Default none.",
        ),
    ] = None
    fp8_recipe: Annotated[
        str | None,
        Flag(
            metavar="tensorwise|rowwise|delayed",
            parse=choice(Fp8Recipe),
            help="With --precision fp8: scaling of matmul operands. Default tensorwise.",
        ),
    ] = None
    fp8_all_gather: Annotated[
        bool | None,
        Flag(
            name="--fp8-all-gather/--no-fp8-all-gather",
            help="FSDP all-gathers weights in fp8. Default no.",
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
    param_dtype: Annotated[
        str | None,
        Flag(
            metavar="fp32|bf16",
            parse=choice(ParamDtype, synonyms.FORMATS),
            help="Number format of stored parameters and AdamW moments. Default fp32.",
        ),
    ] = None
    optimizer: Annotated[
        str | None,
        Flag(
            metavar="adamw|adamw_8bit|muon",
            parse=choice(Optimizer, synonyms.OPTIMIZERS),
            help="Optimizer; muon trains the matrices of the blocks. Default adamw.",
        ),
    ] = None
    pack: Annotated[
        bool | None,
        Flag(
            name="--pack/--no-pack",
            help="Pack documents into sequences; attention stays within a document. Default no.",
        ),
    ] = None
    mean_document_tokens: Annotated[
        int | None,
        Flag(
            metavar="N|2k",
            parse=size(example="700 or 2k"),
            help="With --pack: mean tokens per document, which sets the time of attention. "
            "Default: attention over whole sequences.",
        ),
    ] = None
    gradient_compression: Annotated[
        str | None,
        Flag(
            metavar="none|bf16|powersgd[:RANK[:FIRST]]",
            parse=normal_compression,
            help="DDP communication hook: gradients in bf16, or PowerSGD of RANK (1) after FIRST "
            "(1000) steps. Default none.",
        ),
    ] = None
    dropout: Annotated[
        Dropout | None,
        Flag(
            metavar="P|attention=P,residual=P,embedding=P",
            parse=parsed_dropout,
            help="Dropout probability, everywhere or by place. Default: that of --config, else 0.",
        ),
    ] = None
    lora: Annotated[
        int | None,
        Flag(
            metavar="RANK",
            parse=whole(example=16),
            help="Train low-rank adapters (LoRA) of this rank; all else is frozen.",
        ),
    ] = None
    lora_alpha: Annotated[
        float | None,
        Flag(
            metavar="ALPHA",
            parse=positive(example="32"),
            help="With --lora: adapters are scaled by ALPHA / RANK. Default: twice the rank.",
        ),
    ] = None
    lora_rs: Annotated[
        bool | None,
        Flag(
            name="--lora-rs/--no-lora-rs",
            help="With --lora: scale by ALPHA over the root of RANK (rsLoRA). Default no.",
        ),
    ] = None
    lora_targets: Annotated[
        tuple[str, ...] | None,
        Flag(
            metavar="q,k,v,o,gate,up,down|all|attention|mlp",
            parse=parsed_targets,
            help="With --lora: matrices of a block that have adapters. Default all.",
        ),
    ] = None
    lora_dropout: Annotated[
        float | None,
        Flag(
            metavar="P",
            parse=fraction,
            help="With --lora: dropout probability of the adapters' inputs. Default 0.",
        ),
    ] = None
    lora_dtype: Annotated[
        AdapterDtype | None,
        Flag(
            metavar="fp32|bf16",
            parse=choice(AdapterDtype, synonyms.FORMATS),
            help="With --lora: number format of stored adapters and their moments. Default fp32.",
        ),
    ] = None
    base: Annotated[
        BaseFormat | None,
        Flag(
            metavar="bf16|nf4",
            parse=choice(BaseFormat, synonyms.BASES),
            help="With --lora: format of the frozen matrices; nf4 is 4 bits with double "
            "quantisation (QLoRA). Default bf16.",
        ),
    ] = None
    tokens: Annotated[
        int | None,
        Flag(
            metavar="15T",
            parse=parse_count,
            help="Tokens to train on, for days, GPU hours and cost.",
        ),
    ] = None
    runtime: Annotated[
        str | None,
        Flag(
            metavar="NAME",
            parse=choice(Runtime),
            help=f"Software to price: fsdp2 (default, ours), or {_OTHER_RUNTIMES}.",
        ),
    ] = None
    program: Annotated[
        ProgramName | None,
        Flag(
            metavar="reference|own|hf|torchtitan|megatron|accelerate",
            parse=choice(ProgramName),
            help="Program to launch: fsdpplan's decoder (reference, default), a model of your own, "
            "a Hugging Face model, or another program. Only layouts that it can run are searched.",
        ),
    ] = None
    headroom: Annotated[
        float | None,
        Flag(
            metavar="8%", parse=fraction, help="Share of device memory to leave free. Default 8%."
        ),
    ] = None
    fits: Annotated[
        float | None,
        Flag(
            metavar="95%",
            parse=fraction,
            help="Least probability that a layout fits in device memory. Default 95%.",
        ),
    ] = None


Torch = Annotated[
    TorchRelease | None,
    Flag(metavar="2.9", parse=release, help="PyTorch release of the job."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOptions:
    """Which PyTorch the job will run: what an older one lacks is not searched."""

    HEADING: ClassVar[str] = "PyTorch of the job (one of these). Default: the one installed here"

    torch: Torch = None
    python: Annotated[
        str | None,
        Flag(
            metavar="PATH",
            parse=line,
            help="Python of the job, which is asked for its PyTorch release.",
        ),
    ] = None
    container: Annotated[
        str | None,
        Flag(
            metavar="IMAGE",
            parse=line,
            help="Image of the job: a .sqsh or .sif file here, or a public one of known contents.",
        ),
    ] = None
