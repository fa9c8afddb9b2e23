"""The YAML of `accelerate config`. Source: accelerate 1.15.0, commands/config/config_args.py and
utils/dataclasses.py (`FullyShardedDataParallelPlugin`, `DeepSpeedPlugin`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdpplan.errors import SpecError
from fsdpplan.files.configurations.configuration import (
    Configuration,
    Options,
    Reader,
    Sorting,
    count,
    is_count,
    nothing,
    offload,
    one_of,
    shown,
    switch,
)
from fsdpplan.files.configurations.deepspeed import SHARDINGS, as_priced

MARKS = frozenset({"distributed_type", "compute_environment", "fsdp_config", "deepspeed_config"})
_FSDP, _MESH, _ZERO = (
    "fsdp_config.fsdp_",
    "parallelism_config.parallelism_config_",
    "deepspeed_config.",
)

_OFFLOADED = (f"{_ZERO}offload_optimizer_device", f"{_ZERO}offload_param_device")

_STRATEGIES: dict[str, Options] = {
    "full_shard": {"sharding": "fsdp", "reshard_after_forward": "always"},
    "shard_grad_op": {"sharding": "fsdp", "reshard_after_forward": "never"},
    "no_shard": {"sharding": "ddp"},
    "hybrid_shard": {"sharding": "fsdp", "reshard_after_forward": "always"},
    "hybrid_shard_zero2": {"sharding": "fsdp", "reshard_after_forward": "never"},
}
_NUMBERED = dict(enumerate(_STRATEGIES, start=1))


def _strategy(value: Any) -> Options | None:
    return dict(_STRATEGIES[str(_NUMBERED.get(value, value)).lower()])


def _reshard(value: Any) -> Options | None:
    if isinstance(value, bool):
        return {"reshard_after_forward": "always" if value else "never"}
    return _strategy(value)


READERS: dict[str, Reader] = {
    "mixed_precision": one_of(
        "precision", {"no": "fp32", False: "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}
    ),
    "num_processes": count("gpus"),
    "num_machines": lambda value: {} if is_count(value) else None,
    "use_cpu": nothing(False),
    f"{_FSDP}version": nothing(1, 2),
    f"{_FSDP}sharding_strategy": _strategy,
    f"{_FSDP}reshard_after_forward": _reshard,
    f"{_FSDP}offload_params": switch({"offload": "cpu"}),
    f"{_FSDP}activation_checkpointing": switch(
        {"activation_checkpointing": "full"}, {"activation_checkpointing": "none"}
    ),
    f"{_FSDP}auto_wrap_policy": nothing("TRANSFORMER_BASED_WRAP"),
    **{f"{_MESH}{name}_size": count(name) for name in ("dp_replicate", "dp_shard", "tp", "cp")},
    f"{_MESH}sp_size": nothing(1),
    f"{_MESH}cp_comm_strategy": nothing("allgather"),
    "dynamo_config.dynamo_backend": one_of("compile", {"inductor": "yes", "no": "no", False: "no"}),
    "dynamo_config.dynamo_use_regional_compilation": nothing(True),
    f"{_ZERO}zero_stage": one_of("sharding", SHARDINGS),
    **{name: nothing("none") for name in _OFFLOADED},
    f"{_ZERO}gradient_accumulation_steps": lambda value: {} if is_count(value) else None,
}
IDLE = (
    "compute_environment",
    "debug",
    "downcast_bf16",
    "enable_cpu_affinity",
    "machine_rank",
    "main_process_ip",
    "main_process_port",
    "main_training_function",
    "rdzv_backend",
    "same_network",
    "gpu_ids",
    "tpu_env",
    "tpu_use_cluster",
    "tpu_use_sudo",
    "deepspeed_config.zero3_init_flag",
    "deepspeed_config.zero3_save_16bit_model",
    "deepspeed_config.gradient_clipping",
    "deepspeed_config.deepspeed_multinode_launcher",
    "deepspeed_config.deepspeed_hostfile",
    f"{_FSDP}backward_prefetch",
    f"{_FSDP}forward_prefetch",
    f"{_FSDP}cpu_ram_efficient_loading",
    f"{_FSDP}state_dict_type",
    f"{_FSDP}sync_module_states",
    f"{_FSDP}transformer_layer_cls_to_wrap",
    f"{_FSDP}use_orig_params",
    "dynamo_config.dynamo_mode",
    "dynamo_config.dynamo_use_dynamic",
    "dynamo_config.dynamo_use_fullgraph",
)


def accelerate_configuration(fields: Mapping[str, Any], *, where: str) -> Configuration:
    """What `accelerate launch` would run."""
    kind = str(fields.get("distributed_type", "NO"))
    readers = {**READERS, **offload(fields, *_OFFLOADED), "distributed_type": _kind}
    sorting = Sorting(fields=fields)
    sorting.read(readers, IDLE)
    options = sorting.options
    options.setdefault("precision", "fp32")
    processes, machines = fields.get("num_processes"), fields.get("num_machines", 1)
    if is_count(processes) and is_count(machines):
        if processes % machines:
            raise SpecError(
                f"{where}: num_processes {processes} does not fill num_machines {machines} "
                "alike: correct one of them"
            )
        options["gpus_per_node"] = str(processes // machines)
    if kind in ("FSDP", "MULTI_GPU", "NO", "False"):
        notes = _native(fields, options, kind)
    elif kind == "DEEPSPEED":
        if "deepspeed_config.deepspeed_config_file" in fields:
            raise SpecError(
                f"{where}: its settings are in "
                f"{shown(fields['deepspeed_config.deepspeed_config_file'])}: read that one with "
                "--from, and give --gpus"
            )
        options.setdefault("sharding", "ddp")
        notes = as_priced(options)
    else:
        raise SpecError(
            f"{where}: distributed_type {shown(kind)} is not read, but FSDP, MULTI_GPU, "
            "DEEPSPEED and NO are: change it, or type its values as options"
        )
    steps = fields.get(f"{_ZERO}gradient_accumulation_steps")
    return sorting.finished(
        "Accelerate", accumulation=steps if is_count(steps) else None, notes=notes
    )


def _kind(value: Any) -> Options | None:
    return {
        "FSDP": {"sharding": "fsdp"},
        "MULTI_GPU": {"sharding": "ddp"},
        "NO": {"gpus": "1"},
        "False": {"gpus": "1"},
        "DEEPSPEED": {},
    }[str(value)]


def _native(fields: Mapping[str, Any], options: Options, kind: str) -> tuple[str, ...]:
    """FSDP and DDP as Accelerate wraps them, with what it does unasked."""
    options.setdefault("compile", "no")
    if kind == "FSDP":
        options.setdefault("activation_checkpointing", "none")
    asked = fields.get(f"{_FSDP}sharding_strategy")
    if asked in (4, 5) or str(asked).lower().startswith("hybrid"):
        options["dp_shard"] = options.get("gpus_per_node", "8")
        options["dp_replicate"] = str(fields.get("num_machines", 1))
    if kind == "FSDP" and fields.get(f"{_FSDP}version", 1) == 1:
        options["runtime"] = "fsdp1"
        if options["precision"] == "bf16":
            options["reduce_dtype"] = "bf16"  # set_mixed_precision: one dtype for all
        return ("fsdp_version 1 is priced as FSDP1",)
    options["program"] = "accelerate"
    return ()
