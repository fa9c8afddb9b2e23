"""Recipe: number formats and runtime of a row."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fsdpplan.files.runs.table import MeasuredRun
from fsdpplan.spec.runtime import RuntimeName, runtime_named
from fsdpplan.spec.training import Fp8Recipe, Precision, ReduceDtype, Training, torch_release
from fsdpplan.validate.runs.runtimes import Software
from fsdpplan.validate.runs.skipped import NotExpressed

HALF_STATES = re.compile(
    r"\b(?:pure|full|true) (?:bf16|fp16|half)\b"
    r"|\b(?:bf16|fp16|half)[- ](?:params?|parameters|weights)(?: and|,| \+|/)[^;]*"
    r"\b(?:optim\w*|states|moments|adam\w*)"
    r"|\b(?:optim\w*|adam\w*)(?:[- ]states?| moments)?[^;,]{0,12}"
    r"\b(?:in|kept in|=) ?(?:bf16|fp16|half)\b"
    r"|\b(?:no|without) (?:fp32 )?master(?: weights| copy| copies)?\b"
    r"|\bmodel (?:is )?(?:loaded|kept) in (?:bf16|fp16|half)\b",
    re.I,
)
"""Words on runs that keep parameters and optimizer states in the compute dtype."""

WHOLE_STATES = re.compile(r"\bMixedPrecision\b", re.I)
"""FSDP's policy, whose modes are called pure though the shards are fp32."""

PLAIN_FORMATS = re.compile(r"(?:\b|_)(bf16|bfloat16|fp16|float16|half|fp32|float32)(?:\b|_)", re.I)
FORMAT_NAMES: dict[str, Precision] = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
}
AUTOCAST = re.compile(r"\bmixed\b|\bamp\b|autocast|[- ]mixed", re.I)
FOUR_BITS = re.compile(r"\b(?:nvfp4|mxfp4|fp4)\b", re.I)
REDUCE_BF16 = re.compile(r"\breduce_dtype=bf16\b|\+reduce bf16\b")
REDUCE_FP32 = re.compile(r"\breduce_dtype=fp32\b|\bfp32 grad accumulation\b")
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
        torch=_torch(run),
        headroom_fraction=0.0,  # what ran, ran with none
        fits_fraction=0.0,  # and with whatever chance it had
    )
    return training, said


TORCH = re.compile(r"\btorch (\d+\.\d+)\b", re.I)


def _torch(run: MeasuredRun) -> str | None:
    """The release in its column, or that the framework's names, as `torch 2.11`."""
    named = TORCH.search(run.framework)
    said = run.torch or (named[1] if named else None)
    return str(torch_release(said)) if said else None


def _formats(run: MeasuredRun, software: Software, is_fsdp: bool, said: list[str]) -> Formats:
    word = run.dtype.lower()
    if not word:
        said.append("bf16")
        return _half(run, "bf16", software, said)
    if FOUR_BITS.search(word):
        raise NotExpressed("4-bit matmuls are not priced", run.dtype)
    if re.search(r"\b(?:mx)?fp8|\be4m3|\be5m2", word):
        return _fp8(word, software, is_fsdp, said)
    named = PLAIN_FORMATS.search(word)
    precision = FORMAT_NAMES.get(named[1], named[1]) if named else "bf16"
    if AUTOCAST.search(word):
        return _autocast(run, software, "bf16" if precision == "fp32" else precision, said)
    if named is None:
        raise NotExpressed("this number format is not priced", run.dtype)
    if word != precision:
        said.append(f'"{run.dtype}" taken as {precision} of {software.words}')
    return _half(run, precision, software, said)


def _half(run: MeasuredRun, precision: str, software: Software, said: list[str]) -> Formats:
    """Matmuls in a plain format, by the software's own runtime unless the row says otherwise."""
    runtime = software.runtime
    if runtime == "nanotron" and run.zero_stage == "1":
        runtime = "nanotron_zero1"
    elif keeps_half_states(run, software):
        runtime = "half_states"
        said.append(f"parameters, gradients and optimizer states in {precision}, no fp32 masters")
    return Formats(precision=precision, runtime=runtime)  # type: ignore[arg-type]


def keeps_half_states(run: MeasuredRun, software: Software) -> bool:
    """Whether the row says that nothing is kept in fp32; softwares with masters of their own have
    them whatever is said of the model."""
    if runtime_named(software.runtime).half_parameters:
        return False
    words = f"{run.dtype}; {run.notes}"
    return bool(HALF_STATES.search(words)) and not WHOLE_STATES.search(words)


def _autocast(run: MeasuredRun, software: Software, precision: str, said: list[str]) -> Formats:
    """Autocast, or what software that keeps half-precision parameters calls mixed precision."""
    if runtime_named(software.runtime).half_parameters:
        said.append(f'"{run.dtype}" taken as {precision} with fp32 masters, as {software.words}\'s')
        return _half(run, precision, software, said)
    if run.tp > 1 or run.pp > 1:
        raise NotExpressed("autocast with tensor or pipeline parallelism is not priced")
    said.append(f"half-precision autocast taken as {precision}, parameters in fp32")
    return Formats(precision=precision, runtime="autocast")  # type: ignore[arg-type]


FP8_RECIPES: tuple[tuple[re.Pattern[str], Fp8Recipe, str], ...] = (
    (re.compile(r"rowwise|row-wise|per[- ]row"), "rowwise", ""),
    (
        re.compile(r"block ?wise|sub-?channel|[-_ ]sc\b|128x128|1x128|deepseek"),
        "rowwise",
        "scales of small blocks taken to be cast as scales of rows are",
    ),
    (
        re.compile(r"mx|[-_ ]mx\b"),
        "delayed",
        "scales of 32 elements taken to be cast and laid out in one kernel, as delayed scaling is",
    ),
    (re.compile(r"tensorwise|current|[-_ ]cs\b|dynamic"), "tensorwise", ""),
    (re.compile(r"\bte\b|transformer ?engine|delayed|hybrid|[-_ ]ds\b"), "delayed", ""),
)
"""Words on recipes of fp8, the first that matches, with what is said of those that have no price of
their own. MXFP8: TransformerEngine transformer_engine/common/cast/mxfp8, which reads an element
once and writes both of its layouts."""


def _fp8(word: str, software: Software, is_fsdp: bool, said: list[str]) -> Formats:
    """fp8 matmuls by the recipe that the words name, else by the software's."""
    for pattern, recipe, sentence in FP8_RECIPES:
        if pattern.search(word):
            gather = recipe == "tensorwise" and "all-gather" in word
            if sentence:
                said.append(sentence)
            break
    else:
        recipe, gather = software.fp8_recipe, software.fp8_all_gather and is_fsdp
        gathers = " and fp8 all-gather" if gather else ""
        said.append(f"fp8 recipe {recipe}{gathers}, as {software.words}'s")
    return Formats(
        precision="fp8",
        runtime=software.runtime,
        fp8_recipe=recipe,
        fp8_all_gather=gather and is_fsdp,
    )


def _reduce_dtype(
    run: MeasuredRun, software: Software, formats: Formats, said: list[str]
) -> ReduceDtype:
    """What the notes say, or what the software does; the two half precisions cost the same."""
    if REDUCE_BF16.search(run.notes):
        return "bf16"
    if REDUCE_FP32.search(run.notes):
        return "fp32"
    if formats.runtime == "half_states":
        return "bf16"
    word = "bf16" if formats.precision == "fp8" else formats.precision
    if word in software.half_gradients:
        said.append(f"gradients reduced in {word}, as {software.words} does")
        return "bf16"
    if run.gpus != 1:
        said.append("gradients reduced in fp32")
    return "fp32"
