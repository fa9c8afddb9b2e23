"""Runtimes: which software trained a row, and what it does that a layout has to say.

Traits of the cost model are in `fsdpplan.spec.runtime`. Here is what a table's columns leave open
and the software settles: the format of reduced gradients, the split of a pipeline, the meaning of
words. Each entry is a fact of that software with its source, never a number fitted to a table.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from fsdpplan.files.runs.table import MeasuredRun
from fsdpplan.spec.runtime import RuntimeName
from fsdpplan.spec.training import Fp8Recipe

StageRule = Literal["even", "torchtitan", "nanotron"]
Selective = Literal["attention", "blocks"]

MEGATRON_CORE = "2023-07"
"""Runs of Megatron-LM before this month are of the code before Megatron Core and FlashAttention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """What trained, by the name of the framework."""

    words: str
    """What to call it in a sentence."""
    is_library: bool = False
    """Several programs stand on it: which one trained is what the framework's column says."""
    runtime: RuntimeName
    """Its traits."""
    half_gradients: tuple[str, ...] = ()
    """Number formats whose gradients are reduced as they are; others are reduced in fp32."""
    stage_rule: StageRule = "even"
    """How blocks are given to pipeline stages."""
    selective: Selective = "attention"
    """What `selective` checkpointing recomputes: attention, or whole blocks of some layers."""
    fp8_recipe: Fp8Recipe = "delayed"
    """The recipe where the number format only says fp8."""
    fp8_all_gather: bool = False
    """FSDP gathers fp8 where the number format only says fp8."""
    is_zero_fsdp: bool = True
    """ZeRO-2 is FSDP that keeps parameters after forward; otherwise DeepSpeed's."""
    unstated_zero: tuple[str, ...] = ()
    """ZeRO stages that a row may have where the table gives none, the likeliest first."""
    chunk_blocks: int | None = None
    """Blocks of a pipeline chunk where a table gives neither schedule nor chunks; None: a rank's
    blocks are one chunk."""
    compiles: bool = False
    """Whether blocks are compiled where a table does not say."""
    recomputes_by_default: bool | None = None
    """Whether blocks are recomputed where a table does not say; None: where it needs to."""


PYTORCH = Software(
    words="PyTorch",
    is_library=True,
    runtime="fsdp2_others",
    selective="blocks",
    fp8_recipe="tensorwise",
)

SOFTWARE: tuple[tuple[re.Pattern[str], Software], ...] = (
    # The trainer of this package.
    (re.compile(r"\bfsdpplan\b", re.I), replace(PYTORCH, words="fsdpplan", runtime="fsdp2")),
    # Pipeline split: torchtitan/parallelisms/pipelining_utils.py, generate_split_points. Fp8:
    # docs/float8.md at 3f20451b: tensor-wise dynamic scales, and the command line that it gives
    # has fp8 all-gather. Selective `layer` checkpoints every second block by default.
    (
        re.compile(r"torchtitan", re.I),
        Software(
            words="torchtitan",
            runtime="fsdp2_others",
            stage_rule="torchtitan",
            selective="blocks",
            fp8_recipe="tensorwise",
            fp8_all_gather=True,
        ),
    ),
    # MixedPrecision modes: composer/trainer/mosaic_fsdp_utils.py, get_mixed_precision: DEFAULT
    # reduces in fp32, PURE in bf16 (the notes name the mode). fp8 is Transformer Engine's.
    (
        re.compile(r"llm-foundry|composer|mosaic", re.I),
        Software(words="Composer", runtime="composer", selective="blocks"),
    ),
    # fms_fsdp/policies/mixed_precision.py reduces in bf16; policies/ac_handler.py recomputes a
    # share of the blocks, evenly spread.
    (
        re.compile(r"fms-fsdp", re.I),
        Software(words="fms-fsdp", runtime="fsdp1", half_gradients=("bf16",), selective="blocks"),
    ),
    # NeMo-Framework-Launcher, launcher_scripts/conf/training: distributed_fused_adam, overlapped;
    # virtual_pipeline_model_parallel_size "set to maximum"; Transformer Engine's delayed scaling
    # with fp8_hybrid. grad_sync_dtype is bf16 in the performance configurations.
    (
        re.compile(r"\bnemo\b", re.I),
        Software(
            words="NeMo",
            runtime="megatron",
            half_gradients=("bf16",),
            is_zero_fsdp=False,
            recomputes_by_default=False,
            unstated_zero=("1", "0"),
            chunk_blocks=1,
        ),
    ),
    # DeepSpeed runtime/pipe/engine.py reduces after its last backward pass.
    (
        re.compile(r"megatron-deepspeed", re.I),
        Software(
            words="Megatron-DeepSpeed",
            runtime="megatron_deepspeed",
            half_gradients=("fp16",),
            is_zero_fsdp=False,
            unstated_zero=("1", "0"),
            recomputes_by_default=False,
        ),
    ),
    (
        re.compile(r"megatron", re.I),
        Software(
            words="Megatron-LM",
            runtime="megatron_lm",
            is_zero_fsdp=False,
            unstated_zero=("1", "0"),
            recomputes_by_default=False,
        ),
    ),
    # Parameters and gradients stay in half precision.
    # Source: internlm/solver/optimizer/hybrid_zero_optim.py.
    (
        re.compile(r"internevo", re.I),
        Software(
            words="InternEvo",
            runtime="internevo",
            half_gradients=("bf16", "fp16"),
            is_zero_fsdp=False,
            recomputes_by_default=False,
        ),
    ),
    # Pipeline split: src/nanotron/models/base.py, build_model, by get_block_compute_costs.
    (
        re.compile(r"nanotron", re.I),
        Software(
            words="nanotron",
            runtime="nanotron",
            stage_rule="nanotron",
            is_zero_fsdp=False,
            recomputes_by_default=False,
        ),
    ),
    (
        re.compile(r"libai|oneflow", re.I),
        Software(
            words="LiBai",
            runtime="libai",
            half_gradients=("fp16",),
            is_zero_fsdp=False,
            recomputes_by_default=False,
        ),
    ),
    # XLA: parameters are fp32 shards, gathered in bf16 and used through fused kernels; one
    # compiled program has no launches to wait for, and its collectives run beside its matmuls.
    # Source: MaxText MaxText/layers, configs/base.yml (weight_dtype float32, dtype bfloat16).
    (
        re.compile(r"maxtext|paxml|\bpax\b|\bjax\b", re.I),
        replace(
            PYTORCH,
            words="JAX",
            runtime="xla",
            half_gradients=("bf16",),
            unstated_zero=("3", "1"),
            recomputes_by_default=None,
            compiles=True,
        ),
    ),
    # What made Llama 3: arXiv 2407.21783, section 3.3.2.
    (
        re.compile(r"^meta internal", re.I),
        replace(PYTORCH, words="Llama 3's software", runtime="llama3"),
    ),
    # What made DeepSeek-V3: arXiv 2412.19437, section 3. Scales of its fp8 are of small blocks.
    (
        re.compile(r"\bhai-llm\b", re.I),
        Software(
            words="HAI-LLM",
            runtime="hai_llm",
            fp8_recipe="rowwise",
            is_zero_fsdp=False,
            recomputes_by_default=False,
        ),
    ),
    # PyTorch's first FSDP by name, or a script that wraps it.
    (
        re.compile(r"\bfsdp ?1\b|fairscale|metaseq", re.I),
        replace(PYTORCH, words="PyTorch FSDP1", runtime="fsdp1"),
    ),
)
"""Software by the name of the framework, the first that matches."""

FUSED_NORMS = "2025-10"
"""PyTorch runs an eager RMSNorm as one kernel since version 2.9, of this month. Runs without a
date are taken as of today's software."""

COMPOSITE: dict[RuntimeName, RuntimeName] = {
    "fsdp2_others": "fsdp2_2024",
    "fsdp1": "fsdp1_2024",
}
"""What a runtime was before that."""

TRITON_NORMS = ("2024-07-10", re.compile(r"llama-?[23].*?-(7|8|13)b", re.I))
"""torchtitan's presets of these models had a fused norm of its own until this day.
Source: torchtitan at 10ef7a6d, train_configs, norm_type; changed in 3ff7fbb2."""

FLASH = re.compile(r"(?<!no )(?<!without )\bflash[- ]?att", re.I)
"""Words in the notes on runs whose attention keeps no scores, also before `MEGATRON_CORE`."""

OVERLAPPED = re.compile(r"\bzero(/tp)? overlap\b", re.I)
"""Words in the notes on runs of Megatron-LM whose data parallelism is overlapped."""

OLD_MEGATRON = Software(
    words="Megatron-LM before Megatron Core",
    runtime="megatron_2020",
    half_gradients=("fp16",),
    is_zero_fsdp=False,
    recomputes_by_default=False,
)


def software_of(run: MeasuredRun) -> Software:
    """What is known of the row's framework as it was then; PyTorch's own ways where nothing is."""
    software = next((one for pattern, one in SOFTWARE if pattern.search(run.framework)), PYTORCH)
    has_flash = run.date >= MEGATRON_CORE or bool(FLASH.search(run.notes))
    match software.words:
        case "Megatron-LM" if run.date and not has_flash:
            return OLD_MEGATRON
        case "Megatron-LM" if OVERLAPPED.search(run.notes):
            return replace(software, runtime="megatron")
        case "Megatron-DeepSpeed" if has_flash:
            return replace(software, runtime="megatron_lm")
    if software.runtime in COMPOSITE and not _has_fused_norms(run, software):
        return replace(software, runtime=COMPOSITE[software.runtime])
    return software


def _has_fused_norms(run: MeasuredRun, software: Software) -> bool:
    if not run.date or run.date >= FUSED_NORMS:
        return True
    until, models = TRITON_NORMS
    is_preset = software.words == "torchtitan" and bool(models.search(run.model_name))
    return is_preset and run.date < until
