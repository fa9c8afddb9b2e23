"""Recipe: number formats and runtime of a row."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fsdpplan.files.runs import MeasuredRun
from fsdpplan.spec.runtime import RuntimeName
from fsdpplan.spec.training import Fp8Recipe, Precision, ReduceDtype, Training
from fsdpplan.validate.runtimes import Software
from fsdpplan.validate.skipped import NotExpressed

REDUCE_BF16 = re.compile(r"\breduce_dtype=bf16\b|\+reduce bf16\b")
REDUCE_FP32 = re.compile(r"\breduce_dtype=fp32\b|\bfp32 grad accumulation\b")
PRECISIONS: dict[str, Precision] = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}
FINE_TUNING = re.compile(r"\btask=(LoRA|PEFT|QLoRA)\b", re.I)
PACKED = re.compile(r"\bpacked sequences?\b|; ?packed\b", re.I)


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """What the number format of a row says."""

    precision: Precision
    runtime: RuntimeName
    fp8_recipe: Fp8Recipe = "tensorwise"
    fp8_all_gather: bool = False


def training_of(
    run: MeasuredRun, *, software: Software, seq_len: int, global_batch: int, is_fsdp: bool
) -> tuple[Training, list[str]]:
    """The training of `run`, and what was assumed for it."""
    if FINE_TUNING.search(run.notes):
        raise NotExpressed("training of adapters is not priced", "task=LoRA")
    said: list[str] = []
    formats = _formats(run, software, is_fsdp, said)
    if PACKED.search(run.notes):
        said.append("packed sequences: attention over the whole of them")
    training = Training(
        seq_len=seq_len,
        global_batch=global_batch,
        precision=formats.precision,
        reduce_dtype=_reduce_dtype(run, software, formats, said),
        runtime=formats.runtime,
        fp8_recipe=formats.fp8_recipe,
        fp8_all_gather=formats.fp8_all_gather,
        headroom_fraction=0.0,  # what ran, ran with none
    )
    return training, said


def _formats(run: MeasuredRun, software: Software, is_fsdp: bool, said: list[str]) -> Formats:
    word = run.dtype.lower()
    if not word:
        said.append("bf16")
        return Formats(precision="bf16", runtime=software.runtime)
    if word.startswith("mixed"):
        if run.tp > 1 or run.pp > 1:
            raise NotExpressed("autocast with tensor or pipeline parallelism is not priced")
        said.append("half-precision autocast taken as bf16, parameters in fp32")
        return Formats(precision="bf16", runtime="autocast")
    if word.startswith("fp8"):
        return _fp8(word, software, is_fsdp, said)
    if word not in PRECISIONS:
        raise NotExpressed("this number format is not priced", run.dtype)
    runtime = software.runtime
    if runtime == "nanotron" and run.zero_stage == "1":
        runtime = "nanotron_zero1"
    return Formats(precision=PRECISIONS[word], runtime=runtime)


def _fp8(word: str, software: Software, is_fsdp: bool, said: list[str]) -> Formats:
    """fp8 matmuls by the recipe that the words name, else by the software's."""
    recipe, gather = software.fp8_recipe, software.fp8_all_gather
    if re.search(r"\bte\b|transformer ?engine|delayed", word):
        recipe, gather = "delayed", False
    named = next((one for one in ("tensorwise", "rowwise", "delayed") if one in word), None)
    if named == "rowwise":
        recipe, gather = "rowwise", False
    elif named is not None:
        recipe = "delayed" if named == "delayed" else "tensorwise"
        gather = "all-gather" in word
    gather = gather and is_fsdp
    if named is None:
        gathers = " and fp8 all-gather" if gather else ""
        said.append(f"fp8 recipe {recipe}{gathers}, as {software.words}'s")
    return Formats(
        precision="fp8", runtime=software.runtime, fp8_recipe=recipe, fp8_all_gather=gather
    )


def _reduce_dtype(
    run: MeasuredRun, software: Software, formats: Formats, said: list[str]
) -> ReduceDtype:
    """What the notes say, or what the software does; the two half precisions cost the same."""
    if REDUCE_BF16.search(run.notes):
        return "bf16"
    if REDUCE_FP32.search(run.notes):
        return "fp32"
    word = "bf16" if formats.precision == "fp8" else formats.precision
    if word in software.half_gradients:
        said.append(f"gradients reduced in {word}, as {software.words} does")
        return "bf16"
    if run.gpus != 1:
        said.append("gradients reduced in fp32")
    return "fp32"
