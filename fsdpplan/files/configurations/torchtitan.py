"""The TOML of torchtitan before 0.3, whose configurations are Python now. Source: torchtitan 0.2,
torchtitan/config/job_config.py and the train_configs of its models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdpplan.files.configurations.configuration import (
    Configuration,
    Options,
    Reader,
    Sorting,
    count,
    is_count,
    nothing,
    one_of,
    switch,
)
from fsdpplan.spec.programs.torchtitan import SCHEDULES

MARKS = frozenset({"parallelism", "training", "job", "activation_checkpoint"})
_TYPES = {"bfloat16": "bf16", "float32": "fp32"}
_FLAVORS = {
    ("llama3", "8b"): "llama-3.1-8b",
    ("llama3", "70b"): "llama-3.1-70b",
    ("llama3", "405b"): "llama-3.1-405b",
    **{("qwen3", size): f"qwen3-{size}" for size in ("0.6b", "1.7b", "4b", "8b", "14b", "32b")},
}
"""(name, flavor) of a model -> the catalogue's name of the same shapes."""
_P = "parallelism."


def _degree(option: str) -> Reader:
    """A degree, of which -1 is all that is left."""
    return lambda value: {} if value == -1 else count(option)(value)


def _batch(value: Any) -> Options | None:
    return {} if value == -1 else count("global_batch")(value)


READERS: dict[str, Reader] = {
    "training.seq_len": count("seq_len"),
    "training.local_batch_size": lambda value: {} if is_count(value) else None,
    "training.batch_size": lambda value: {} if is_count(value) else None,
    "training.global_batch_size": _batch,
    "training.mixed_precision_param": one_of("precision", _TYPES),
    "training.mixed_precision_reduce": one_of("reduce_dtype", _TYPES),
    "training.dtype": one_of("param_dtype", _TYPES),
    "training.enable_cpu_offload": switch({"offload": "cpu"}),
    "training.compile": switch({"compile": "yes"}, {"compile": "no"}),
    "training.data_parallel_shard_degree": _degree("dp_shard"),
    "training.data_parallel_replicate_degree": count("dp_replicate"),
    "training.tensor_parallel_degree": count("tp"),
    f"{_P}data_parallel_replicate_degree": count("dp_replicate"),
    f"{_P}data_parallel_shard_degree": _degree("dp_shard"),
    f"{_P}fsdp_reshard_after_forward": one_of(
        "reshard_after_forward", {"always": "always", "never": "never"}
    ),
    f"{_P}tensor_parallel_degree": count("tp"),
    f"{_P}enable_async_tensor_parallel": switch({"async_tp": "yes"}, {"async_tp": "no"}),
    f"{_P}disable_loss_parallel": nothing(False),
    f"{_P}pipeline_parallel_degree": count("pp"),
    f"{_P}pipeline_parallel_microbatch_size": count("micro_batch"),
    f"{_P}context_parallel_degree": count("cp"),
    f"{_P}expert_parallel_degree": count("ep"),
    "activation_checkpoint.mode": lambda value: (
        {}
        if value == "selective"
        else {"activation_checkpointing": {"none": "none", "full": "full"}[value]}
    ),
    "activation_checkpoint.selective_ac_option": nothing("op"),
    "compile.enable": switch({"compile": "yes"}, {"compile": "no"}),
    "optimizer.name": one_of("optimizer", {"AdamW": "adamw"}),
    "model.converters": lambda value: (
        {}
        if value == []
        else {"precision": {"float8": "fp8"}[value[0]]}
        if len(value) == 1
        else None
    ),
    "fault_tolerance.enable": nothing(False),
    "model.print_after_conversion": nothing(False),
}
IDLE = (
    "job.",
    "profiling.",
    "metrics.",
    "checkpoint.",
    "lr_scheduler.",
    "optimizer.",
    "comm.",
    "validation.",
    "model.tokenizer_path",
    "model.hf_assets_path",
    "training.dataset",
    "training.dataset_path",
    "training.steps",
    "training.max_norm",
    "training.warmup_steps",
    "training.seed",
    "compile.components",
    "float8.filter_fqns",
    f"{_P}context_parallel_rotate_method",
)


def torchtitan_configuration(fields: Mapping[str, Any], *, where: str) -> Configuration:
    """What torchtitan would run."""
    pipelined = is_count(fields.get(f"{_P}pipeline_parallel_degree")) and (
        fields[f"{_P}pipeline_parallel_degree"] > 1
    )
    readers = dict(READERS)
    readers[f"{_P}pipeline_parallel_schedule"] = (
        one_of("schedule", {name: ours for ours, name in SCHEDULES.items()})
        if pipelined
        else lambda value: {}
    )
    if not pipelined:
        readers[f"{_P}pipeline_parallel_microbatch_size"] = lambda value: {}
    name = str(fields.get("model.name", "")).lower()
    known = _FLAVORS.get((name, str(fields.get("model.flavor", "")).lower()))
    if known is not None:
        readers |= {"model.name": lambda value: {}, "model.flavor": lambda value: {"model": known}}
    if fields.get("activation_checkpoint.mode") != "selective":
        readers["activation_checkpoint.selective_ac_option"] = lambda value: {}
    sorting = Sorting(fields=fields)
    sorting.read(readers, IDLE)
    options = sorting.options
    local = fields.get("training.local_batch_size", fields.get("training.batch_size"))
    steps = None
    if is_count(local):
        if not pipelined:
            options["micro_batch"] = str(local)
        micro = int(options.get("micro_batch", "1"))
        steps = max(1, local // micro)
    if (
        fields.get("activation_checkpoint.mode") == "selective"
        and fields.get("activation_checkpoint.selective_ac_option") == "op"
    ):
        options["activation_checkpointing"] = "op"
    options |= {"program": "torchtitan", "sharding": "fsdp"}
    options.setdefault("compile", "no")
    return sorting.finished("torchtitan", accumulation=None if "global_batch" in options else steps)
