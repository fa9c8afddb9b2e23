"""Text of an option becomes a value, or one sentence that names the flag."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cli.options import synonyms
from fsdpplan.cli.options.parse import (
    Parser,
    choice,
    either,
    fraction,
    line,
    path,
    positive,
    reshard,
    shown,
    size,
    variable,
    whole,
    words,
)
from fsdpplan.errors import SpecError
from fsdpplan.spec.layout import ActivationCheckpointing, Offload, Schedule, Sharding
from fsdpplan.spec.training import Optimizer, Precision

FORMATS = Literal["bf16", "fp32"]
SHARDING = Literal["ddp", "zero1", "zero2", "fsdp"]


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (whole(example=64), "64", 64),
        (whole(example=64, least=0), "0", 0),
        (fraction, "8%", 0.08),
        (fraction, "0.08", 0.08),
        (fraction, "0", 0.0),
        (positive(example="3e-4"), "3e-4", 3e-4),
        (choice(FORMATS), "bf16", "bf16"),
        (choice(FORMATS), "BF16", "bf16"),
        (choice(FORMATS, {"bfloat16": "bf16"}), "bfloat16", "bf16"),
        (choice(SHARDING, synonyms.SHARDING), "zero3", "fsdp"),
        (choice(SHARDING, synonyms.SHARDING), "ZeRO-3", "fsdp"),
        (choice(SHARDING, synonyms.SHARDING), "ZeRO-1", "zero1"),
        (choice(SHARDING, synonyms.SHARDING), "FULL_SHARD", "fsdp"),
        (size(example="4k"), "4096", 4096),
        (size(example="4k"), "128k", 131072),
        (size(example="4k"), "1M", 1048576),
        (reshard, "always", "always"),
        (reshard, "never", "never"),
        (reshard, "True", "always"),
        (reshard, "8", 8),
        (line, "llama 3", "llama 3"),
        (path, "a/b.json", Path("a/b.json")),
        (words, "--lr 1e-4 'a b'", ("--lr", "1e-4", "a b")),
        (words, "", ()),
    ],
)
def test_a_value_is_read(parse: Parser, text: str, value: Any) -> None:
    assert parse(text, name="--x") == value


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (whole(example=64), "0"),
        (whole(example=64), "-1"),
        (whole(example=64), "+1"),
        (whole(example=64), "1.0"),
        (whole(example=64), "1e3"),
        (whole(example=64), "٣"),
        (whole(example=64), "9" * 16),
        (fraction, "100%"),
        (fraction, "-1%"),
        (fraction, "nan"),
        (fraction, "8%%"),
        (positive(example="1"), "inf"),
        (positive(example="1"), "0"),
        (choice(FORMATS), "tf32"),
        (size(example="4k"), "0k"),
        (size(example="4k"), "1.5k"),
        (size(example="4k"), "4g"),
        (size(example="4k"), "k"),
        (reshard, "1"),
        (reshard, "sometimes"),
        (line, " "),
        (line, "a\nb"),
        (line, "a\x1b[2J"),
        (path, ""),
        (path, "a\0b"),
        (words, "'open"),
    ],
)
def test_what_is_no_value_names_the_flag(parse: Parser, text: str) -> None:
    with pytest.raises(SpecError, match=r"^--x: "):
        parse(text, name="--x")


def complaint(parse: Parser, text: str) -> str:
    """What `parse` says of `text`; empty where it is a value."""
    try:
        parse(text, name="--x")
    except SpecError as error:
        return str(error)
    return ""


@given(st.text(max_size=60))
def test_any_text_is_a_value_or_one_printable_line(text: str) -> None:
    for parse in (
        whole(example=1),
        size(example="1k"),
        fraction,
        positive(example="1"),
        choice(FORMATS),
        reshard,
    ):
        assert complaint(parse, text).isprintable()


def test_alternatives_are_read_aloud() -> None:
    assert either(("a", "b", "c")) == "a, b or c"
    assert either(("a",)) == "a"


def test_a_long_text_is_cut() -> None:
    assert len(shown("x" * 10_000)) < 50


def test_a_variable_is_its_name_and_its_value() -> None:
    assert variable("A_1=b = c", name="--env") == ("A_1", "b = c")
    assert variable("A=", name="--env") == ("A", "")


@pytest.mark.parametrize("text", ["NAME", "name", "=x", "A B=x", "1A=x", "A=x\n", ""])
def test_what_is_no_variable_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="--env"):
        variable(text, name="--env")


@pytest.mark.parametrize(
    ("table", "literal"),
    [
        (synonyms.SHARDING, Sharding),
        (synonyms.SCHEDULES, Schedule),
        (synonyms.CHECKPOINTING, ActivationCheckpointing),
        (synonyms.FORMATS, Precision),
        (synonyms.OPTIMIZERS, Optimizer),
        (synonyms.OFFLOAD, Offload),
    ],
)
def test_a_synonym_is_no_word_of_ours_and_means_one(table: dict[str, str], literal: Any) -> None:
    ours = get_args(literal)
    assert not set(table) & set(ours)
    assert set(table.values()) - {synonyms.SELECTIVE} <= set(ours)
