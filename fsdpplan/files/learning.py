"""The fitted widths of learning, with where they come from: learning.toml beside this."""

from __future__ import annotations

import tomllib
from functools import lru_cache
from pathlib import Path

from fsdpplan.files.writing import write_text_atomically
from fsdpplan.spec.ledger import Widths

_FILE = Path(__file__).with_name("learning.toml")
_HEAD = """# How far one measured run speaks for another: the prior of log(measured / predicted).
# Fitted by `python -m fsdpplan.validate.learn.fit_widths` (part of `make fit`); the meaning of each
# number stands in fsdpplan/spec/ledger.py.
"""


@lru_cache(maxsize=1)
def load_widths() -> Widths:
    """Those that were fitted."""
    return Widths(**tomllib.loads(_FILE.read_text(encoding="utf-8"))["widths"])


def write_widths(widths: dict[str, float], *, source: str, date: str | None) -> None:
    """Keep newly fitted ones, in place of those before; a checkout is written to.

    `date`: None keeps the one that stands there.
    """
    kept = tomllib.loads(_FILE.read_text(encoding="utf-8"))["date"]
    lines = "".join(f"{name} = {value:.4g}\n" for name, value in widths.items())
    text = f'{_HEAD}source = "{source}"\ndate = "{date or kept}"\n\n[widths]\n{lines}'
    write_text_atomically(_FILE, text, advice="a checkout's files are written to")
