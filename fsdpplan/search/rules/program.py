"""Program rules: what the program that will train cannot run, said before it is planned.

They say what `parallelize` of the trainer would refuse after the queue.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

from fsdpplan.search.pins import Pins
from fsdpplan.search.rules.rule import Problem
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import Case
from fsdpplan.spec.programs.words import Unsayable, Vocabulary
from fsdpplan.spec.training import Program, ProgramName, Training, program_named


def program_problems(case: Case) -> Iterator[Problem]:
    """What of the layout the training's program cannot run."""
    layout = case.layout
    vocabulary = vocabulary_of(case.training.program)
    program = program_named(case.training.program)
    if vocabulary is not None:
        yield from _unsaid(program, vocabulary.problems(case))
    if program.knows_blocks:
        return
    yield from _blocks(case, program)
    yield from _vocabulary(layout, case.model, program)
    if layout.cp > 1:
        yield from _context_parallel(case, program)


def program_question_problems(
    *, model: Model, cluster: Cluster, training: Training, pins: Pins
) -> Iterator[Problem]:
    """What of a question the training's program cannot run, whatever else the layout is."""
    vocabulary = vocabulary_of(training.program)
    if vocabulary is None:
        return
    case = Case(model=model, cluster=cluster, training=training, layout=Layout())
    program = program_named(training.program)
    yield from _unsaid(program, vocabulary.of_training(training))
    yield from _unsaid(program, vocabulary.of_fields(pins.given()))
    yield from _unsaid(program, vocabulary.of_question(case))
    if cluster.gpus == 1 and "ddp" not in (vocabulary.words["sharding"].values or ("ddp",)):
        yield Problem(
            reason=f"one GPU with {program.words}",
            sentence=f"{program.words} always shards, for which one GPU has no other: use --gpus "
            "2, or leave --program out",
        )


def vocabulary_of(name: ProgramName) -> Vocabulary | None:
    """What a program of others can say of a plan; None for what the trainer runs. Each is read
    where it is planned for."""
    match name:
        case "torchtitan":
            from fsdpplan.spec.programs.torchtitan import TORCHTITAN

            return TORCHTITAN
        case "megatron":
            from fsdpplan.spec.programs.megatron import MEGATRON

            return MEGATRON
        case "accelerate":
            from fsdpplan.spec.programs.accelerate import ACCELERATE

            return ACCELERATE
    return None


def program_pins(pins: Pins, name: ProgramName) -> Pins:
    """The pins, and what a program of others can say in one way only, where that is not pinned."""
    vocabulary = vocabulary_of(name)
    if vocabulary is None:
        return pins
    said = {
        field.name: values[0]
        for field in fields(Pins)
        if len(values := vocabulary.words[field.name].values or ()) == 1 and values[0] != ()
    }
    return Pins(**{**said, **pins.given()})


def _unsaid(program: Program, found: Iterator[Unsayable]) -> Iterator[Problem]:
    for one in found:
        yield Problem(
            reason=f"{program.words} has no word for it ({one.what})",
            sentence=f"{program.words} cannot express {one.words}; or leave --program out",
        )


def script_problem(case: Case) -> str | None:
    """Why no program of the user's can run the layout, whatever model it trains; None if one may.

    Of a plan for the reference decoder nobody said what the program is: it may be all that
    `parallelize` takes. Other runtimes are programs that fsdpplan knows nothing of.
    """
    training = case.training
    if training.runtime != "fsdp2" or program_named(training.program).is_target:
        return None
    if training.precision_switch != "none":
        return (
            "a change of precision in mid-run is of fsdpplan's trainer, and parallelize makes one "
            "model: plan again without --precision-switch"
        )
    if unsplit := optimizer_problem(case):
        return unsplit
    name: ProgramName = "hf" if training.program == "reference" else training.program
    # its documents are the script's own affair
    own = replace(training, program=name, packed=False, mean_document_tokens=None)
    asked = replace(case, training=own)
    found = next(program_problems(asked), None)
    return None if found is None else found.sentence


def optimizer_problem(case: Case) -> str | None:
    """Why nothing here runs a plan that shards the optimizer's state alone, which is priced all the
    same; None where its software does, or it does not."""
    sharding, training = case.layout.sharding, case.training
    if training.runtime != "fsdp2" or sharding not in ("zero1", "zero2"):
        return None
    return (
        f"sharding {sharding} is priced, and neither fsdpplan's own trainer nor parallelize has "
        "it: use --sharding fsdp, or --runtime megatron for a software that has"
    )


def _blocks(case: Case, program: Program) -> Iterator[Problem]:
    layout = case.layout
    if layout.pp > 1 and case.training.precision == "fp16":
        yield Problem(
            reason="a pipeline in fp16 of a program of one's own",
            sentence=f"pp {layout.pp} in fp16 needs a schedule that scales the loss, which is the "
            "reference decoder's only; use --precision bf16, or --program reference",
        )
    if layout.ep > 1:
        yield Problem(
            reason="expert parallelism of a program whose experts are not known",
            sentence=f"ep {layout.ep} sends tokens to experts, and parallelize does not know how "
            f"they reach those of {program.words}; use --ep 1, or --program reference",
        )
    if layout.activation_checkpointing == "attention":
        yield Problem(
            reason="recomputed attention of a program whose attention is not known",
            sentence="activation_checkpointing attention recomputes the reference decoder's "
            f"attention, and parallelize does not find that of {program.words}; use "
            "--activation-checkpointing op or full, or --program reference",
        )
    if layout.tp > 1 and layout.sharding == "ddp" and layout.dp_replicate > 1 == layout.pp:
        yield Problem(
            reason="DDP beside tensor parallelism of a program of one's own",
            sentence=f"sharding ddp with tp {layout.tp} is the reference decoder's only; use "
            "--sharding fsdp with --dp-shard of at least 2, or --program reference",
        )
    if layout.tp > 1 and case.model.unlike_reference and case.model.experts is None:
        yield Problem(
            reason="tensor parallelism of other blocks than attention's",
            sentence=f"tp {layout.tp}: no tp_plan that parallelize follows splits "
            f"{case.model.unlike_reference} of {program.words}; use --tp 1",
        )
    if layout.tp > 1 and case.model.experts is not None:
        yield Problem(
            reason="tensor parallelism of a mixture of a program of one's own",
            sentence=f"tp {layout.tp}: no tp_plan that parallelize follows splits the experts of "
            f"{program.words}; use --tp 1, or --program reference",
        )


def _vocabulary(layout: Layout, model: Model, program: Program) -> Iterator[Problem]:
    if model.vocab_multiple > 1:
        yield Problem(
            reason="a padded vocabulary of a program with tables of its own",
            sentence=f"vocab_multiple {model.vocab_multiple} pads the reference decoder, and "
            f"{program.words} has tables of its own; leave --vocab-multiple out and give the rows "
            "that it has (--config, --vocab), or use --program reference",
        )
    elif model.vocab % layout.tp:
        yield Problem(
            reason="tp does not divide vocab",
            sentence=f"tp {layout.tp} does not divide the vocabulary of {model.vocab}, and "
            f"{program.words} is not padded as the reference decoder is; use another --tp, or "
            "--program reference",
        )


def _context_parallel(case: Case, program: Program) -> Iterator[Problem]:
    model, layout = case.model, case.layout
    if not program.has_open_attention:
        yield Problem(
            reason="context parallelism of a program whose attention cannot be replaced",
            sentence=f"cp {layout.cp} puts an attention in place that ranks share, which "
            f"{program.words} does not take; use --cp 1, or --program hf",
        )
        return
    heads = model.heads // layout.tp
    if heads % layout.cp:
        yield Problem(
            reason="cp does not divide the heads of a Hugging Face model",
            sentence=f"cp {layout.cp} shares the {heads} heads of a rank around attention, and "
            "does not divide them; use another --cp, or --program reference",
        )
    if model.sliding_window:
        yield Problem(
            reason="context parallelism of a Hugging Face model with sliding windows",
            sentence=f"cp {layout.cp} needs full attention in every layer, and {model.name} has "
            f"windows of {model.sliding_window} tokens; use --cp 1",
        )
