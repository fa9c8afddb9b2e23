"""Small invariants shared by the spec values. Each raises `SpecError` naming the field."""

from __future__ import annotations

import math
from collections.abc import Collection

from fsdpplan.errors import SpecError


def require_positive_int(**fields: int) -> None:
    """Raise unless every field is an int >= 1 (bool is not an int here)."""
    for name, value in fields.items():
        if type(value) is int and value > 0:  # nearly always, and a search makes many
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SpecError(f"{name} must be a whole number of at least 1, not {value!r}")


def require_positive(**fields: float) -> None:
    """Raise unless every field is a finite number > 0."""
    for name, value in fields.items():
        if isinstance(value, bool) or not math.isfinite(value) or value <= 0:
            raise SpecError(f"{name} must be a finite number above 0, not {value!r}")


def require_fraction(**fields: float) -> None:
    """Raise unless every field is in [0, 1]."""
    for name, value in fields.items():
        if isinstance(value, bool) or not math.isfinite(value) or not 0 <= value <= 1:
            raise SpecError(f"{name} must lie between 0 and 1, not {value!r}")


def require_choice(name: str, value: object, choices: Collection[object]) -> None:
    """Raise unless `value` is one of `choices`."""
    if value not in choices:
        raise SpecError(f"{name} must be one of {', '.join(map(str, choices))}, not {value!r}")
