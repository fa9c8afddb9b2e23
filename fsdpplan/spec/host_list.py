"""Host lists: many node names in one word, as Slurm writes them (`n[01-04,7],m3`).

Source: Flux RFC 29, "Hostlist Format" (leading zeros), and Slurm::Hostlist(3).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import product

from fsdpplan.errors import SpecError

MAX_NODES = 65536
"""More than any machine has: a longer list is a slip."""

_NUMBERS = "[0-9]{1,18}(?:-[0-9]{1,18})?"
_PART = re.compile(rf"(?!-)(?:[A-Za-z0-9_.-]|\[{_NUMBERS}(?:,{_NUMBERS})*\])+(?:,|$)")
_PIECE = re.compile(r"\[([^\]]*)\]|([^\[]+)")


def expand_host_list(text: str) -> tuple[str, ...]:
    """The names in `text`, in its order, each once. Raises SpecError where it is no host list.

    Numbers keep the width of a range's first: `n[08-10]` is n08, n09, n10.
    """
    names: dict[str, None] = {}
    for part in _parts(text):
        pieces = [_choices(text, match) for match in _PIECE.finditer(part)]
        count = 1
        for choices in pieces:
            count *= len(choices)
        if count + len(names) > MAX_NODES:
            raise _wrong(text, f"it names more than {MAX_NODES} nodes")
        names |= dict.fromkeys("".join(chosen) for chosen in product(*pieces))
    return tuple(names)


def _parts(text: str) -> Iterator[str]:
    """What stands between the commas that are not in brackets."""
    left, end = text.strip(), 0
    while True:
        match = _PART.match(left, end)
        if match is None:
            raise _wrong(text, f"{left[end : end + 40]!r} is no name of a node")
        yield match[0].removesuffix(",")
        end = match.end()
        if not match[0].endswith(","):
            return


def _choices(text: str, piece: re.Match[str]) -> list[str]:
    """What one bracket or one plain piece of a name may be."""
    if piece[2] is not None:
        return [piece[2]]
    choices: list[str] = []
    for numbers in piece[1].split(","):
        low, dash, high = numbers.partition("-")
        first, last = int(low), int(high if dash else low)
        if last < first:
            raise _wrong(text, f"the range {numbers} runs backwards")
        if len(choices) + last - first >= MAX_NODES:
            raise _wrong(text, f"it names more than {MAX_NODES} nodes")
        choices += [str(number).zfill(len(low)) for number in range(first, last + 1)]
    return choices


def _wrong(text: str, why: str) -> SpecError:
    shown = text if len(text) <= 60 else text[:57] + "..."
    return SpecError(f"{shown!r} is no list of nodes: {why}; type one such as n[01-04,7],m3")


def compress_host_list(names: Iterable[str]) -> str:
    """The shortest list of `names`, sorted; `expand_host_list` gives them back.

    The last number of a name becomes the bracket; numbers that count up with the same width become
    a range.
    """
    plain: list[str] = []
    groups: dict[tuple[str, str], list[str]] = {}
    for name in sorted(set(names)):
        match = re.fullmatch(r"(.*?)([0-9]{1,18})([^0-9]*)", name)
        if match is None:
            plain.append(name)
        else:
            groups.setdefault((match[1], match[3]), []).append(match[2])
    numbered = [f"{start}{_bracket(numbers)}{end}" for (start, end), numbers in groups.items()]
    return ",".join([*plain, *numbered])


def _bracket(numbers: list[str]) -> str:
    """`[01-04,7]`, or the number alone where there is one."""
    if len(numbers) == 1:
        return numbers[0]
    runs: list[list[str]] = []
    for number in sorted(numbers, key=lambda text: (int(text), len(text))):
        if runs and number == str(int(runs[-1][-1]) + 1).zfill(len(runs[-1][0])):
            runs[-1].append(number)
        else:
            runs.append([number])
    return "[" + ",".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) + "]"
