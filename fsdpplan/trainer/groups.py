"""Parameter groups: `PATTERN:lr=0.1,weight_decay=0`, settings of parameters by their names.

A pattern is a shell's, over the names that checkpoints publish (`layers.3.attention.wq.weight`),
which no layout changes. Of several groups the first that matches counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from .errors import TrainerError
from .shared import trainer_options


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGroup:
    """Settings of the parameters that a pattern matches."""

    pattern: str
    lr: float = 1.0
    """Times the learning rate of all; 0: they stay as they are."""
    weight_decay: float | None = None
    """None: as without a group."""

    def __str__(self) -> str:
        decay = [] if self.weight_decay is None else [f"weight_decay={self.weight_decay:g}"]
        return f"{self.pattern}:" + ",".join([f"lr={self.lr:g}", *decay])


def parse_group(text: str) -> ParameterGroup:
    """The group that `text` says. Raises ValueError."""
    pattern, settings = trainer_options.group_settings(text)
    return ParameterGroup(pattern=pattern, **settings)


def group_of(name: str, groups: Sequence[ParameterGroup]) -> ParameterGroup | None:
    """The first of `groups` that has the parameter; None: none has."""
    return next((group for group in groups if fnmatchcase(name, group.pattern)), None)


def require_all_used(groups: Sequence[ParameterGroup], names: Iterable[str]) -> None:
    """Raise TrainerError for a group that is the first of no parameter: it would do nothing."""
    names = list(names)
    used = {id(group_of(name, groups)) for name in names}
    for group in groups:
        if id(group) in used:
            continue
        if any(fnmatchcase(name, group.pattern) for name in names):
            raise TrainerError(
                f"--param-group {str(group)!r} comes to nothing: groups before it have all that it "
                "matches; put it before them"
            )
        raise TrainerError(
            f"--param-group {str(group)!r} matches no parameter; name some of the model's, "
            f"{', '.join(_kinds(names))} (a star stands for anything, dots too)"
        )


def _kinds(names: Iterable[str]) -> list[str]:
    """Names, each block's once: `layers.*.attention.wq.weight`."""
    parts = (name.split(".") for name in names)
    return list(
        dict.fromkeys(".".join("*" if part.isdigit() else part for part in each) for each in parts)
    )
