"""`profiles --check`: all faults of a file at once, each by its field; the catalogue has none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fsdpplan.errors import SpecError
from fsdpplan.files.profiles.catalogue import profile_names, profile_text, profiles_folder
from fsdpplan.files.profiles.check import check_profile

DGX = profile_text("dgx-h100")
H100 = profile_text("h100-sxm-80g")


def found(tmp_path: Path, text: str) -> set[tuple[str, str]]:
    """(kind, where) of what is found in `text`."""
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return {(one.kind, one.where) for one in check_profile(path).findings}


def test_the_catalogue_can_be_read_and_is_plausible() -> None:
    for name in profile_names():
        findings = check_profile(profiles_folder() / f"{name}.toml").findings
        assert {one.kind for one in findings} <= {"unsourced"}, name


@pytest.mark.parametrize(
    ("old", "new", "kind", "where"),
    [
        ('description = "', 'remark = "', "missing", "description"),
        ('description = "', 'remark = "x"\ndescription = "', "wrong", "remark"),
        ("gpus_per_node = { value = 8, ", "gpus_per_node = { ", "missing", "gpus_per_node.value"),
        (', source = "system" }', " }", "missing", "gpus_per_node.source"),
        ('source = "system"', 'source = "nobody"', "wrong", "gpus_per_node.source"),
        ("value = 50.0e9", "value = 400.0e9", "implausible", "levels[1].port_bandwidth"),
        ("value = 450.0e9", "value = 3600.0e9", "implausible", "levels[0].port_bandwidth"),
        ("joins = ", "join = ", "missing", "levels[0].joins"),
        (
            "[sources.system]",
            '[sources.idle]\nwhat = "x"\n[sources.system]',
            "unsourced",
            "sources.idle",
        ),
    ],
)
def test_a_fault_is_named(tmp_path: Path, old: str, new: str, kind: str, where: str) -> None:
    assert old in DGX
    findings = found(tmp_path, DGX.replace(old, new, 1))
    assert any(one == kind and place.startswith(where) for one, place in findings), findings


def test_all_faults_are_listed_at_once(tmp_path: Path) -> None:
    text = re.sub(r"^(memory_bytes|multiprocessors) = .*\n", "", H100, flags=re.M)
    text = text.replace("3.35e12", "26.8e12").replace('evidence = "fitted"\n', "")
    assert found(tmp_path, text) >= {
        ("missing", "numbers.memory_bytes"),
        ("missing", "numbers.multiprocessors"),
        ("missing", "evidence"),
        ("implausible", "numbers.memory_bandwidth_bytes_per_second"),
    }


def test_what_only_the_reader_sees_is_said_too(tmp_path: Path) -> None:
    """Rules between fields are the reader's alone: a file without other faults is read, too."""
    azure = profile_text("azure-nd-h100-v5")
    text = azure.replace('fitted_as = "', 'fitted_as = "nowhere-', 1)
    ((kind, _),) = found(tmp_path, text)
    assert kind == "wrong"


def test_what_the_reader_refuses_the_check_never_passes(tmp_path: Path) -> None:
    """Each line of a good profile taken out by itself."""
    from fsdpplan.files.profiles.catalogue import read_profile

    lines = DGX.splitlines(keepends=True)
    for index, line in enumerate(lines):
        if "=" not in line:
            continue
        path = tmp_path / f"without-{index}.toml"
        path.write_text("".join(lines[:index] + lines[index + 1 :]), encoding="utf-8")
        try:
            read_profile(path)
        except SpecError:
            kinds = {one.kind for one in check_profile(path).findings}
            assert kinds & {"wrong", "missing"}, line


def test_what_is_no_toml_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("name = ", encoding="utf-8")
    with pytest.raises(SpecError, match="not TOML"):
        check_profile(path)
