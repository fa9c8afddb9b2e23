"""Who is blamed for what, told from the answers, sums and speeds of the ranks."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.trainer.preflight.findings import (
    Findings,
    hosts_words,
    may_leave_out,
    places_words,
    suspects,
)
from fsdpplan.trainer.preflight.links import Nodes, judge_sums
from fsdpplan.trainer.preflight.watch import Answer, all_hosts, blame

HOSTS = {rank: f"n{rank // 2}" for rank in range(8)}
"""Four nodes of two ranks."""
AXIS = "the all-reduce over tp"


def answers(stages: Mapping[int, int], *, errors: Mapping[int, str] | None = None) -> Findings:
    """Ranks and the stage each is in: 3 is over tp, of two neighbours each; the others of all."""
    words = {2: "the roll", 3: AXIS, 4: "comparing the sums"}
    said = {
        rank: Answer(
            stage=stage,
            words=words[stage],
            group=(rank // 2 * 2, rank // 2 * 2 + 1) if stage == 3 else (),
            error=(errors or {}).get(rank, ""),
        )
        for rank, stage in stages.items()
    }
    return blame(said, HOSTS, world=8, seconds=30)


def all_in(stage: int, **others: int) -> dict[int, int]:
    return {rank: others.get(f"r{rank}", stage) for rank in range(8)}


def test_who_does_not_answer_is_blamed_in_the_first_stage_that_waits() -> None:
    stages = all_in(4, r2=3)
    del stages[3]
    found = answers(stages)
    assert found.problem == f"rank 3 on n1 did not answer in {AXIS} within 30 s"
    assert found.bad == {"n1": f"a rank did not answer in {AXIS} within 30 s"}


def test_who_has_not_come_is_blamed_though_it_answers() -> None:
    found = answers(all_in(3, r5=2))
    assert found.problem == f"rank 5 on n2 did not come to {AXIS} within 30 s, after the roll"
    assert list(found.bad) == ["n2"]


def test_an_error_on_one_node_is_why_the_others_wait() -> None:
    found = answers(all_in(3), errors={6: "CUDA error: uncorrectable ECC error"})
    assert "rank 6 on n3 failed in" in found.problem
    assert "ECC" in found.problem
    assert list(found.bad) == ["n3"]


def test_errors_on_two_nodes_may_be_of_what_lies_between() -> None:
    found = answers(all_in(3), errors={1: "connection reset", 6: "connection reset"})
    assert "connection reset" in found.problem
    assert not found.bad


def test_where_all_wait_in_one_group_its_node_is_suspect() -> None:
    found = answers(all_in(4, r4=3, r5=3))
    assert found.problem.startswith(f"all ranks are there, but {AXIS} did not end within 30 s")
    assert list(found.bad) == ["n2"]


def test_where_all_wait_in_all_groups_nobody_is_suspect() -> None:
    found = answers(all_in(2))
    assert "all ranks are there" in found.problem
    assert "firewalls" in found.problem
    assert not found.bad


def test_most_nodes_cannot_be_the_bad_ones() -> None:
    found = answers({0: 3, 1: 3})
    assert "ranks 2, 3 on n1 and ranks 4, 5 on n2 and ranks 6, 7 on n3" in found.problem
    assert not found.bad


@given(st.dictionaries(st.integers(0, 7), st.integers(2, 4), min_size=1), st.integers(1, 8))
def test_there_is_always_a_sentence_and_never_a_majority(
    stages: dict[int, int], known: int
) -> None:
    said = {
        rank: Answer(stage=stage, words=f"stage {stage}", group=(rank, rank ^ 1))
        for rank, stage in stages.items()
    }
    hosts = {rank: HOSTS[rank] for rank in range(8) if rank < known or rank in stages}
    found = blame(said, hosts, world=8, seconds=30)
    assert found.problem
    assert "\n" not in found.problem
    assert 2 * len(found.bad) <= 4
    silent = {hosts[rank] for rank in range(8) if rank not in stages and rank in hosts}
    if silent and found.bad:
        assert set(found.bad) == silent


@given(st.integers(0, 5), st.integers(0, 5), st.text(), st.lists(st.integers(0, 9)))
def test_answers_come_back_as_they_went(stage: int, more: int, text: str, group: list[int]) -> None:
    answer = Answer(stage=stage + more, words=text, group=tuple(group), error=text)
    assert Answer.of(answer.text()) == answer


def test_the_host_of_a_rank_that_never_came_is_that_of_its_neighbour() -> None:
    assert all_hosts({0: "a", 2: "b"}, world=4, per_node=2, nodes=()) == {
        0: "a",
        1: "a",
        2: "b",
        3: "b",
    }


@pytest.mark.parametrize(
    ("nodes", "host"), [(("a", "b"), "b"), ((), None), (("a", "b", "c"), None), (("c", "d"), None)]
)
def test_a_node_of_which_nobody_came_is_the_one_that_is_left(
    nodes: tuple[str, ...], host: str | None
) -> None:
    found = all_hosts({0: "a", 1: "a"}, world=4, per_node=2, nodes=nodes)
    assert found.get(2) == found.get(3) == host


def test_suspects_are_in_all_that_fails_and_in_nothing_that_works() -> None:
    assert suspects([("ab", False), ("bc", False), ("ad", True)]) == {"b"}
    assert suspects([("ab", False), ("cd", False)]) == set()
    assert suspects([("ab", False), ("b", True), ("a", True)]) == set()
    assert suspects([("ab", True)]) == set()


@given(st.sets(st.sampled_from("abcdef")), st.sets(st.sampled_from("abcdef"), min_size=1))
def test_only_the_smaller_part_is_left_out(bad: set[str], hosts: set[str]) -> None:
    if may_leave_out(bad, hosts):
        assert 0 < 2 * len(bad) <= len(hosts)


def test_wrong_sums_inside_a_node_are_its_fault() -> None:
    groups = [{"tp": ["a", "a"], "dp": ["a", "b", "c"]}] * 2
    groups += [{"tp": ["b", "b"], "dp": ["a", "b", "c"]}] * 2
    groups += [{"tp": ["c", "c"], "dp": ["a", "b", "c"]}] * 2
    found = judge_sums([[], [], ["tp"], ["tp"], [], []], groups)
    assert "the all-reduce over tp gives wrong sums on ranks 2, 3" in found.problem
    # that b is right over dp says nothing of the links inside it
    assert list(found.bad) == ["b"]


def test_wrong_sums_among_all_nodes_are_nobodys() -> None:
    found = judge_sums([["dp"], ["dp"]], [{"dp": ["a", "b"]}] * 2)
    assert found.problem
    assert not found.bad


def test_right_sums_are_no_problem() -> None:
    assert judge_sums([[], []], [{"dp": ["a", "b"]}] * 2) == Findings()


def test_nodes_are_blocks_of_ranks() -> None:
    assert Nodes.of(["a", "a", "b", "b"]) == Nodes(hosts=("a", "b"), per_node=2)
    assert Nodes.of(["a", "b", "a", "b"]) is None
    assert Nodes.of(["a", "a", "b"]) is None


def test_long_lists_are_cut() -> None:
    hosts = {rank: f"n{rank}" for rank in range(20)}
    assert places_words(range(20), hosts).endswith("and rank 7 on n7 and 12 hosts more")
    assert hosts_words(hosts.values()).endswith("n7 and 12 more")
