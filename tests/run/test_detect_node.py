from __future__ import annotations

import json
import os
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.files.machines import machine_document, machine_from_json
from fsdpplan.run.detect_node import CHUNK_CHARACTERS, lines_of, texts_in
from tests.topology.found import machine

TEXTS = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=4000)
ANSWERS = st.dictionaries(st.sampled_from(["n01", "n02", "node-3.rack"]), TEXTS, max_size=3)


def all_lines(answers: dict[str, str]) -> list[str]:
    return [line for node, text in answers.items() for line in lines_of(node, text)]


def test_a_machine_survives_the_way() -> None:
    text = json.dumps(machine_document(machine("p5-efa")))
    lines = list(lines_of("n01", text))
    assert max(map(len, lines)) < CHUNK_CHARACTERS + 100
    assert machine_from_json(texts_in(lines)["n01"], where="n01") == machine("p5-efa")


@given(ANSWERS, st.randoms(use_true_random=False))
def test_texts_are_found_again_in_whatever_order_their_lines_come(
    answers: dict[str, str], rng: object
) -> None:
    lines = [*all_lines(answers), "srun: job 7 queued", "", "fsdpplan-machine n01"]
    rng.shuffle(lines)  # type: ignore[attr-defined]
    assert texts_in(f"{line}\n" for line in lines) == answers


@given(ANSWERS, st.data())
def test_a_lost_or_cut_line_drops_its_node_and_no_other(
    answers: dict[str, str], data: st.DataObject
) -> None:
    lines = all_lines(answers)
    if not lines:
        return
    at = data.draw(st.integers(0, len(lines) - 1))
    hurt = lines[at].split()[1]
    kept = data.draw(st.integers(0, len(lines[at]) - 1))
    cut = lines[at][:kept]
    found = texts_in([*lines[:at], cut, *lines[at + 1 :]])
    assert found == {node: text for node, text in answers.items() if node != hurt}


@given(TEXTS, TEXTS, st.randoms(use_true_random=False))
def test_two_texts_of_one_node_are_never_mixed(one: str, other: str, rng: object) -> None:
    lines = [*lines_of("n01", one), *lines_of("n01", other)]
    rng.shuffle(lines)  # type: ignore[attr-defined]
    assert texts_in(lines)["n01"] in (one, other)


@given(st.lists(st.text(max_size=80)))
def test_what_others_print_is_no_machine(lines: list[str]) -> None:
    assert texts_in(lines) == {}


def test_the_program_says_what_this_host_is_under_slurm_s_name_for_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fsdpplan.run.detect_node"],
        env={**os.environ, "SLURMD_NODENAME": "n07"},
        capture_output=True,
        text=True,
        check=True,
    )
    ((node, text),) = texts_in(done.stdout.splitlines()).items()
    assert node == "n07"
    assert machine_from_json(text, where="here").host.name
