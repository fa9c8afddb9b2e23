from __future__ import annotations

import json
import math
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fsdpplan.emit.yaml_text import yaml_text
from fsdpplan.errors import SpecError

TRAPS = (
    "", " ", "~", "=", "<<", "-", "--", "---", "...", "?", ":", "!", "&a", "*a", "|", ">", "%", "@",
    "`", "#", "'", '"', "{}", "[]", ",", "a: b", "a #b", "a:", ":a", "- a", "yes", "No", "ON",
    "off", "y", "N", "true", "False", "null", "NULL", "1", "1e3", "1.5e+3", "0o7", "007", "0x1f", 
    "0b1", "1_000", "1:30", "1:30:00", ".5", "5.", ".inf", "-.INF", ".nan", "2026-01-02", "+1",
    "2026-01-02T03:04:05Z", "\x85", "\u2028", "\u2029", "\ufeff", "\xa0", "\x00", "\x7f", "\t",
    "a\tb", "\r\n", "\n", "a\n", "a\n\n", "\na", "a\nb", "a\nb\n", " a\nb", "a\n b\n\n c", "a \nb ",
    "a\n\u2028b", "a\r\nb", "a\n ", "\ta\nb", "a\n#b\n---\n", "😀", "a\n😀\n", "é", "\\", "\\n",
)  # fmt: skip

TEXT = st.one_of(
    st.sampled_from(TRAPS),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.text("ab \n\t#:-'\"\\1e.", max_size=12),
)
SCALARS = st.one_of(
    TEXT,
    st.integers(-(10**20), 10**20),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
    st.none(),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.parametrize("text", TRAPS)
def test_a_string_that_looks_like_something_else_stays_a_string(text: str) -> None:
    for value in (text, [text], {text: text}, {"a": [{"b": text}]}):
        assert yaml.safe_load(yaml_text(value)) == value


@settings(deadline=None)
@given(VALUES)
@example({"a": {}, "b": [], "c": [[], [{}], [[1]]]})
@example({"k" * 2000: [{"a\n" * 99: "a b " * 99}]})
def test_what_is_written_is_read_back(value: Any) -> None:
    assert _typed(yaml.safe_load(yaml_text(value))) == _typed(value)


def test_people_can_read_it() -> None:
    value = {
        "kind": "Job",
        "image": "nvcr.io/nvidia/pytorch:25.08-py3",
        "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "no"}],
        "args": ["bash", "-c", "set -e\nexec train\n"],
        "empty": {},
        "rate": 1e22,
    }
    assert yaml_text(value) == (
        "kind: Job\n"
        "image: nvcr.io/nvidia/pytorch:25.08-py3\n"
        "env:\n"
        "  - name: A\n"
        '    value: "1"\n'
        "  - name: B\n"
        '    value: "no"\n'
        "args:\n"
        "  - bash\n"
        '  - "-c"\n'
        "  - |\n"
        "    set -e\n"
        "    exec train\n"
        "empty: {}\n"
        "rate: 1.0e+22\n"
    )


@pytest.mark.parametrize("hidden", ["\xa0", "\u202e", "\u200b", "\ufeff", "\U000e0001"])
def test_nobody_is_shown_another_text_than_programs(hidden: str) -> None:
    for value in (f"a{hidden}b", f"é\n{hidden}b\n"):
        assert hidden not in yaml_text({"a": value, value: "é"})
    assert "é" in yaml_text({"a": "é", "b": hidden})


def test_what_occurs_twice_is_written_twice() -> None:
    labels = {"a": "b"}
    assert yaml_text([labels, labels]) == "- a: b\n- a: b\n"


@pytest.mark.parametrize("value", [math.inf, math.nan, "\udc80", {"\udc80": 1}])
def test_what_yaml_cannot_hold_is_refused(value: Any) -> None:
    with pytest.raises(SpecError):
        yaml_text({"a": value})


def _typed(value: Any) -> str:
    """1 and 1.0 and True are equal in Python."""
    return json.dumps(value)
