"""What a check of a plan found, and what of two plans differs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, NotRequired, TypedDict

from fsdpplan.cli.views.render import aligned, blocks, listed, wrapped
from fsdpplan.errors import ErrorJson, GateFailed, error_document
from fsdpplan.files.plans import SCHEMA_VERSION
from fsdpplan.spec.plan import Plan
from fsdpplan.validate.check.conditions import Checked, Compared, Quantity, value_words
from fsdpplan.validate.check.lock import Differs
from fsdpplan.validate.check.quantities import short_names

MOST_NAMED = 3
"""Differences in one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCheck:
    """A plan, and what was found of it."""

    place: str
    plan: Plan
    again: bool
    """Its prediction was made again."""
    quantities: Mapping[str, Quantity]
    """Those to list; empty: none."""
    conditions: tuple[Checked, ...]
    lock: str | None
    """Its file; None: there is none to look at."""
    written: str | None
    """The lock that was written."""
    differs: tuple[Differs, ...] | None
    """From the lock as it was; None: there was none."""

    @property
    def failed(self) -> GateFailed | None:
        """What is not as it should be; None where all is."""
        false = [f"{one.text} is false" for one in self.conditions if not one.holds]
        other = [one for one in self.differs or () if not one.is_unknown]
        if other and self.written is None:
            names = ", ".join(one.name for one in other[:MOST_NAMED])
            more = f" and {len(other) - MOST_NAMED} more" if len(other) > MOST_NAMED else ""
            false.append(f"{names}{more} differ{'' if len(other) > 1 else 's'} from {self.lock}")
        if not false:
            return None
        words = "; ".join(false)
        if other and self.written is None:
            return GateFailed(f"{words}: undo that, or take it with --write-lock")
        return GateFailed(f"{words}: plan again, or ask for less")


def check_screen(answer: PlanCheck, *, width: int) -> str:
    """What `check` prints."""
    plan = answer.plan
    by = "predicted again" if answer.again else "as it is saved"
    what = f"{answer.place}: {plan.model.name} on {plan.cluster.gpus} x {plan.cluster.device.name}"
    return blocks(
        wrapped(f"{what}, {by}", width=width),
        listed("Conditions", map(_condition, answer.conditions), width=width),
        _lock(answer, width),
    )


def _condition(one: Checked) -> str:
    why = "; ".join(filter(None, map(_values, one.compared)))
    return f"{'holds' if one.holds else 'FALSE'}: {one.text}{f' ({why})' if why else ''}"


def _values(one: Compared) -> str:
    return ", ".join(f"{name} {value_words(value, kind)}" for name, value, kind in one.values)


def _lock(answer: PlanCheck, width: int) -> str:
    if answer.lock is None:
        return ""
    done = f"{answer.lock} was written." if answer.written else ""
    if answer.written is None and answer.differs is None:
        done = f"{answer.lock} was not written."
    if answer.differs is None:
        return done
    other = differs_lines([one for one in answer.differs if not one.is_unknown])
    unknown = [one.name for one in answer.differs if one.is_unknown]
    same = f"As locked in {answer.lock}." if not other else ""
    beside = f"Not compared, since one side does not know it: {', '.join(unknown)}."
    return blocks(
        same,
        listed(f"Differs from {answer.lock}", other, width=width),
        wrapped(beside, width=width) if unknown else "",
        done,
    )


def differs_lines(found: Sequence[Differs]) -> list[str]:
    """Each difference as `cluster.gpus: 64 -> 56`; what has another name altogether, such as the
    device, without its numbers."""
    renamed = {one.name.removesuffix(".name") for one in found if one.name.endswith(".name")}
    renamed -= {"cluster"}
    shown, left = list[str](), 0
    for one in found:
        holder = next((each for each in renamed if one.name.startswith(f"{each}.")), None)
        if holder is None or one.name == f"{holder}.name":
            shown.append(_differs(one))
        else:
            left += 1
    more = f"and {left} of its values (--json lists them)" if left == 1 else ""
    more = f"and {left} values of what these name (--json lists them)" if left > 1 else more
    return [*shown, *([more] if more else [])]


def _differs(one: Differs) -> str:
    if one.part == "profiles":
        return f"profile {one.name}: its values are not those of the lock"
    return f"{one.name}: {_plain(one.before)} -> {_plain(one.after)}"


def _plain(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def quantities_screen(answer: PlanCheck, *, width: int) -> str:
    """What `check --list` prints: each quantity by its shortest name."""
    known = {name: answer.quantities[name] for name in short_names(dict(answer.quantities))}
    rows = [
        (name, "not known" if one.value is None else value_words(one.value, one.kind))
        for name, one in known.items()
    ]
    return blocks(
        aligned(rows, align=("left", "left")),
        wrapped(
            "Each value of the plan's JSON has its path, too, such as "
            "estimate.memory.peak_reserved_bytes. Units: 72GiB, 25GB/s, 400Gb/s, 1.5s, 12d, 40%.",
            width=width,
        ),
    )


def check_json(answer: PlanCheck, failed: GateFailed | None) -> str:
    """What `check --json` prints."""
    document: CheckJson = {
        "schema_version": SCHEMA_VERSION,
        "plan": answer.place,
        "predicted_again": answer.again,
        "conditions": [_condition_document(one) for one in answer.conditions],
        "lock": answer.lock,
        "lock_written": answer.written is not None,
        "differences": None if answer.differs is None else differs_document(answer.differs),
    }
    if answer.quantities:
        document["quantities"] = {name: one.value for name, one in answer.quantities.items()}
    if failed is not None:
        document["error"] = error_document(failed)
    return json.dumps(document, indent=2, allow_nan=False)


def _condition_document(one: Checked) -> CheckedJson:
    return {
        "condition": one.text,
        "holds": one.holds,
        "compared": [
            {
                "condition": part.text,
                "holds": part.holds,
                "values": {name: value for name, value, _ in part.values},
            }
            for part in one.compared
        ],
    }


class IsUnknownJson(TypedDict):
    """Beside the fields of a difference."""

    is_unknown: bool
    """One side does not know the value."""


class ConditionJson(TypedDict):
    """A comparison, and whether it holds; null: it could not be decided."""

    condition: str
    holds: bool | None
    values: dict[str, Any]
    """Quantity -> its value in the plan."""


class CheckedJson(TypedDict):
    """A condition as it was typed."""

    condition: str
    holds: bool | None
    compared: list[ConditionJson]


DiffersJson = Annotated[dict[str, Any], Differs, IsUnknownJson]


class CheckJson(TypedDict):
    """What `check --json` prints."""

    schema_version: int
    plan: str
    predicted_again: bool
    conditions: list[CheckedJson]
    lock: str | None
    """Its file; null: there is none to look at."""
    lock_written: bool
    differences: list[DiffersJson] | None
    """From the lock as it was; null: there was none."""
    quantities: NotRequired[dict[str, Any]]
    """With --list: name -> value."""
    error: NotRequired[ErrorJson]
    """Where the exit code is not 0."""


def differs_document(found: Sequence[Differs]) -> list[dict[str, Any]]:
    """Differences as JSON has them."""
    return [asdict(one) | {"is_unknown": one.is_unknown} for one in found]
