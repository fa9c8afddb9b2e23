"""No text of others moves a terminal."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.emit.safe_text import harmless, log_line, printable

MOVES = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("plain, tab\tand ünïcode", "plain, tab\tand ünïcode"),
        ("\x1b[31;1mred\x1b[0m", "red"),
        ("\x1b]0;a title\x07text", "text"),
        ("\x1b]8;;http://a\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b]52;c;aGk=\x07", ""),
        ("\x1bP$q\x1b\\\x1b(Bx\x1bc", "x"),
        ("\x9b2Jx\x9d0;t\x9c", "x"),
        (" 10%|#  |\r 50%|## |\r100%|###|\r", "100%|###|"),
        ("bell\x07 nul\0 back\b", r"bell\x07 nul\x00 back\x08"),
        ("\x1b[", r"\x1b["),
        ("a\u202eb", r"a\u202eb"),
    ],
)
def test_a_line_of_a_log(line: str, shown: str) -> None:
    assert log_line(line) == shown


@given(st.text(st.characters(codec="utf-8") | st.sampled_from("\x1b[]P\\;\x07\r\n\x9b\x9c")))
def test_nothing_that_moves_is_left(text: str) -> None:
    for shown in (printable(text), harmless(text), log_line(text)):
        assert not MOVES.search(shown)
    plain = "".join(c for c in text if c.isprintable())
    assert printable(plain) == harmless(plain) == log_line(plain) == plain
