from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.errors import SpecError
from fsdpplan.files.job_records import (
    Ending,
    RunRecord,
    read_bad_nodes,
    read_record,
    write_record,
)

LINE = st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1, max_size=20)


@given(
    jobs=st.lists(st.from_regex(r"[1-9][0-9]{0,9}|trainjob/[a-z][a-z0-9-]{0,9}", fullmatch=True)),
    path=LINE,
    ending=st.none() | st.builds(Ending, state=LINE, exit_code=st.integers(0, 255)),
)
def test_a_record_is_read_as_it_was_written(
    jobs: list[str],
    path: str,
    ending: Ending | None,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("run")
    record = RunRecord(
        engine="slurm",
        jobs=tuple(jobs),
        folder=path,
        script=path,
        plan_sha256="",
        metrics=path,
        submitted_at="now",
        ending=ending,
    )
    write_record(folder, record)
    assert read_record(folder) == record


def test_a_folder_without_one_has_none(tmp_path: Path) -> None:
    assert read_record(tmp_path) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ('{"schema_version": 2}', "schema version 2"),
        ('{"schema_version": 1, "engine": "pbs"}', "engine"),
        ('{"schema_version": 1, "engine": "slurm", "jobs": [7]}', "a list of ids of jobs"),
    ],
)
def test_a_broken_record_is_one_sentence(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(text)
    with pytest.raises(SpecError, match=words):
        read_record(tmp_path)


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(json.dumps({"schema_version": 1, "engine": "slurm"}))
    with pytest.raises(SpecError, match="jobs is missing"):
        read_record(tmp_path)


def test_bad_nodes_are_read_with_their_reasons(tmp_path: Path) -> None:
    assert read_bad_nodes(None) == {}
    assert read_bad_nodes(tmp_path) == {}
    (tmp_path / "bad-nodes").write_text("n1\ta slow link\n\nn2\nn1\tand no GPU\n")
    assert read_bad_nodes(tmp_path) == {"n1": "and no GPU", "n2": ""}
