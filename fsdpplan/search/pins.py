"""Pins: the parts of a layout that the user has fixed.

Defaults that depend on other inputs; each one is printed as an assumption by the caller.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from fsdpplan.spec.layout import (
    ActivationCheckpointing,
    CheckpointBlocks,
    CpAttention,
    GradientSync,
    Layout,
    Offload,
    Reshard,
    Schedule,
    Sharding,
)
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import Precision, ProgramName, Training, program_named


def pin_flag(name: str) -> str:
    """How the option of a pinned field is typed."""
    return "--ddp-bucket" if name == "ddp_bucket_bytes" else "--" + name.replace("_", "-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """Each field is a field of `Layout`; None leaves the choice to the search."""

    dp_replicate: int | None = None
    dp_shard: int | None = None
    cp: int | None = None
    tp: int | None = None
    pp: int | None = None
    ep: int | None = None
    experts_over_tp: bool | None = None
    sharding: Sharding | None = None
    reshard_after_forward: Reshard | None = None
    gradient_sync: GradientSync | None = None
    micro_batch: int | None = None
    schedule: Schedule | None = None
    virtual_stages: int | None = None
    stage_blocks: tuple[int, ...] | None = None
    activation_checkpointing: ActivationCheckpointing | None = None
    checkpoint_blocks: CheckpointBlocks | None = None
    async_tp: bool | None = None
    offload: Offload | None = None
    wrap_blocks: int | None = None
    ddp_bucket_bytes: int | None = None
    compile: bool | None = None
    loss_chunks: int | None = None
    cp_attention: CpAttention | None = None

    def given(self) -> dict[str, Any]:
        """The pinned fields and their values."""
        pairs = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in pairs if value is not None}

    def allows(self, layout: Layout) -> bool:
        """Whether `layout` keeps every pin."""
        return all(getattr(layout, name) == value for name, value in self.given().items())


def attention_over_cp(
    *, model: Model, training: Training, tp: int, cp: int, pins: Pins
) -> CpAttention:
    """The pinned kind; else Ulysses where FSDP2's own trainer runs and `cp` divides the heads of a
    tensor-parallel rank, and a ring otherwise. Few programs have both, and the trainer's ring has
    no test on its devices."""
    if pins.cp_attention is not None:
        return pins.cp_attention
    ours = training.runtime == "fsdp2" and not program_named(training.program).is_target
    divides = model.heads % tp == 0 and (model.heads // tp) % cp == 0
    return "ulysses" if cp > 1 and ours and divides else "ring"


def changed_pins(one: Layout, other: Layout) -> str:
    """What to type beside the options that name `one`, to name `other`."""
    names = [field.name for field in fields(Pins)]
    return " ".join(
        _typed(name, getattr(other, name))
        for name in names
        if getattr(one, name) != getattr(other, name)
    )


def _typed(name: str, value: object) -> str:
    if isinstance(value, bool):
        return pin_flag(name) if value else pin_flag(name).replace("--", "--no-", 1)
    return f"{pin_flag(name)} {value}{'B' if name == 'ddp_bucket_bytes' else ''}"


DEFAULT_SEQ_LEN = 4096
DEFAULT_TOKENS_PER_STEP = 4 * 2**20
"""About what dense models of 7B and more are pre-trained with."""


def program_defaults(
    name: ProgramName, *, precision: Precision | None, gpus: int
) -> dict[str, str]:
    """Fields of a training by default, as a program of others has them."""
    found: dict[str, str] = {"runtime": program_named(name).runtimes[0]}
    if name == "torchtitan" and precision == "fp8":
        found["fp8_recipe"] = "rowwise"
    if name == "accelerate" and precision != "fp32" and gpus > 1:
        found["reduce_dtype"] = "bf16"  # its FSDP reduces in the dtype that it computes in
    return found


ROUNDED_FRACTION = 1 / 8
"""How far the default batch may go for a share of a rank that splits into micro-batches."""


FINE_TUNING_BATCH = 64
"""Sequences. Source: axolotl examples/llama-3/fft-8b.yaml on 8 GPUs; alignment-handbook
recipes/zephyr-7b-beta/sft/config_full.yaml has 128 of 2,048 tokens, torchtune
recipes/configs/llama3_1/8B_full.yaml 8 on 4 GPUs."""


def fine_tuning_batch(*, seq_len: int, gpus: int) -> int:
    """Sequences a step of a fine-tuning: about 64, rounded as `default_global_batch`."""
    return default_global_batch(seq_len=seq_len, gpus=gpus, tokens=FINE_TUNING_BATCH * seq_len)


def default_global_batch(*, seq_len: int, gpus: int, tokens: int = DEFAULT_TOKENS_PER_STEP) -> int:
    """Sequences a step: about 4 Mi tokens, rounded so that every data-parallel degree divides it.

    A multiple of the number of GPUs where there are at least that many sequences; otherwise the
    largest divisor of the number of GPUs takes their place.
    """
    wanted = max(1, round(tokens / seq_len))
    step = next(gpus // parts for parts in range(1, gpus + 1) if _fits(gpus, parts, wanted))
    return _share(wanted / step) * step


def _share(wanted: float) -> int:
    """About `wanted` sequences: 43 would be micro-batches of 1 or of 43, 40 are of 1, 2, 4 or 8."""
    least = math.ceil(wanted * (1 - ROUNDED_FRACTION))
    most = math.floor(wanted * (1 + ROUNDED_FRACTION))
    near = range(max(1, least), most + 1) or [max(1, round(wanted))]
    return max(near, key=lambda share: (math.gcd(share, 8), -abs(share - wanted)))


def _fits(gpus: int, parts: int, wanted: int) -> bool:
    return gpus % parts == 0 and gpus // parts <= wanted
