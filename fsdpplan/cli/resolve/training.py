"""What a step is asked to do: the options, or the defaults, each said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdpplan.cli.options.question import TrainingOptions
from fsdpplan.cli.resolve import Resolved, flag
from fsdpplan.cost.band import peak_log_error
from fsdpplan.errors import SpecError
from fsdpplan.files.training_data import counted_data, is_chats
from fsdpplan.search.defaults import legal_global_batch
from fsdpplan.search.pins import (
    DEFAULT_SEQ_LEN,
    DEFAULT_TOKENS_PER_STEP,
    Pins,
    default_global_batch,
    fine_tuning_batch,
    program_defaults,
)
from fsdpplan.spec.adapters import USUAL_ALPHA, Adapters
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import Dropout, Training
from fsdpplan.units import format_count, format_percent

POLICIES = ("precision", "reduce_dtype", "optimizer", "runtime")
QUIET = ("param_dtype", "gradient_compression", "precision_switch")
"""Options that change nothing unless they are asked for, so that no default is said."""
ADAPTERS = {
    "lora_alpha": "alpha",
    "lora_rs": "rslora",
    "lora_targets": "targets",
    "lora_dropout": "dropout",
    "lora_dtype": "dtype",
    "base": "base",
}
"""Options of adapters beside their rank -> fields."""
OF_THE_QUESTION = ("fine_tune", "data", "lora", *ADAPTERS)
"""Options that other fields of a training come from."""
FP8_POLICIES = ("fp8_recipe", "fp8_all_gather")
"""Options whose default is that of `Training`; those of fp8 mean nothing without it."""


def resolve_training(
    options: TrainingOptions,
    *,
    model: Model,
    cluster: Cluster,
    pins: Pins,
    published: Dropout | None = None,
) -> Resolved[Training]:
    """The training that the options ask for; `published`: what the model's config drops."""
    options = with_data(options)
    if options.precision != "fp8" and (options.precision_switch or "none") == "none":
        _refuse_fp8_options(options)
    seq_len = _seq_len(options, model)
    given = {name: getattr(options, name) for name in (*POLICIES, *QUIET, *FP8_POLICIES, "program")}
    values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if options.gradient_compression == "bf16":
        values.setdefault("reduce_dtype", "bf16")
    if options.program is not None:
        taken = program_defaults(
            options.program,
            precision=options.precision,  # type: ignore[arg-type]
            gpus=cluster.gpus,
        )
        values = {**taken, **values}
    if options.headroom is not None:
        values["headroom_fraction"] = options.headroom
    if options.fits is not None:
        values["fits_fraction"] = options.fits
    if options.pack is not None:
        values["packed"] = options.pack
    values["mean_document_tokens"] = options.mean_document_tokens
    values["adapters"] = _adapters(options)
    is_ours = values.get("program", "reference") == "reference"
    takes_published = options.dropout is None and is_ours and options.runtime in (None, "fsdp2")
    values["dropout"] = published if takes_published else options.dropout
    draft = Training(seq_len=seq_len.value, global_batch=1, tokens=options.tokens, **values)
    batch = _global_batch(options, draft, model=model, cluster=cluster, pins=pins)
    training = replace(draft, global_batch=batch.value)
    named = {**given, "tokens": options.tokens, "headroom": options.headroom, "fits": options.fits}
    named |= {"pack": options.pack, "mean_document_tokens": options.mean_document_tokens}
    of_dropout = _source("dropout", options.dropout)
    if values["dropout"] is not None and options.dropout is None:
        of_dropout = "config"
    return Resolved(
        value=training,
        sources=(
            *seq_len.sources,
            *batch.sources,
            *((f"training.{name}", _source(name, value)) for name, value in named.items()),
            ("training.dropout", of_dropout),
            ("training.adapters", _source("lora", options.lora)),
        ),
        assumptions=(
            *seq_len.assumptions,
            *batch.assumptions,
            *_policies_taken(training, options),
            *_documents_taken(training),
            *_dropout_taken(training, options, published),
            *_adapters_taken(training, options),
            *_room_taken(training, options, cluster),
        ),
        warnings=(*seq_len.warnings, *_rounding(training)),
    )


def _adapters(options: TrainingOptions) -> Adapters | None:
    """What the options of LoRA ask for. Raises SpecError where they are without `--lora`."""
    given = {name: getattr(options, name) for name in ADAPTERS}
    if options.lora is None:
        for name, value in given.items():
            if value is not None:
                raise SpecError(
                    f"{flag(name)} is of adapters, and none are asked for: add --lora 16, or leave "
                    "it out"
                )
        return None
    fields = {ADAPTERS[name]: value for name, value in given.items() if value is not None}
    return Adapters(rank=options.lora, **{"alpha": float(USUAL_ALPHA * options.lora), **fields})


def _adapters_taken(training: Training, options: TrainingOptions) -> tuple[str, ...]:
    """What of adapters was not said."""
    adapters = training.adapters
    if adapters is None:
        return ()
    words = {
        "lora_alpha": f"alpha {adapters.alpha:g}",
        "lora_targets": "adapters of all matrices of a block",
        "lora_dtype": f"adapters in {adapters.dtype}",
        "base": f"frozen base in {adapters.base}",
    }
    taken = [name for name in words if getattr(options, name) is None]
    flags = ", ".join(map(flag, taken))
    return (f"{', '.join(words[name] for name in taken)} ({flags})",) if taken else ()


def _rounding(training: Training) -> tuple[str, ...]:
    """What parameters in bf16 lose, where nothing is done about it."""
    if training.param_dtype != "bf16" or training.optimizer == "adamw_8bit":
        return ()
    return (
        "bf16 has 8 bits of mantissa: an update below 2^-9 of its weight is rounded away, and "
        "AdamW moves a weight by about the learning rate, so weights above 512 times that stay as "
        "they are. --optimizer adamw_8bit rounds stochastically; --param-dtype fp32 keeps masters",
    )


def _refuse_fp8_options(options: TrainingOptions) -> None:
    for name in FP8_POLICIES:
        if getattr(options, name):
            raise SpecError(f"{flag(name)} needs --precision fp8: add it, or leave this out")


def _source(name: str, value: object) -> str:
    return "default" if value is None else f"flag {flag(name)}"


def _seq_len(options: TrainingOptions, model: Model) -> Resolved[int]:
    longest = model.max_positions
    sources = (("training.seq_len", _source("seq_len", options.seq_len)),)
    if options.seq_len is None:
        length = min(DEFAULT_SEQ_LEN, longest)
        return Resolved(
            value=length,
            sources=sources,
            assumptions=(f"sequences of {length:,} tokens (--seq-len)",),
        )
    if options.seq_len <= longest:
        return Resolved(value=options.seq_len, sources=sources)
    beyond = f"--seq-len {options.seq_len} is longer than the {longest} positions of {model.name}"
    if model.positions == "learned":
        raise SpecError(f"{beyond}, which are learned: use --seq-len {longest} or less")
    return Resolved(value=options.seq_len, sources=sources, warnings=(beyond,))


def _global_batch(
    options: TrainingOptions, draft: Training, *, model: Model, cluster: Cluster, pins: Pins
) -> Resolved[int]:
    sources = (("training.global_batch", _source("global_batch", options.global_batch)),)
    if options.global_batch is not None:
        return Resolved(value=options.global_batch, sources=sources)
    usual = None
    if is_fine_tuning(options):
        usual = fine_tuning_batch(seq_len=draft.seq_len, gpus=cluster.gpus)
    batch = legal_global_batch(model=model, cluster=cluster, training=draft, pins=pins, usual=usual)
    words = f"batches of {batch:,} sequences, {format_count(batch * draft.seq_len)} tokens"
    if usual is not None:
        # asked again about the plan, it is one that was said
        sources = (("training.global_batch", "flag --fine-tune"),)
        words = f"{words}, as fine-tunings have it (--global-batch)"
        return Resolved(value=batch, sources=sources, assumptions=(words,))
    return Resolved(
        value=batch,
        sources=sources,
        assumptions=(f"{words} (--global-batch){_unusual(batch, draft.seq_len, cluster.gpus)}",),
    )


def is_fine_tuning(options: TrainingOptions) -> bool:
    """Whether a fine-tuning is planned: as is said, since adapters are trained, or since the data
    are chats."""
    said = options.fine_tune or options.lora is not None
    return bool(said) or (options.data is not None and is_chats(Path(options.data)))


def with_data(options: TrainingOptions) -> TrainingOptions:
    """`options` with what `--data` says: the tokens of one pass, filled-up sequences whole, as the
    trainer has them, and whether it is a fine-tuning. Raises SpecError where it is not on this
    host."""
    if options.data is None:
        return options
    if options.tokens is not None:
        raise SpecError("--data is counted, and --tokens says how much it is: give one of them")
    seq_len = options.seq_len or DEFAULT_SEQ_LEN
    found = counted_data(
        (Path(options.data),),
        seq_len=seq_len,
        chats=is_chats(Path(options.data)),
        packed=bool(options.pack),
        tokenized=True,
    )
    if found is None:
        raise SpecError(
            f"--data {options.data} has nothing here that can be counted: plan with --fine-tune or "
            "--tokens in its place, and give --epochs to emit-launch; the trainer counts on its own"
        )
    tokens, tunes = found.sequences * seq_len, is_fine_tuning(options)
    return replace(options, data=None, tokens=tokens, fine_tune=tunes or None)


def _unusual(batch: int, seq_len: int, gpus: int) -> str:
    """What is to be said of a default batch that is not what it usually is."""
    usual = default_global_batch(seq_len=seq_len, gpus=gpus)
    if batch > usual:
        return (
            f": unusually large, since {format_count(DEFAULT_TOKENS_PER_STEP)} tokens leave too "
            f"many of {gpus:,} GPUs without work in any layout"
        )
    if batch < gpus:
        return (
            f": fewer than GPUs, so that several of them work on each sequence; --global-batch "
            f"{gpus} gives each its own"
        )
    return ""


def _policies_taken(training: Training, options: TrainingOptions) -> tuple[str, ...]:
    """One line for the formats, where they were not given."""
    words = {
        "precision": f"{training.precision} matmuls",
        "reduce_dtype": f"gradients reduced in {training.reduce_dtype}",
        "optimizer": f"optimizer {training.optimizer}",
        "runtime": f"runtime {training.runtime}",
    }
    taken = [name for name in POLICIES if getattr(options, name) is None]
    lines = []
    if taken:
        flags = ", ".join(map(flag, taken))
        lines.append(f"{', '.join(words[name] for name in taken)} ({flags})")
    if "fp8" in (training.precision, training.later_precision):
        lines += _fp8_taken(training, options)
    return tuple(lines)


def _documents_taken(training: Training) -> tuple[str, ...]:
    """How long packed documents are taken to be."""
    if not training.packed:
        return ()
    if training.mean_document_tokens is None:
        return ("attention of packed sequences as of whole ones (--mean-document-tokens)",)
    return (
        f"documents of exponential lengths, {training.mean_document_tokens:,} tokens in the mean: "
        "twice the attention of equal ones",
    )


def _dropout_taken(
    training: Training, options: TrainingOptions, published: Dropout | None
) -> tuple[str, ...]:
    """What is dropped without having been asked for, and what is not."""
    if published is None or options.dropout is not None:
        return ()
    if training.dropout is None:
        return (f"dropout {published} of the config is left to the script",)
    return (f"dropout {published}, as the config says (--dropout)",)


def _room_taken(training: Training, options: TrainingOptions, cluster: Cluster) -> tuple[str, ...]:
    """How much memory is left, where it was not said; a chance where peaks are said to be off."""
    lines = []
    if options.headroom is None:
        share = _whole_percent(training.headroom_fraction)
        lines.append(f"{share} of device memory left free (--headroom)")
    if options.fits is None and peak_log_error(cluster.device):
        share = _whole_percent(training.fits_fraction)
        lines.append(f"at least {share} sure to fit (--fits)")
    return tuple(lines)


def _whole_percent(share: float) -> str:
    return format_percent(share).replace(".0", "")


def _fp8_taken(training: Training, options: TrainingOptions) -> list[str]:
    """What fp8 means here, where it was not said."""
    words = {
        "fp8_recipe": f"{training.fp8_recipe} scales of fp8 matmuls",
        "fp8_all_gather": f"weights gathered in {training.in_precision('fp8').gathered_dtype}",
    }
    taken = [name for name in FP8_POLICIES if getattr(options, name) is None]
    flags = ", ".join(map(flag, taken))
    return [f"{', '.join(words[name] for name in taken)} ({flags})"] if taken else []
