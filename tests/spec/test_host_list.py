"""Host lists: what Slurm writes is expanded, and names are compressed into what it reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.errors import SpecError
from fsdpplan.spec.nodes import compress_host_list, expand_host_list


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[01-04,7],m3", ["n01", "n02", "n03", "n04", "n7", "m3"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[9-10]", ["n9", "n10"]),
        ("r[0-1]c[2,4]-ib", ["r0c2-ib", "r0c4-ib", "r1c2-ib", "r1c4-ib"]),
        ("gpu-st-p5-[1-2].cluster", ["gpu-st-p5-1.cluster", "gpu-st-p5-2.cluster"]),
        ("a,a,b", ["a", "b"]),
    ],
)
def test_a_list_names_its_nodes(text: str, names: list[str]) -> None:
    assert list(expand_host_list(text)) == names


@pytest.mark.parametrize(
    "text",
    [
        *("", ",", "a,", "-x", "a b", "a;b", "é1", "$(id)"),
        *("n[", "n[]", "n[1-]", "n[a]", "n[1,2", "n[3-1]"),
        *("n[1-9999999]", "n[0-99999][0-99999]", "n[" + "9" * 5000 + "]"),
    ],
)
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(SpecError, match=r"type one such as n\[01-04,7\],m3"):
        expand_host_list(text)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["n1"], "n1"),
        (["n04", "n02", "n03", "m3", "n7"], "m3,n[02-04,7]"),
        (["n9", "n10", "n11"], "n[9-11]"),
        (["n1", "n01", "n2"], "n[1,01,2]"),
        (["x", "x1"], "x,x1"),
        (["r1c1", "r1c2", "r2c1"], "r1c[1-2],r2c1"),
        ([], ""),
    ],
)
def test_names_are_compressed_by_their_last_number(names: list[str], text: str) -> None:
    assert compress_host_list(names) == text


_NAMES = st.lists(
    st.from_regex(r"[a-z]{1,3}[0-9]{0,3}(-[a-z]{0,2}[0-9]{0,3})?", fullmatch=True), min_size=1
)


@given(_NAMES)
def test_expanding_what_was_compressed_gives_the_names_back(names: list[str]) -> None:
    text = compress_host_list(names)
    assert set(expand_host_list(text)) == set(names)
    assert compress_host_list(expand_host_list(text)) == text


@given(st.text(st.sampled_from("n1[]-, 0")))
def test_any_text_is_a_list_or_an_error_of_the_user(text: str) -> None:
    try:
        names = expand_host_list(text)
    except SpecError:
        return
    assert names
    assert all(names)
