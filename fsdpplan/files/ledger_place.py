"""Where the ledger is. Apart from its reading, so that planning without one needs no SQLite."""

from __future__ import annotations

import os
from pathlib import Path

from fsdpplan.errors import SpecError

VARIABLE = "FSDPPLAN_LEDGER"


def ledger_path(given: Path | None = None) -> Path:
    """The file that was given, or `$FSDPPLAN_LEDGER`, or `ledger.sqlite` of the user's state.

    The last follows the XDG base directory specification: `$XDG_STATE_HOME`, by default
    `~/.local/state`.
    """
    named = given or os.environ.get(VARIABLE)
    if named:
        return Path(named)
    state = os.environ.get("XDG_STATE_HOME", "")
    home = Path(state) if os.path.isabs(state) else _home() / ".local" / "state"
    return home / "fsdpplan" / "ledger.sqlite"


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError as error:  # a user without an entry in passwd, as in some containers
        raise SpecError(
            "nobody says where your home folder is, in which the ledger lies: set HOME, or give "
            "--ledger FILE or --no-ledger"
        ) from error
