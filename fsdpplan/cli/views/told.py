"""What the program says of itself on stderr: the one place where such a sentence is printed.

On a terminal it breaks at words, as wide as the screens of the commands. A command to type stays in
one piece, on a line that the terminal itself breaks where it is longer: what it shows in two rows
is copied as one. In a pipe or a file a sentence is one line, for grep.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap

from fsdpplan.terminal import printable

PROGRAM = "fsdpplan"
MOST_COLUMNS = 80
LEAST_COLUMNS = 40
THEN = "  "
"""Before the lines that go on."""

_PROGRAMS = "fsdpplan|python3?|pip|torchrun|sbatch|salloc|srun|kubectl|nvidia-smi|apt-get"
_TOGETHER = re.compile(
    r"`[^`]*`"  # what is marked as code
    # a command: the name of a program, a word that is no other word's end, its options
    rf"|\b(?:{_PROGRAMS}) [-a-z]+(?: [A-Z]+\b)?(?: -[-\w]+(?:[= ](?:'[^']*'|[^\s,;:()]+))?)+"
    rf"|\b(?:{_PROGRAMS}) (?:-[-\w]+ )*[-a-z]+"
    r"|--?[a-z][-\w]*[= ](?:'[^']*'|[^\s,;:()]+)"  # an option and its value
    r"|'[^']*'"  # a name in quotes
)
_JOINT = "\u00a0"
"""A space at which no line breaks; none is in what is said, which was made printable before."""


def tell(sentence: str) -> None:
    """Say `sentence` on stderr, with the program's name before it."""
    text = printable(f"{PROGRAM}: {sentence}")
    columns = _columns()
    if columns is not None:
        text = "\n".join(broken(line, columns) for line in text.splitlines())
    print(text, file=sys.stderr, flush=True)


def broken(text: str, columns: int) -> str:
    """`text` in lines of `columns`; what is to be typed stays whole, and then may be longer."""
    whole = _TOGETHER.sub(lambda found: found[0].replace(" ", _JOINT), text)
    lines = textwrap.wrap(
        whole,
        width=columns,
        subsequent_indent=THEN,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines).replace(_JOINT, " ")


def _columns() -> int | None:
    """How wide to write on stderr; None where it is no terminal."""
    try:
        if not sys.stderr.isatty():
            return None
        terminal = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):  # nobody says how wide it is
        return None
    return min(MOST_COLUMNS, max(LEAST_COLUMNS, terminal))
