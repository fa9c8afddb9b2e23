from __future__ import annotations

import shlex
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.emit.safe_text import comment, literal_word, paragraph, sbatch_value, shell_word
from fsdpplan.errors import SpecError

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
PRINTABLE = st.text(
    st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]), min_size=1, max_size=40
)


@given(st.lists(TEXT, min_size=1, max_size=20))
def test_bash_gives_back_every_word_as_it_went_in(words: list[str]) -> None:
    script = "printf '%s\\0' " + " ".join(shell_word(word) for word in words)
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=True)
    assert done.stdout.decode().split("\0")[:-1] == words


@given(TEXT)
def test_a_word_is_printable_and_reads_back(text: str) -> None:
    word = shell_word(text)
    assert word.isprintable()
    assert literal_word(word) == text


def test_escapes_mean_the_same_in_every_locale() -> None:
    word = shell_word("\u2028\u202e\x85a")
    for locale in ("C", "C.UTF-8"):
        said = subprocess.run(
            ["bash", "-c", f"printf %s {word}"],
            env={"LC_ALL": locale},
            capture_output=True,
            check=True,
        )
        assert said.stdout.decode() == "\u2028\u202e\x85a"


@given(PRINTABLE)
def test_an_sbatch_value_is_one_word_to_the_reader_of_slurm(text: str) -> None:
    assert read_as_sbatch_does(sbatch_value("job_name", text)) == text


@pytest.mark.parametrize("text", ["a\nb", "a\rb", "\x1b[2J", "a\0b", "a\u2028b", ""])
def test_what_no_sbatch_line_can_hold_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="job_name"):
        sbatch_value("job_name", text)


@pytest.mark.parametrize("text", ["a\0b", "\udcff"])
def test_what_no_program_can_be_given_is_refused(text: str) -> None:
    with pytest.raises(SpecError):
        shell_word(text)


@given(TEXT)
def test_a_comment_is_one_line(text: str) -> None:
    assert len(comment(text).splitlines()) == 1


def test_a_paragraph_keeps_the_width_of_the_script() -> None:
    lines = paragraph("words " * 100)
    assert all(line.startswith("# ") and len(line) <= 100 for line in lines)


def test_plain_words_stay_as_they_are() -> None:
    assert shell_word("--steps=20") == "--steps=20"
    assert sbatch_value("output", "logs/run-%j.out") == "logs/run-%j.out"
    assert shlex.split(shell_word("it's")) == ["it's"]


def read_as_sbatch_does(line: str) -> str:
    """One argument of an #SBATCH line, by the rules that sbatch's own reader follows: two kinds of
    quotes, a backslash that escapes anywhere, a comment at a bare #."""
    read, quote, escaped = "", "", False
    for character in line:
        if escaped:
            read, escaped = read + character, False
        elif character == "\\":
            escaped = True
        elif quote:
            quote, read = ("", read) if character == quote else (quote, read + character)
        elif character in "\"'":
            quote = character
        elif character == "#" or character.isspace():
            break
        else:
            read += character
    return read
