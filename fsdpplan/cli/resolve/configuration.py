"""A configuration of another tool, laid under the options that were typed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fsdpplan.cli.options.expand import with_texts
from fsdpplan.errors import SpecError
from fsdpplan.files.configurations.configuration import Configuration
from fsdpplan.files.configurations.read import read_configuration
from fsdpplan.files.table import path_text

GROUPS = ("model", "cluster", "training", "layout")


@dataclass(frozen=True, slots=True, kw_only=True)
class Under:
    """A question with what a file says of it."""

    file: str
    configuration: Configuration
    question: dict[str, Any]
    taken: Mapping[str, str]
    """Options that the file gave."""
    typed: tuple[str, ...]
    """Options of the file in whose place others were typed."""


def laid_under(file: Path, question: Mapping[str, Any]) -> Under:
    """`question` (groups of options by name) where what was not typed is as the file has it.

    Raises SpecError where the file does not go together with itself or with what was typed.
    """
    found = read_configuration(file)
    where = path_text(file)
    texts = dict(found.options)
    if _is_named(question["model"]):
        texts.pop("model", None)
    if question["training"].runtime is not None or question["training"].program is not None:
        texts.pop("runtime", None)
        texts.pop("program", None)
    typed = tuple(
        name
        for name in texts
        for group in GROUPS
        if getattr(question[group], name, None) is not None
    )
    taken = {name: text for name, text in texts.items() if name not in typed}
    groups = {name: with_texts(question[name], taken) for name in GROUPS}
    batch = _global_batch(groups, found.accumulation, where)
    if batch is not None:
        taken["global_batch"] = str(batch)
        groups["training"] = with_texts(groups["training"], {"global_batch": str(batch)})
    return Under(
        file=where,
        configuration=found,
        question={**question, **groups},
        taken=taken,
        typed=typed,
    )


def _is_named(model: Any) -> bool:
    return any(getattr(model, one.name) is not None for one in fields(model))


def _global_batch(groups: Mapping[str, Any], accumulation: int | None, where: str) -> int | None:
    """Sequences of a step, by micro-batch, accumulation and ranks; None: said, or not to be told.

    Raises SpecError where the file says another number itself.
    """
    layout, gpus = groups["layout"], groups["cluster"].gpus
    said = groups["training"].global_batch
    if accumulation is None or layout.micro_batch is None:
        return None
    if gpus is None:
        if said is not None:
            return None
        raise SpecError(
            f"{where} says a batch for each GPU and not how many there are: type --gpus"
        )
    split = (layout.tp or 1) * (layout.cp or 1) * (layout.pp or 1)
    ranks, rest = divmod(gpus, split)
    if rest or not ranks:
        raise SpecError(
            f"{where}: tp x cp x pp of {split} does not divide {gpus} GPUs: give --gpus that it "
            "divides, or correct the file"
        )
    batch: int = layout.micro_batch * accumulation * ranks
    if said is not None and said != batch:
        raise SpecError(
            f"{where}: a batch of {said} is not {layout.micro_batch} sequences x {accumulation} "
            f"micro-batches x {ranks} ranks: say by --gpus how many there are, or correct the file"
        )
    return None if said is not None else batch
