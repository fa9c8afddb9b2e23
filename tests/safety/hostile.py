"""Strings that mean something to whatever reads a script: a shell, sbatch, YAML, Python."""

from __future__ import annotations

from hypothesis import strategies as st

PIECES = (
    *("$(touch owned)", "`touch owned`", "';touch owned;'", '"; touch owned; "', "&& touch owned"),
    *("$HOME", "${IFS}", "$'a'", "~", "*", "?", "!", "|", ">", "<", "&", ";", "(", ")", "[", "{"),
    *("'", '"', "\\", "\\\\", "\\n", "\\x41", "'\"'\"'", "'''", '"""', "\\N{BULLET}", "\\u0041"),
    *("\n", "\r", "\r\n", "\t", "\v", "\f", " ", "\n#SBATCH --nodes=99\n", "\x01", "\x1b[2J"),
    *("\x7f", "\x85", "\u2028", "\u2029", "\u00a0", "\u200b", "\u202e", "\ufeff", "\ufffe"),
    *(
        "#",
        " #",
        "---",
        "...",
        "- a",
        "a: b",
        ": ",
        "? x",
        "&a",
        "*a",
        "|",
        ">-",
        "%YAML",
        "@",
        "=",
    ),
    *("!!python/object/apply:os.system [id]", "<<", "null", "~", "yes", "no", "1e3", "0o7", "1:30"),
    *(
        "2001-01-01",
        "-",
        "--",
        "-rf",
        "--help",
        "-c",
        "%s",
        "%j",
        "%d%n",
        "{{x}}",
        "{}",
        "{0}",
        ",",
    ),
    *("EOF", "FSDPPLAN_PLAN_END", "\nFSDPPLAN_PLAN_END\n", "END", "\u2019", "\u00e9", "\U0001f525"),
    *("\u05d0\u05d1", "\u0065\u0301", "/", "..", "../..", "a=b", "://", "a b", "$", "$$", "#!"),
)
"""Each of them ends a word, a line, a quotation or a document for some reader, or begins one."""

WORDS = st.one_of(
    st.sampled_from(PIECES),
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map("".join),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40),
)
"""Any text that a program can be given."""

LINES = WORDS.filter(lambda text: text.isprintable() and text.strip() != "")
"""Any text that the command line takes as one line."""

NO_TEXT = ("a\0b", "\udcff", "a\ud800")
"""What no program can be given, and what is no Unicode."""
