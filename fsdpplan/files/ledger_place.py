"""Where the ledger is. Apart from its reading, so that planning without one needs no SQLite."""

from __future__ import annotations

import os
from pathlib import Path

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
    home = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    return home / "fsdpplan" / "ledger.sqlite"
