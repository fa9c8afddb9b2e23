"""Text of profiles: what is written is read back as one line."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fsdpplan.files.profiles.text import number_line, quoted


@given(st.text(max_size=2500))
@example("\ud800")
def test_quoted_text_is_one_line_of_toml(text: str) -> None:
    written = quoted(text)
    assert len(written.splitlines()) == 1
    (read,) = tomllib.loads(f"a = {written}").values()
    assert len(read) <= 2000
    assert read.isprintable()
    if text.isprintable() and len(text) <= 2000:
        assert read == text


@pytest.mark.parametrize("value", [1, 0.25, 5e10, True, "ll128", ("mlx5_0", "mlx5_1")])
def test_a_number_stands_beside_its_source(value: object) -> None:
    read = tomllib.loads(number_line("key", value, "us"))
    expected = list(value) if isinstance(value, tuple) else value
    assert read == {"key": {"value": expected, "source": "us"}}
