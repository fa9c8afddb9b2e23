"""Pins: the parts of a layout that the user has fixed."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from fsdpplan.spec.layout import (
    ActivationCheckpointing,
    CheckpointBlocks,
    GradientSync,
    Layout,
    Offload,
    Reshard,
    Schedule,
    Sharding,
)


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

    def given(self) -> dict[str, Any]:
        """The pinned fields and their values."""
        pairs = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in pairs if value is not None}

    def allows(self, layout: Layout) -> bool:
        """Whether `layout` keeps every pin."""
        return all(getattr(layout, name) == value for name, value in self.given().items())


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
