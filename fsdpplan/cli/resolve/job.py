"""The job that options describe, and the saved plan that it is of."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from dataclasses import fields, replace
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from typing import Any

from fsdpplan.cli.options.job import (
    ContainerOptions,
    JobOptions,
    PodOptions,
    ProgramOptions,
    SurvivalOptions,
)
from fsdpplan.cost.estimate import unbuilt_words
from fsdpplan.emit.container import Container
from fsdpplan.emit.job import Job, UserProgram
from fsdpplan.emit.pods import Pods
from fsdpplan.emit.slurm.survival import Survival
from fsdpplan.emit.trainer_program import (
    DASHBOARDS,
    Trainer,
    is_fine_tuning,
    peak_learning_rate,
    require_meaning,
)
from fsdpplan.errors import SpecError
from fsdpplan.files.huggingface.chats import require_chats
from fsdpplan.files.huggingface.config import read_hf_config
from fsdpplan.files.plans import plan_json
from fsdpplan.files.training_data import counted_data
from fsdpplan.run.plans import read_plan
from fsdpplan.search.advice.field_rules import broken_rules
from fsdpplan.search.pins import fine_tuning_batch
from fsdpplan.search.rules.program import optimizer_problem
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import Plan, assumed
from fsdpplan.spec.trainer_options import data_share
from fsdpplan.spec.training import program_named
from fsdpplan.topology.probe import lacking_packages
from fsdpplan.units import format_count

MOST_TIMES_USUAL = 4
"""A larger batch of a fine-tuning is asked about, where the data is elsewhere; chosen here."""


def ranked(path: str, rank: int | None, *, own_program: bool) -> Plan:
    """The plan in a file, with another layout of its list where `rank` asks for one."""
    plan = read_plan(path)
    if rank is not None:
        plan = _with_rank(plan, rank, path)
    program = plan.training.program
    if not plan.estimate.runnable and not own_program and program_named(program).is_target:
        raise SpecError(
            f"{path} is for {program_named(program).words}, which fsdpplan's own trainer is not: "
            f"type fsdpplan emit-launch --target {program}, or plan again without --program"
        )
    lacking = unbuilt_words(model=plan.model, seq_len=plan.training.seq_len)
    if lacking and not own_program:
        raise SpecError(
            f"fsdpplan's own trainer cannot build {lacking}, which {path} plans for "
            f"{plan.model.name}: give a program of yours by fsdpplan emit-launch --script train.py"
        )
    if not own_program and (unsplit := optimizer_problem(plan.case)):
        raise SpecError(f"{path}: {unsplit}")
    if not plan.estimate.runnable and not own_program:
        raise SpecError(
            f"fsdpplan's own trainer is FSDP2's and cannot run {path}, which is for "
            f"{plan.training.traits.words}: give a program of yours with --script, or plan again "
            "with --runtime fsdp2"
        )
    return plan


def _with_rank(plan: Plan, rank: int, path: str) -> Plan:
    chosen = next((line for line in plan.alternatives if line.rank == rank), None)
    if chosen is None:
        raise SpecError(
            f"{path} has no rank {rank}: type --rank with one from 1 to {len(plan.alternatives)}"
        )
    return replace(
        plan,
        layout=chosen.layout,
        estimate=chosen.estimate,
        rules=broken_rules(replace(plan.case, layout=chosen.layout), chosen.estimate),
        assumptions=assumed(plan.assumptions, model=plan.model, layout=chosen.layout),
    )


def require_its_weights(plan: Plan, job: Job) -> None:
    """Raise SpecError where `--init-from` has another model than the plan's; a folder that is not
    on this host is looked at when the job begins."""
    begins = job.program.init_from if isinstance(job.program, Trainer) else None
    if begins is None or not (Path(begins) / "config.json").is_file():
        return
    published = read_hf_config(begins)
    found = published.model
    if published.dropout is not None and plan.training.dropout is None:
        raise SpecError(
            f"{begins} drops {published.dropout} in training, and the plan does not say what is "
            f"dropped: plan again with --config {shlex.quote(begins)}, or with --dropout 0"
        )
    for field in fields(Model):
        theirs, ours = getattr(found, field.name), getattr(plan.model, field.name)
        if theirs != ours and not _tells_nothing(field.name, found, plan):
            raise SpecError(
                f"{begins} is not the plan's model: its {field.name} is {theirs!r}, the plan's "
                f"{ours!r}; plan again with fsdpplan recommend --config {shlex.quote(begins)}"
            )
    _require_computed(plan, Path(begins))


def _require_computed(plan: Plan, folder: Path) -> None:
    """Raise SpecError where the trainer would refuse the weights in `folder` when the job begins: a
    family that it does not compute exactly, or weights that are quantised. A Python without torch
    leaves it to the job."""
    if find_spec("torch") is None:
        return
    from fsdpplan.trainer.config import parse_plan
    from fsdpplan.trainer.errors import TrainerError
    from fsdpplan.trainer.huggingface.load import require_loadable

    try:
        require_loadable(parse_plan(plan_json(plan)), folder)
    except TrainerError as error:
        raise SpecError(str(error)) from error


def require_its_script(job: Job) -> None:
    """Raise SpecError where the program of the user's own is not where this host would have it. A
    container may hold it, and so may another host a folder that this one has not."""
    if isinstance(job.program, Trainer) or job.container is not None:
        return
    script = Path(job.program.script)
    if script.is_file() or (script.is_absolute() and not script.parent.is_dir()):
        return
    raise SpecError(
        f"--script {job.program.script}: there is no such file here; give the path of the Python "
        "file that every rank runs, such as --script train.py"
    )


def require_its_chats(job: Job) -> None:
    """Raise SpecError where `--sft` has nothing to fine-tune on, as far as this host can tell: no
    chats, no template, or a Python without what tokenizes them."""
    program = job.program
    if not isinstance(program, Trainer) or not program.sft:
        return
    assert program.tokenizer is not None
    own = None if program.chat_template is None else Path(program.chat_template)
    held = [] if program.eval_data is None else [program.eval_data]
    trained = [data_share(source)[0] for source in program.sources]
    for data in (*trained, *(each for each in held if each.endswith(".jsonl"))):
        require_chats(Path(data), Path(program.tokenizer), own)
    if job.python == sys.executable and find_spec("tokenizers") is None:
        raise SpecError(
            "--sft needs the Python package tokenizers, which this Python has not: pip install "
            "tokenizers, or name the job's own by --python"
        )


def steps_sentence(plan: Plan, job: Job) -> str | None:
    """How far the job trains because its plan says so; None where the job says so, or nothing."""
    tokens, steps = plan.training.tokens, plan.training.steps
    if not isinstance(job.program, Trainer) or job.program.steps is not None:
        return None
    if job.program.epochs is not None:
        return None
    if tokens is None or steps is None:
        return None
    return f"trains the plan's {format_count(tokens)} tokens, {steps:,} steps (or give --steps)"


LEAST_EPOCH_STEPS = 10
"""Of a fine-tuning, as the trainer has it; a test compares both."""


def epoch_sentence(plan: Plan, job: Job) -> str | None:
    """How many steps an epoch is, where the data is on this host, and what to type where a
    fine-tuning would have too few; None where there is nothing to say."""
    program = job.program
    if not isinstance(program, Trainer) or not program.sources:
        return None
    tunes = is_fine_tuning(program)
    if not tunes and program.epochs is None:
        return None
    batch, seq_len = plan.training.global_batch, plan.training.seq_len
    found = counted_data(
        [Path(data_share(source)[0]) for source in program.sources],
        seq_len=seq_len,
        chats=bool(program.sft),
        packed=plan.training.packed or bool(program.pack),
        tokenized=program.tokenizer is not None,
    )
    usual = fine_tuning_batch(seq_len=seq_len, gpus=plan.cluster.gpus)
    if found is None:
        if tunes and batch > MOST_TIMES_USUAL * usual:
            return (
                f"the plan has {batch:,} sequences a step, as pre-training does; fine-tunings take "
                f"about {usual}: plan again with fsdpplan recommend --fine-tune"
            )
        return None
    about = "" if found.is_exact else "about "
    steps = found.sequences / batch
    said = f"an epoch is {about}{steps:,.3g} steps of {batch:,} sequences"
    if program.epochs is not None:
        said += f", {program.epochs:g} are {about}{max(1, ceil(program.epochs * steps)):,}"
    said += (
        f", at a learning rate of {peak_learning_rate(program, plan.training):g} (--learning-rate)"
    )
    if tunes and steps < LEAST_EPOCH_STEPS:
        most = max(1, min(usual, found.sequences // (2 * LEAST_EPOCH_STEPS)))
        smaller = 1 << most.bit_length() - 1
        said += (
            f": too few updates to learn from; plan again with fsdpplan recommend --fine-tune "
            f"--global-batch {smaller}"
        )
    return said


def require_its_recipe(plan: Plan, job: Job) -> list[str]:
    """Raise SpecError for what the trainer itself would refuse when the job begins, as far as this
    host shows it: a `--param-group` with none of the model's parameters, an `--export-hf` of what
    nothing would load, and options with which the checkpoint to resume from cannot go on; without
    torch the trainer alone says so. Returns what changes for that one."""
    program = job.program
    if not isinstance(program, Trainer):
        return []
    require_meaning(program, plan.training, plan.model)
    # of epochs the trainer knows the steps, and so the schedule
    resumes = program.epochs is None and _has_checkpoint(program.checkpoint_dir)
    begins_here = program.init_from is None or Path(program.init_from).is_dir()
    publishes = program.export_hf is not None and begins_here
    if not (program.param_group or resumes or publishes) or find_spec("torch") is None:
        return []
    from fsdpplan.trainer.checkpoint.progress import resumed_otherwise
    from fsdpplan.trainer.config import parse_plan
    from fsdpplan.trainer.errors import TrainerError
    from fsdpplan.trainer.huggingface.export import what_to_publish
    from fsdpplan.trainer.options import parse_options

    options, parsed = parse_options(program.words()), parse_plan(plan_json(plan))
    try:
        recipe = options.recipe(parsed)
        if publishes:
            what_to_publish(parsed, options, recipe)
        if options.checkpoint_dir is None or not resumes:
            return []
        return resumed_otherwise(
            options.checkpoint_dir,
            parsed,
            recipe,
            seed=options.seed,
            allowed=options.allow_changes,
        )
    except TrainerError as error:
        raise SpecError(str(error)) from error


def _has_checkpoint(folder: str | None) -> bool:
    """Whether this host sees one that a run would resume from."""
    if folder is None:
        return False
    try:
        return (Path(folder) / "latest").is_file()
    except OSError:
        return False


def require_its_libraries(plan: Plan, job: Job) -> None:
    """Raise SpecError where the Python that was named for the job, or this one, lacks what a
    dashboard needs, or, if it has torch, what the plan's training and its text do; another host's,
    or that of a container, is asked when the job begins."""
    program = job.program
    if not isinstance(program, Trainer) or job.container or job.env_setup:
        return
    boards = [name for name in DASHBOARDS if getattr(program, name) is not None]
    needs = {name: (f"--{name}", f"leave --{name} out") for name in boards}
    needs |= _libraries_of(plan, program)
    if not needs or not os.path.isabs(job.python) or not os.path.exists(job.python):
        return
    lacking = lacking_packages(job.python, ["torch", *needs])
    for name, (what, instead) in needs.items():
        # one without torch is not the job's own
        if name in lacking and (name in boards or "torch" not in lacking):
            raise SpecError(
                f"{what} needs the Python package {name}, which {job.python} does not have: type "
                f"{shlex.quote(job.python)} -m pip install {name}, or {instead}"
            )


def _libraries_of(plan: Plan, program: Trainer) -> dict[str, tuple[str, str]]:
    """Package -> (what needs it, what to do without)."""
    training, needs = plan.training, {}
    if "fp8" in (training.precision, training.later_precision):
        needs["torchao"] = ("precision fp8", "plan again with --precision bf16")
    if training.optimizer == "adamw_8bit":
        needs["torchao"] = ("optimizer adamw_8bit", "plan again with --optimizer adamw")
    if training.powersgd_rank:
        needs["numpy"] = ("gradient_compression powersgd", "plan again without it")
    if program.tokenizer is not None:
        needs["tokenizers"] = ("--tokenizer", "name the job's own Python by --python")
    return needs


def _tells_nothing(name: str, found: Model, plan: Plan) -> bool:
    """Whether a field changes nothing of what sequences of the plan's length come to."""
    if name == "max_positions":
        return found.positions != "learned"
    if name in ("sliding_window", "full_attention_every"):
        windows = (found.sliding_window, plan.model.sliding_window)
        return all(not window or window >= plan.training.seq_len for window in windows)
    return name == "name"


def given(options: Any) -> dict[str, Any]:
    """The fields that were given."""
    pairs = ((field.name, getattr(options, field.name)) for field in fields(options))
    return {name: value for name, value in pairs if value not in (None, ())}


def job_of(
    job: JobOptions,
    trainer: Trainer,
    program: ProgramOptions,
    survival: SurvivalOptions,
    container: ContainerOptions,
) -> Job:
    """The job that the options describe."""
    values = given(job)
    values |= {"survival": survival_of(survival), "container": container_of(container)}
    if program.script is None:
        if program.args is not None:
            raise SpecError("--args are those of a program of yours: give --script train.py too")
        return Job(program=trainer, **values)
    if ours := given(trainer):
        flags = ", ".join("--" + name.replace("_", "-") for name in ours)
        raise SpecError(
            f"{flags} would not reach {program.script}: they are the reference trainer's; "
            "pass them in --args"
        )
    return Job(program=UserProgram(script=program.script, args=program.args or ()), **values)


def survival_of(options: SurvivalOptions) -> Survival:
    """What the options say, with the defaults of what they leave out."""
    return Survival(**given(options))


def container_of(options: ContainerOptions) -> Container | None:
    """The container that the options describe; None without an image."""
    if options.container is None:
        if options.container_mount or options.container_runtime is not None:
            raise SpecError(
                "--container-mount and --container-runtime are of a container: give --container "
                "with its image too"
            )
        return None
    return Container(
        image=options.container,
        mounts=options.container_mount,
        runtime=options.container_runtime or "pyxis",
    )


def pods_of(options: PodOptions) -> Pods:
    """The pods that the options describe."""
    return Pods(**given(options))


def with_this_python(job: Job, *, given: JobOptions) -> Job:
    """`job`, run by the Python that runs this program: it has torch, `python3` on PATH may not.

    Unless a Python was named, lines that set up the environment will put theirs on PATH, or it is
    one in a container.
    """
    if given.python is not None or given.env_setup or job.container is not None:
        return job
    return replace(job, python=sys.executable)


def python_here(job: Job) -> str | None:
    """The Python of the job, if this host has it: not one of a container, nor one that lines which
    set up the environment will put on PATH."""
    return None if job.container or job.env_setup else shutil.which(job.python)
