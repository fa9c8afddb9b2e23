"""Documents checked by pydantic: one envelope a file kind, with the frozen spec values inside.

Import this module only where a document is read: pydantic costs more than planning does.
Two traps, both seen: a bare `TypeAdapter(dataclass)` drops unknown keys in silence (the envelope's
`forbid` reaches all depths), and only errors that are also ValueError get a field path.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError

from fsdpplan.errors import SpecError, did_you_mean
from fsdpplan.files.table import short
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.ledger import Machines, Observed, Predicted, Workload
from fsdpplan.spec.machine import Machine
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import BrokenRule, Estimate, Failures, RankedLayout, Terms
from fsdpplan.spec.training import Training

Document = TypeVar("Document", bound=BaseModel)


class PlanDocument(BaseModel):
    """A plan on disk, derived totals removed."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    schema_version: Literal[1]
    model: Model
    cluster: Cluster
    training: Training
    layout: Layout
    estimate: Estimate
    alternatives: tuple[RankedLayout, ...]
    sources: dict[str, str]
    assumptions: tuple[str, ...]
    warnings: tuple[str, ...]
    rules: tuple[BrokenRule, ...] = ()
    versions: dict[str, str]
    failures: Failures | None = None
    terms: Terms | None = None


class MachineDocument(BaseModel):
    """One host as it was read, for another host to look at."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    schema_version: Literal[1]
    machine: Machine


class LedgerDocument(BaseModel):
    """What one row of the ledger says beside its time and place."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    job: Workload
    machines: Machines
    predicted: Predicted
    observed: Observed
    versions: dict[str, str]


def validate_plan(values: dict[str, Any]) -> PlanDocument:
    """The plan in `values`. Raises SpecError naming the first wrong field."""
    return _validate(PlanDocument, values)


def validate_machine(values: dict[str, Any]) -> MachineDocument:
    """The machine in `values`. Raises SpecError naming the first wrong field."""
    return _validate(MachineDocument, values)


def validate_ledger(values: dict[str, Any]) -> LedgerDocument:
    """The row in `values`. Raises SpecError naming the first wrong field."""
    return _validate(LedgerDocument, values)


def _validate(kind: type[Document], values: dict[str, Any]) -> Document:
    """The document in `values`.

    It goes through JSON once more because strict pydantic takes lists for tuples only from there.
    """
    try:
        return kind.model_validate_json(json.dumps(values, allow_nan=False))
    except ValidationError as error:
        raise SpecError(_first_problem(error, values, kind)) from error


def _first_problem(error: ValidationError, values: dict[str, Any], kind: type[BaseModel]) -> str:
    """The first problem as one line with the path of its field.

    A field that may be one of several things has a problem for each: they are joined.
    """
    problems = error.errors(include_url=False, include_context=False)
    path = _path(problems[0]["loc"], values)
    match problems[0]["type"]:
        case "missing":
            return f"{path} is missing: add it"
        case "extra_forbidden" | "unexpected_keyword_argument":
            *above, key = problems[0]["loc"]
            return f"unknown key {path}{did_you_mean(str(key), _keys(kind, above))}: remove it"
        case "value_error":
            return f"{path}: {problems[0]['msg'].removeprefix('Value error, ')}"
    same = [problem["msg"] for problem in problems if _path(problem["loc"], values) == path]
    wanted = " or ".join(message.removeprefix("Input should be ") for message in same)
    return f"{path} must be {wanted}, not {short(problems[0]['input'])}"


def _keys(kind: Any, steps: Sequence[int | str]) -> set[str]:
    """The keys of the table at `steps` within a `kind`; none where that is no class of ours."""
    if not isinstance(kind, type):  # tuple[Stage, ...], Stage | None
        return {key for one in get_args(kind) for key in _keys(one, steps)}
    hints = get_type_hints(kind) if is_dataclass(kind) or issubclass(kind, BaseModel) else {}
    if not steps:
        return {*hints} - {"model_config"}
    if not hints or isinstance(steps[0], int):
        return set()
    return _keys(hints.get(str(steps[0])), [step for step in steps[1:] if isinstance(step, str)])


def _path(location: tuple[int | str, ...], values: Any) -> str:
    """The path of a field, without the names that pydantic adds for branches of a union."""
    steps: list[str] = []
    here = values
    for step in location:
        if isinstance(here, dict):
            steps.append(str(step))
            here = here.get(step)
        elif isinstance(here, list) and isinstance(step, int) and step < len(here):
            steps.append(str(step))
            here = here[step]
    return ".".join(steps) or "the document"
