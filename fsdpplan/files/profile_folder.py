"""Where the hardware profiles lie."""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def profiles_folder() -> Path:
    """Wheels carry the profiles inside the package; a checkout has them beside it."""
    package = Path(__file__).resolve().parent.parent
    packaged = package / "hardware_profiles"
    return packaged if packaged.is_dir() else package.parent / "hardware_profiles"
