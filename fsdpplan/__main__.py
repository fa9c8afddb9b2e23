"""`fsdpplan`, and `python -m fsdpplan`."""

from __future__ import annotations

from typing import NoReturn

from fsdpplan.cli import process


def main() -> NoReturn:
    """The console script: ready for signals before it imports what takes a third of a second."""
    process.begin()
    from fsdpplan.cli import app

    app.main()


if __name__ == "__main__":
    main()
