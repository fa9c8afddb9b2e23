"""Mixtures: each source has its share at any time, in an order of its own."""

from __future__ import annotations

import json
from fractions import Fraction
from itertools import islice, permutations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpplan.trainer.config import parse_plan
from fsdpplan.trainer.errors import TrainerError
from fsdpplan.trainer.text.data import Mixture, data_state, open_data, require_same_data
from fsdpplan.trainer.text.mixture import MOST_PARTS, Order, parts, share_of
from tests.trainer import plans

BYTES = {"vocab": 260}


@settings(max_examples=30)
@given(weights=st.lists(st.integers(1, 30), min_size=1, max_size=6))
def test_no_source_is_ever_one_sequence_off_its_share(weights: list[int]) -> None:
    order = Order(parts([Fraction(weight) for weight in weights]))
    had = [0] * len(weights)
    for n in range(1, 2 * order.round + 1):
        turn = order(n - 1)
        assert turn.number == had[turn.source]
        had[turn.source] += 1
        for source, weight in enumerate(weights):
            assert abs(had[source] - Fraction(n * weight, sum(weights))) < 1
            assert order.had(n, source) == had[source]


def test_weights_are_exact_where_they_are_simple_and_near_where_not() -> None:
    assert parts([Fraction("0.7"), Fraction("0.3")]) == (7, 3)
    assert parts([Fraction(2), Fraction(1), Fraction(1)]) == (2, 1, 1)
    rough = parts([Fraction(1234567), Fraction(7654321), Fraction(13)])
    assert sum(rough) == MOST_PARTS
    for part, weight in zip(rough, (1234567, 7654321, 13), strict=True):
        assert abs(part - MOST_PARTS * weight / 8888901) < 1


def words(letters: str, count: int) -> str:
    return "".join("".join(word) for word in islice(permutations(letters, 3), count))


def sources(folder: Path) -> tuple[str, str]:
    """Two texts that no letter is in both of, and the second no stretch twice."""
    (folder / "web").mkdir()
    (folder / "web" / "a.txt").write_text(words("abcdefghijklm", 260))
    (folder / "code.txt").write_text(words("nopqrstuvwxyz", 130))
    return str(folder / "web"), str(folder / "code.txt")


def mixture(*texts: str, seed: int = 0) -> Mixture:
    plan = parse_plan(plans.plan_text(model=BYTES))
    found = open_data(plan, [share_of(text) for text in texts], seed=seed)
    assert isinstance(found, Mixture)
    return found


def test_each_source_comes_by_its_weight_and_once_an_epoch(tmp_path: Path) -> None:
    web, code = sources(tmp_path)
    found = mixture(f"{web}=0.75", f"{code}=0.25")
    rows = [bytes(found(number)[:20].tolist()).decode() for number in range(400)]
    of_code = [number for number, row in enumerate(rows) if row[0] >= "n"]
    assert len(of_code) == 100
    windows = found.sources[1].windows
    starts = [tuple(found(number).tolist()) for number in of_code]
    assert len(set(starts[:windows])) == windows
    assert sorted(starts[:windows]) == sorted(starts[windows : 2 * windows])
    assert starts[:windows] != starts[windows : 2 * windows]
    assert found.epochs(400) == {web: 300 / found.sources[0].windows, code: 100 / windows}


def test_sources_without_weights_end_their_epochs_together(tmp_path: Path) -> None:
    web, code = sources(tmp_path)
    found = mixture(web, code)
    whole = sum(source.windows for source in found.sources)
    assert list(found.epochs(whole).values()) == [1.0, 1.0]


def test_twins_of_one_length_do_not_go_in_step(tmp_path: Path) -> None:
    web, _ = sources(tmp_path)
    found = mixture(f"{web}=1", f"{web}=1")
    pairs = [(found(2 * n), found(2 * n + 1)) for n in range(20)]
    assert not all(bool((one == other).all()) for one, other in pairs)


def test_a_changed_mixture_is_refused_and_said(tmp_path: Path) -> None:
    web, code = sources(tmp_path)
    before = mixture(f"{web}=0.75", f"{code}=0.25")
    saved = json.loads(json.dumps(data_state(before, packs=False)))
    require_same_data(saved, mixture(f"{web}=3", f"{code}=1"))
    for other in ((f"{web}=0.5", f"{code}=0.5"), (f"{code}=0.25", f"{web}=0.75")):
        with pytest.raises(TrainerError, match=r"a mixture of text of .* \(3 of 4\)"):
            require_same_data(saved, mixture(*other))


def test_a_path_with_a_number_behind_an_equals_sign_takes_a_weight(tmp_path: Path) -> None:
    odd = tmp_path / "lr=0.3"
    odd.mkdir()
    (odd / "a.txt").write_text("some text " * 20)
    plan = parse_plan(plans.plan_text(model=BYTES))
    found = open_data(plan, [share_of(f"{odd}=1")], seed=0)
    assert list(found.epochs(0)) == [str(odd)]


def test_a_share_that_is_next_to_nothing_is_refused(tmp_path: Path) -> None:
    web, code = sources(tmp_path)
    with pytest.raises(TrainerError, match="less than a 100,000th"):
        mixture(f"{web}=123456.7", f"{code}=0.003")


def test_a_tokenizer_for_token_files_alone_is_refused(tmp_path: Path) -> None:
    plan = parse_plan(plans.plan_text(model=BYTES))
    shares = [share_of("a.tokens=1"), share_of("b.tokens=1")]
    with pytest.raises(TrainerError, match="leave --tokenizer out"):
        open_data(plan, shares, seed=0, tokenizer=tmp_path / "tokenizer.json")
