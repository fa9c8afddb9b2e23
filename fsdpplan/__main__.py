"""`fsdpplan`, and `python -m fsdpplan`."""

from __future__ import annotations

import os
import sys

from fsdpplan.cli import process

TYPE_CHECKING = False  # typing takes longer to import than all else before signals are heard
if TYPE_CHECKING:
    from typing import NoReturn


def main() -> NoReturn:
    """The console script: ready for signals before it imports what takes a third of a second."""
    process.begin()
    if "_FSDPPLAN_COMPLETE" in os.environ:  # a shell asks, with each press of Tab
        from fsdpplan.cli import complete

        complete.main(sys.argv[1:])
        sys.exit(0)
    from fsdpplan.cli import app

    app.main()


if __name__ == "__main__":
    main()
