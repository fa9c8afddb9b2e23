"""Small tables and rows for tests of validation."""

from __future__ import annotations

import csv
import io

from fsdpplan.files.runs.columns import COLUMNS
from fsdpplan.files.runs.table import MeasuredRun, parse_runs

LLAMA_8B = {
    "source_id": "mine",
    "framework": "torchtitan (FSDP2)",
    "model_name": "Llama3.1-8B",
    "params_b": "8.03",
    "layers": "32",
    "hidden": "4096",
    "ffn_hidden": "14336",
    "heads": "32",
    "kv_heads": "8",
    "vocab": "128256",
    "seq_len": "8192",
    "attention_type": "gqa",
    "gpu": "H100-80GB",
    "gpus": "64",
    "gpus_per_node": "8",
    "dtype": "bf16",
    "zero_stage": "3",
    "dp_replicate": "1",
    "dp_shard": "64",
    "tp": "1",
    "pp": "1",
    "micro_batch": "1",
    "global_batch": "64",
    "act_ckpt": "op",
    "compile": "y",
    "step_time_s": "1.3",
    "oom": "n",
}
"""A row that gives everything; its step time is made up."""

GPT_PIPELINE = LLAMA_8B | {
    "framework": "Megatron-LM",
    "model_name": "GPT 18B",
    "params_b": "",
    "layers": "40",
    "hidden": "6144",
    "ffn_hidden": "",
    "heads": "48",
    "kv_heads": "48",
    "vocab": "51200",
    "seq_len": "2048",
    "attention_type": "mha",
    "dtype": "fp16",
    "zero_stage": "0",
    "dp_replicate": "4",
    "dp_shard": "1",
    "tp": "8",
    "sp": "n",
    "pp": "2",
    "micro_batch": "2",
    "global_batch": "128",
    "act_ckpt": "full",
    "compile": "n",
}
"""Tensor and pipeline parallelism of the time before sequence parallelism."""


def table(*rows: dict[str, str], columns: tuple[str, ...] = tuple(COLUMNS)) -> str:
    """CSV text of `rows`."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def run(base: dict[str, str] = LLAMA_8B, **changes: str) -> MeasuredRun:
    """The row `base` with `changes`, read as any other."""
    return parse_runs(table(base | changes), where="runs.csv")[0]
