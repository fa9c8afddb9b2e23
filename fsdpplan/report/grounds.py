"""Grounds: what to watch, what was taken for granted, and what the numbers rest on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fsdpplan.report.values import Block, Note, Notes, Section, Table, Words, sentence
from fsdpplan.search.advice.field_rules import RULES
from fsdpplan.search.advice.words import EVIDENCE
from fsdpplan.spec.plan import BrokenRule, Plan

_HARDWARE = ("cluster.device.", "cluster.levels.", "cluster.network.")
"""Beginnings of the names of a profile's numbers, of which each has its source."""


def watch_section(plan: Plan) -> Section:
    """Rules of the field that the layout breaks, the dearest first, and warnings."""
    notes = (
        *(_rule_note(one) for one in plan.rules),
        *(Note(text=one, tone="watch") for one in plan.warnings),
    )
    held = len(RULES) - len(plan.rules)
    kept = "all" if held == len(RULES) else f"{held}"
    words = f"Looked at {len(RULES)} rules of those who train large models; {kept} are kept."
    if not notes:
        return Section(
            name="watch",
            title="What to watch",
            blocks=(Words((f"{words} Nothing else is warned of.",)),),
        )
    return Section(name="watch", title="What to watch", says=words, blocks=(Notes(notes),))


def _rule_note(rule: BrokenRule) -> Note:
    typed = f" Type: {rule.change}." if rule.change and rule.change not in rule.advice else ""
    return Note(
        title=_title(rule.rule),
        text=sentence(rule.says),
        advice=f"{sentence(rule.advice)}{typed}" if rule.advice else "",
        source=f"Rule: {rule.source}" if rule.source else "",
        tone="bad" if rule.risks_run else "watch",
    )


def _title(name: str) -> str:
    """`few-micro-batches` in words."""
    return name.replace("-", " ").replace("micro batch", "micro-batch").capitalize() + "."


def grounds_section(plan: Plan) -> Section:
    """What was not said and is taken instead, and where each input came from."""
    evidence = EVIDENCE[plan.cluster.device.evidence]
    blocks: list[Block] = []
    if plan.assumptions:
        blocks.append(Notes(tuple(Note(text=one) for one in plan.assumptions)))
    said = [(name, of) for name, of in plan.sources if not name.startswith(_HARDWARE)]
    hardware = [(name, of) for name, of in plan.sources if name.startswith(_HARDWARE)]
    if said:
        blocks.append(_sources("Inputs, and who said them", said, plan))
    if hardware:
        blocks.append(_sources("Numbers of the hardware, and what each rests on", hardware, plan))
    return Section(
        name="grounds",
        title="What it rests on",
        says=f"The hardware's numbers are {evidence}. Where something was not said, this was "
        "assumed."
        if plan.assumptions
        else f"The hardware's numbers are {evidence}.",
        blocks=tuple(blocks),
    )


def _sources(caption: str, sources: Iterable[tuple[str, str]], plan: Plan) -> Table:
    """Numbers of one source share a row."""
    by_source: dict[str, list[str]] = {}
    for name, of in sources:
        by_source.setdefault(of, []).append(_named(name, plan))
    return Table(
        caption=caption,
        columns=("what", "from"),
        rows=tuple((", ".join(names), of) for of, names in by_source.items()),
        folded=True,
    )


def _named(name: str, plan: Plan) -> str:
    """An input in words, with its value where the plan has it by that name."""
    words = name
    for begins in ("cluster.device.fit.", "cluster.device.error.", *_HARDWARE, "training."):
        if words.startswith(begins):
            words = words.removeprefix(begins)
            if begins == "cluster.device.error.":
                words = f"error of {words}"
            break
    value = _value(name, plan)
    return words.replace("_", " ") + ("" if value is None else f" {value}")


_SHOWN: Mapping[type, str] = {int: ",", float: ".6g", str: ""}


def _value(name: str, plan: Plan) -> str | None:
    found: object = plan
    for part in name.split("."):
        if isinstance(found, tuple):
            found = next((one for one in found if getattr(one, "name", None) == part), None)
        else:
            found = getattr(found, part, None)
    if isinstance(found, bool):
        return "yes" if found else "no"
    shown = _SHOWN.get(type(found))
    return None if shown is None else format(found, shown)
