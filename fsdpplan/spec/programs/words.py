"""What a program of its own kind can say of a plan, field by field.

Each such program has a table with every field of Layout and of Training: how it says the field, or
which values it can say and why not the others. What it cannot say is refused: by the search
(`search/rules/program.py`) if the plan is for that program, and by its door, whatever the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields

from fsdpplan.spec.conventions import V_SCHEDULES
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import Case
from fsdpplan.spec.training import Training

"""Schedules with exactly two stages a rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsayable:
    """Something of a plan that a program has no word for."""

    what: str
    """A few words, the same for every plan that has it."""
    words: str
    """The values, and what to use in their place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """What a program says of one field."""

    says: str
    """How it is said, in the program's own names; or what makes it idle."""
    values: tuple[object, ...] | None = None
    """All that can be said; None: any."""
    why: str = ""
    """What stands in the way of another value."""
    instead: str | None = None
    """What to type in place of a value that has no option of its own; None: the field's option."""

    def problem(self, name: str, value: object) -> str | None:
        """The value that cannot be said, and what could be."""
        if self.values is None or value in self.values:
            return None
        flag = "--" + name.replace("_", "-")
        can = self.instead or " or ".join(_flag_value(flag, known) for known in self.values)
        return f"{name} {value} ({self.why}): plan again with {can}"


Words = Mapping[str, Word]
"""Field -> word, for all fields of Layout and Training."""

Problems = Callable[[Case], Iterator[Unsayable]]
"""What of several fields together cannot be said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """All that a program can say."""

    words: Words
    of_question: Problems
    """What cannot be said of the model, the machines and the training, whatever the layout."""
    of_layout: Problems
    """What cannot be said of several fields together, the layout's among them."""

    def of_training(self, training: Training) -> Iterator[Unsayable]:
        """Single fields of the training that cannot be said."""
        return self.of_fields(_values(training))

    def of_fields(self, values: Mapping[str, object]) -> Iterator[Unsayable]:
        """Single fields that cannot be said."""
        for name, value in values.items():
            problem = self.words[name].problem(name, value)
            if problem is not None:
                yield Unsayable(what=f"{name}: {self.words[name].why}", words=problem)

    def problems(self, case: Case) -> Iterator[Unsayable]:
        """All that cannot be said of a plan; single fields first."""
        yield from self.of_fields(_values(case.layout))
        yield from self.of_training(case.training)
        yield from _stage_problems(case.layout)
        yield from self.of_question(case)
        yield from self.of_layout(case)


def _values(noun: Layout | Training) -> dict[str, object]:
    return {name: getattr(noun, name) for name in field_names(type(noun))}


def _stage_problems(layout: Layout) -> Iterator[Unsayable]:
    """Stages that no schedule has: torch's and Megatron's names would hide the difference."""
    virtual, schedule = layout.virtual_stages, layout.schedule
    what = "stages that the schedule has not"
    if schedule in ("none", "gpipe", "1f1b") and virtual > 1:
        words = f"virtual_stages {virtual} with schedule {schedule}: use --virtual-stages 1"
        yield Unsayable(what=what, words=words)
    elif schedule in V_SCHEDULES and virtual != 2:
        words = f"schedule {schedule} with {virtual} stages a rank: use --virtual-stages 2"
        yield Unsayable(what=what, words=words)
    elif schedule not in ("none", "gpipe", "1f1b") and virtual == 1:
        words = f"schedule {schedule} with one stage a rank: use --virtual-stages 2"
        yield Unsayable(what=what, words=words)
    if layout.pp == 1 and layout.stage_blocks:
        yield Unsayable(what=what, words="stage_blocks without a pipeline: use --pp 2")


def split_loss_problems(layout: Layout) -> Iterator[Unsayable]:
    """What a program cannot say whose tensor parallelism always splits the loss."""
    if layout.tp > 1 and not layout.loss_parallel:
        yield Unsayable(
            what="a loss over gathered logits",
            words="a loss over gathered logits with tp (its loss is split): use --loss-parallel",
        )
    if layout.tp == 1 and (layout.sequence_parallel or layout.loss_parallel):
        yield Unsayable(
            what="sequence_parallel or loss_parallel without tp",
            words="sequence_parallel or loss_parallel without tp: leave them out",
        )


def trained_elsewhere(model: Model) -> str:
    """What to do with a model that a program cannot be told of."""
    if model.unlike_reference:
        return "write its own arguments around --target slurm --script"
    return "use --target slurm, whose trainer has them"


def field_names(kind: type[Layout] | type[Training]) -> tuple[str, ...]:
    """Names of the fields that a program must have a word for."""
    return tuple(field.name for field in fields(kind))


def _flag_value(flag: str, value: object) -> str:
    match value:
        case True:
            return flag
        case False:
            return "--no-" + flag.removeprefix("--")
        case ():
            return f"no {flag}"
    return f"{flag} {value}"
