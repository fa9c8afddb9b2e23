"""DeepSpeed's JSON. Source: deepspeed.ai/docs/config-json, and runtime/zero/config.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdpplan.errors import SpecError
from fsdpplan.files.configurations.configuration import (
    AUTO,
    Configuration,
    Options,
    Reader,
    Sorting,
    count,
    is_count,
    nothing,
    offload,
    one_of,
    switch,
)

MARKS = frozenset(
    {
        "zero_optimization",
        "train_micro_batch_size_per_gpu",
        "train_batch_size",
        "zero_allow_untested_optimizer",
    }
)
SHARDINGS = {0: "ddp", 1: "zero1", 2: "zero2", 3: "fsdp"}
_ZERO = "zero_optimization"
_OFFLOADED = (f"{_ZERO}.offload_optimizer.device", f"{_ZERO}.offload_param.device")
_SWITCHES = ("bf16.enabled", "bfloat16.enabled", "fp16.enabled")

READERS: dict[str, Reader] = {
    f"{_ZERO}.stage": one_of("sharding", SHARDINGS),
    "bf16.enabled": switch({"precision": "bf16"}),
    "bfloat16.enabled": switch({"precision": "bf16"}),
    "fp16.enabled": switch({"precision": "fp16"}),
    "train_batch_size": count("global_batch"),
    "train_micro_batch_size_per_gpu": count("micro_batch"),
    "gradient_accumulation_steps": lambda value: {} if is_count(value) else None,
    "optimizer.type": one_of("optimizer", {"AdamW": "adamw", "Adam": "adamw"}),
    "communication_data_type": one_of("reduce_dtype", {"fp32": "fp32", "bf16": "bf16"}),
    "tensor_parallel.autotp_size": count("tp"),
    "sequence_parallel_size": lambda value: (
        {"cp": str(value), **({"cp_attention": "ulysses"} if value > 1 else {})}
        if is_count(value)
        else None
    ),
    **{name: nothing("none", None) for name in _OFFLOADED},
    f"{_ZERO}.cpu_offload": nothing(False),
    f"{_ZERO}.zero_hpz_partition_size": nothing(1),
    f"{_ZERO}.zero_quantized_weights": nothing(False),
    f"{_ZERO}.zero_quantized_gradients": nothing(False),
    "prescale_gradients": nothing(False),
    "sparse_gradients": nothing(False),
    "amp.enabled": nothing(False),
}
IDLE = (
    "optimizer.params.",
    "scheduler.",
    "fp16.",
    "bf16.",
    "steps_per_print",
    "wall_clock_breakdown",
    "memory_breakdown",
    "dump_state",
    "gradient_clipping",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "tensorboard.",
    "wandb.",
    "csv_monitor.",
    "comms_logger.",
    "flops_profiler.",
    "checkpoint.",
    f"{_ZERO}.stage3_gather_16bit_weights_on_model_save",
    f"{_ZERO}.stage3_gather_fp16_weights_on_model_save",
    f"{_ZERO}.elastic_checkpoint",
    f"{_ZERO}.load_from_fp32_weights",
)


def deepspeed_configuration(fields: Mapping[str, Any], *, where: str) -> Configuration:
    """What DeepSpeed would run."""
    sorting = Sorting(fields=fields)
    readers = {**READERS, **offload(fields, *_OFFLOADED)}
    sorting.read(readers, IDLE)
    options = sorting.options
    if fields.get("fp16.enabled") is True and (
        fields.get("bf16.enabled") is True or fields.get("bfloat16.enabled") is True
    ):
        raise SpecError(
            f"{where}: fp16 and bf16 are both enabled, which DeepSpeed refuses: keep one of them"
        )
    if AUTO not in map(fields.get, _SWITCHES):
        options.setdefault("precision", "fp32")
    options.setdefault("sharding", "ddp")
    steps = fields.get("gradient_accumulation_steps")
    return sorting.finished(
        "DeepSpeed",
        accumulation=steps if is_count(steps) else None,
        notes=as_priced(options),
    )


def as_priced(options: Options) -> tuple[str, ...]:
    """Complete `options` by what DeepSpeed does unasked, and say how it is priced."""
    options.setdefault("compile", "no")
    if options.get("precision") == "bf16":
        options.setdefault("reduce_dtype", "bf16")  # communication_data_type by default
    if options["sharding"] in ("zero1", "zero2"):
        options.setdefault("runtime", "megatron")
        return (
            "ZeRO-1 and ZeRO-2 are priced as Megatron Core's distributed optimizer, with its fused "
            "kernels: the time of a model of transformers is longer",
        )
    if options["sharding"] == "fsdp":
        options.setdefault("runtime", "fsdp2_others")
        return ("ZeRO-3 is priced as FSDP2 in a program of others, which shards the same",)
    return ()
