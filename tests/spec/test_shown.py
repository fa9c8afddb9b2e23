"""Tables of values, in text and in HTML."""

from __future__ import annotations

from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.spec.shown import as_html, as_text

WORDS = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=8)


def test_columns_are_aligned_and_words_go_on() -> None:
    rows = [("", "now", "then"), ("step", "1.5 s", "12 s"), ("same", "it does not fit there")]
    assert as_text("Title", rows) == (
        "Title\n          now  then\n  step  1.5 s  12 s\n  same  it does not fit there"
    )


@given(WORDS, st.lists(st.lists(WORDS, min_size=1, max_size=4), max_size=4))
def test_any_text_is_one_cell(title: str, rows: list[list[str]]) -> None:
    table = ElementTree.fromstring(as_html(title, rows))
    assert (table.findtext("caption") or "") == title
    found = [[cell.text or "" for cell in row] for row in table.iter("tr")]
    assert found == rows
    most = max(map(len, rows), default=0)
    for row in table.iter("tr"):
        spans = [int(cell.get("colspan", "1")) for cell in row]
        assert sum(spans) == most or len(spans) == 1
