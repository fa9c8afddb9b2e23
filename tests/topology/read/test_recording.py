"""Recordings: what is written is read again; what is no recording is refused in one sentence."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.errors import SpecError
from fsdpplan.topology.conclude.gpus import gpus_of, pairs_of
from fsdpplan.topology.read.recording import (
    MAX_RECORDING_CHARACTERS,
    Recording,
    recording_from_json,
    recording_json,
)
from tests.topology.recorded import NAMES, recorded

TEXTS = st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=4)
PATHS = st.dictionaries(st.text(max_size=8).map("/{}".format), st.text(max_size=8), max_size=4)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)
RECORDINGS = st.builds(
    Recording,
    about=st.text(max_size=8),
    date=st.text(max_size=8),
    files=PATHS,
    links=PATHS,
    commands=TEXTS,
    failed=TEXTS,
    environment=TEXTS,
    packages=TEXTS,
    nvml=st.none() | st.dictionaries(st.text(max_size=4), JSON),
    nvml_error=st.none() | st.text(max_size=8),
)
WHOLE: dict[str, Any] = json.loads(recording_json(Recording(nvml={"gpus": []})))


@given(recording=RECORDINGS)
def test_what_is_written_is_read_again(recording: Recording) -> None:
    assert recording_from_json(recording_json(recording)) == recording


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_machine_is_read_and_written(name: str) -> None:
    recording = recorded(name)
    assert recording_from_json(recording_json(recording)) == recording


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"schema_version": 2}, "schema_version must be 1"),
        ({"schema_version": True}, "schema_version must be 1"),
        ({"password": "x"}, "password is not known"),
        ({"files": ["/etc"]}, "files must be an object of texts"),
        ({"files": {"/etc": 1}}, "files must be an object of texts, and '/etc' is none"),
        ({"files": {"etc": "x"}}, "files must have absolute paths, and 'etc' is none"),
        ({"links": None}, "links must be an object of texts"),
        ({"about": None}, "about must be text"),
        ({"nvml": []}, "nvml must be an object or null"),
        ({"nvml_error": 3}, "nvml_error must be text"),
    ],
)
def test_a_wrong_recording_is_refused_with_the_field(change: dict[str, Any], what: str) -> None:
    with pytest.raises(SpecError, match=f"^the recording of a host is wrong: {what}; record again"):
        recording_from_json(json.dumps(WHOLE | change))


@pytest.mark.parametrize("field", sorted(WHOLE.keys() - {"nvml", "nvml_error"}))
def test_no_field_may_be_missing(field: str) -> None:
    with pytest.raises(SpecError, match=field):
        recording_from_json(json.dumps({key: WHOLE[key] for key in WHOLE if key != field}))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "null", '{"files": NaN}', "[" * 100_000, "9" * 5000]
)
def test_what_is_no_json_object_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="the recording of a host"):
        recording_from_json(text)


def test_a_recording_has_an_end() -> None:
    with pytest.raises(SpecError, match="at most"):
        recording_from_json(" " * (MAX_RECORDING_CHARACTERS + 1))


def test_the_names_under_a_folder_are_those_of_files_and_links() -> None:
    recording = Recording(
        files={"/sys/a/x/rate": "1", "/sys/a/x/state": "2", "/sys/ab/z": "3"},
        links={"/sys/a/y": "/sys/devices/y", "/sys/a": "/sys/b"},
    )
    assert recording.children("/sys/a") == recording.children("/sys/a/") == ("x", "y")
    assert recording.children("/sys/none") == ()


def test_a_text_is_without_the_space_around_it_and_a_command_as_it_was() -> None:
    recording = Recording(files={"/proc/x": " 4\n"}, commands={"topo -m": "\tGPU0\n"})
    assert recording.text("/proc/x") == "4"
    assert recording.command("topo -m") == "\tGPU0\n"
    assert recording.text("/proc/y") is recording.link("/proc/x") is recording.command("x") is None


@given(at=st.integers(0, 10**6), name=st.sampled_from(NAMES))
def test_a_cut_recording_is_refused(at: int, name: str) -> None:
    text = recording_json(recorded(name)).rstrip()
    with pytest.raises(SpecError, match="is not JSON"):
        recording_from_json(text[: at % len(text)])


@given(path=st.lists(st.integers(0, 10**6), min_size=1, max_size=6), junk=JSON)
def test_a_recording_with_junk_in_it_is_refused_or_read(path: list[int], junk: Any) -> None:
    document = json.loads(recording_json(recorded("dgx-h100")))
    here: Any = document
    for step in path:
        keys = list(here) if isinstance(here, dict) else list(range(len(here)))
        if not keys:
            return
        key = keys[step % len(keys)]
        if not isinstance(here[key], dict | list) or step == path[-1]:
            here[key] = junk
            break
        here = here[key]
    try:
        recording = recording_from_json(json.dumps(document))
    except SpecError:
        return
    gpus_of(recording)
    pairs_of(recording)
