"""`fsdpplan`, and `python -m fsdpplan`."""

from __future__ import annotations

from fsdpplan.cli import process

TYPE_CHECKING = False  # typing takes longer to import than all else before signals are heard
if TYPE_CHECKING:
    from typing import NoReturn


def main() -> NoReturn:
    """The console script: ready for signals before it imports what takes a third of a second."""
    process.begin()
    from fsdpplan.cli import app

    app.main()


if __name__ == "__main__":
    main()
