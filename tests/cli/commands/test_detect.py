from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cli.app import exit_code_of
from fsdpplan.files.profiles.catalogue import load_node
from fsdpplan.topology.read.recording import Recording, recording_from_json, recording_json
from tests.schemas import obeys
from tests.topology.found import machine
from tests.topology.recorded import FOLDER, NAMES, recorded

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "detect-json.md"
NO_PROFILE = ("nothing", "amd-mi300x", "mig")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def path(name: str) -> str:
    return str(FOLDER / f"{name}.json")


def detect(capsys: pytest.CaptureFixture[str], *given: str, code: int = 0) -> tuple[str, str]:
    """stdout and stderr of a command that ends with this code."""
    assert exit_code_of(("detect", *given)) == code
    out, err = capsys.readouterr()
    return out, err


def detect_json(capsys: pytest.CaptureFixture[str], *given: str, code: int = 0) -> dict[str, Any]:
    """The one JSON object on stdout."""
    document: dict[str, Any] = json.loads(detect(capsys, *given, "--json", code=code)[0])
    return document


def renamed(name: str, host: str, folder: Path, **files: str) -> str:
    """The recorded machine under another host name; `files` by the last part of their path."""
    document = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    document["files"]["/proc/sys/kernel/hostname"] = f"{host}\n"
    document["files"] |= files
    place = folder / f"{host}.json"
    place.write_text(json.dumps(document), encoding="utf-8")
    return str(place)


@pytest.mark.parametrize("columns", [80, 60, 40])
@pytest.mark.parametrize("name", NAMES)
def test_the_screen_is_never_wider_than_the_terminal(
    columns: int, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    out, err = detect(capsys, "--from", path(name))
    assert max(map(len, out.splitlines())) <= columns
    assert all(line == line.rstrip() for line in out.splitlines())
    assert out.isascii()
    assert err == ""


@pytest.mark.parametrize("name", NAMES)
def test_the_screen_of_any_machine_fits_on_a_page(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out, _ = detect(capsys, "--from", path(name))
    assert len(out.splitlines()) <= 40


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("dgx-h100", "GPUs 0-7 over NVSwitch, 450 GB/s a GPU"),
        ("dgx-h100", "8 x 400 Gb/s, one for each GPU"),
        ("p5-efa", "32 x 100 Gb/s, 4 for each GPU"),
        ("p5-efa", "p5.48xlarge of aws"),
        ("nic-slow", "1 x 100 Gb/s (mlx5_5 for GPU 3)"),
        ("nic-slow", "the slowest link sets the ring: all-gather over the network 4.0x slower"),
        ("rtx-4090", "GPUs 0-7, each alone"),
        ("pcie-two-sockets", "GPUs 0-1, 2-3, 4-5 and 6-7 over NVLink, 300 GB/s a GPU"),
        ("pcie-two-sockets", "2 x 200 Gb/s (mlx5_0 for GPUs 0-3, mlx5_1 for GPUs 4-7)"),
        ("pcie-half-width", "gen 4 x8 of x16"),
        ("gb200-tray", "of unknown size"),
        ("gb200-tray", "joins 4 GPUs by NVLink"),
        ("gpu-missing", "the driver sees 7 GPUs, its board has 8"),
        ("mig", "GPU 0 alone; GPUs 1-3 over NVLink, 200 GB/s a GPU"),
        ("mig", "No profile: GPU 0 of this machine is split by MIG"),
        ("amd-mi300x", "8 AMD GPUs (gfx942)"),
        ("nothing", "No profile: no GPU was found on vm-1"),
        ("slurm-node", "job 48213 on 2 nodes"),
    ],
)
def test_the_screen_says_what_was_found(
    name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in " ".join(detect(capsys, "--from", path(name))[0].split())


@pytest.mark.parametrize("name", NAMES)
def test_json_is_one_object_with_the_same_names_for_every_machine(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    document = detect_json(capsys, "--from", path(name))
    (example,) = re.findall(r"```json\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    assert list(document) == list(json.loads(example))
    obeys("detect", document)
    assert document["kind"] == "node"
    (host,) = document["hosts"]
    assert set(host) == {"machine", "topology"}
    assert (document["device"] is None) == (document["profile_problem"] is not None)
    assert (name in NO_PROFILE) == (document["profile_problem"] is not None)


def test_a_saved_profile_is_what_the_next_command_takes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    _, err = detect(capsys, "--from", path("nic-slow"), "--save", "my.node")
    assert "fsdpplan recommend --hardware my.node.toml --params 8e9" in err
    assert load_node(str(tmp_path / "my.node.toml")).name == "my.node"
    given = ("recommend", "--hardware", "my.node.toml", "--params", "1e9", "--gpus", "16", "--json")
    assert exit_code_of(given) == 0
    cluster = json.loads(capsys.readouterr().out)["cluster"]
    assert cluster["levels"][-1]["port_bandwidth_bytes_per_second"] == 12.5e9


@pytest.mark.parametrize("name", NO_PROFILE)
@pytest.mark.parametrize("more", [(), ("--json",)])
def test_without_a_profile_all_is_printed_and_nothing_saved(
    name: str, more: tuple[str, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out, err = detect(capsys, "--from", path(name), "--save", "mine", *more, code=4)
    assert machine(name).host.name in out
    assert err.startswith("fsdpplan: nothing is saved in mine: ")
    assert list(tmp_path.iterdir()) == []
    if more:
        assert json.loads(out)["profile_problem"]


@pytest.mark.parametrize("save", [".", "..", "/", "a/.."])
def test_a_place_that_is_no_file_is_refused(save: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, err = detect(capsys, "--from", path("dgx-h100"), "--save", save, code=2)
    assert err.startswith("fsdpplan: --save")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--nodes", "--from", "a.json"), "--nodes and --from name other hosts"),
        (("--record", "a.json", "--from", "b.json"), "--record writes what is read of this host"),
        (("--from", "none.json"), "does not exist"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    given: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, err = detect(capsys, *given, code=2)
    assert said in err
    assert len(err.splitlines()) == 1


def test_nodes_outside_of_an_allocation_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    out, err = detect(capsys, "--nodes", code=4)
    assert (out, len(err.splitlines())) == ("", 1)


def test_a_recording_says_of_this_host_what_it_said_itself(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fsdpplan.run.detect.this_host", lambda: recorded("dgx-h100"))
    here, err = detect(capsys, "--record", "here.json")
    assert "recorded in here.json; it names this host" in err
    assert recording_from_json((tmp_path / "here.json").read_text()) == recorded("dgx-h100")
    assert detect(capsys, "--from", "here.json")[0] == here


def test_this_host_can_be_read_whatever_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert detect(capsys)[0]


def test_gpus_that_programs_do_not_see_are_not_planned_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    document = json.loads((FOLDER / "mig.json").read_text(encoding="utf-8"))
    document["environment"]["CUDA_VISIBLE_DEVICES"] = "1,2,3"
    (tmp_path / "part.json").write_text(json.dumps(document))
    out, _ = detect(capsys, "--from", "part.json", "--save", "part")
    said = "CUDA_VISIBLE_DEVICES hides 1 of the 4 GPUs of hgx4-01"
    assert said in " ".join(out.split())
    assert load_node(str(tmp_path / "part.toml")).gpus_per_node == 3


def test_nodes_that_differ_are_told_apart(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = [
        word
        for of, name in (("dgx-h100", "n01"), ("nic-slow", "n02"), ("dgx-h100", "n03"))
        for word in ("--from", renamed(of, name, tmp_path))
    ]
    given += ["--from", renamed("gpu-missing", "n04", tmp_path)]
    out, err = detect(capsys, *given, "--save", "mine")
    words = " ".join(out.split())
    assert "4 nodes: n[01-04]. n01 stands for all" in words
    assert "n04 cannot take part in a job with it that uses all GPUs" in words
    assert "n02: mlx5_5 runs at 100 Gb/s, the other 7 at 400 Gb/s" in words
    assert "GPUs: 7 on n04, 8 on 3 others" in words
    assert "without n04, whose GPUs are others (emit-launch --exclude n04)" in err
    assert "--params 8e9 --gpus 24" in err
    profile = load_node(str(tmp_path / "mine.toml"))
    assert [spot.nodes for spot in profile.weak] == [("n02",)]
    document = detect_json(capsys, *given)
    assert (document["typical_host"], document["left_out"]) == ("n01", ["n04"])


def test_what_holds_for_several_nodes_is_said_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    names = ("n01", "n02", "n03")
    given = [word for name in names for word in ("--from", renamed("nic-slow", name, tmp_path))]
    words = " ".join(detect(capsys, *given)[0].split())
    assert words.count("mlx5_5 runs at 100 Gb/s") == 1
    assert "n[01-03]: mlx5_5 runs at" in words
    assert "emit-launch --exclude n[01-03]" in words


def test_one_host_recorded_twice_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    _, err = detect(capsys, "--from", path("dgx-h100"), "--from", path("nic-slow"), code=2)
    assert "2 of the hosts are called dgx-01" in err


HOSTILE = ("\x1b]0;owned\x07", "\x1b[2J", "\r[levels]", '"\\"', "\u202egpu", "\ud800", "\x9b31m")


@pytest.mark.parametrize("text", HOSTILE)
def test_no_name_in_a_recording_reaches_the_terminal_or_breaks_the_profile(
    text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    document = json.loads((FOLDER / "nic-slow.json").read_text(encoding="utf-8"))
    whole = json.dumps(document).replace("dgx-01", json.dumps(f"h{text}")[1:-1])
    for before in ("mlx5_5", "bond0", "Platinum 8480CL", "570.86.15"):
        whole = whole.replace(before, before + json.dumps(text)[1:-1])
    (tmp_path / "hostile.json").write_text(whole)
    out, err = detect(capsys, "--from", "hostile.json", "--save", "mine")
    assert all(c.isprintable() or c == "\n" for c in out + err)
    assert load_node(str(tmp_path / "mine.toml")).device == "h100-sxm-80g"
    detect_json(capsys, "--from", "hostile.json")


def test_a_gpu_of_unknown_name_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    whole = (FOLDER / "dgx-h100.json").read_text(encoding="utf-8")
    (tmp_path / "a.json").write_text(whole.replace("NVIDIA H100 80GB HBM3", "NVIDIA ]] X"))
    out, _ = detect(capsys, "--from", "a.json", "--save", "mine", code=4)
    said = "No profile: no profile has the GPUs of this machine (8 x NVIDIA ]] X)"
    assert said in " ".join(out.split())


def test_a_hostile_name_of_a_gpu_is_no_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    whole = (FOLDER / "dgx-h100.json").read_text(encoding="utf-8")
    (tmp_path / "a.json").write_text(whole.replace("NVIDIA H100 80GB HBM3", "\\u001b[2J\\nX"))
    out, _ = detect(capsys, "--from", "a.json", "--save", "mine", code=4)
    assert all(c.isprintable() or c == "\n" for c in out)
    assert "No profile: no GPU was found on dgx-01" in " ".join(out.split())


def outcome(text: str) -> int:
    """Exit code of detect on a recording with this text."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "fuzzed.json"
        place.write_text(text, encoding="utf-8", errors="surrogatepass")
        saved = str(Path(folder) / "saved.toml")
        code = exit_code_of(("detect", "--from", str(place), "--json", "--save", saved))
        if code == 0:
            assert load_node(saved).gpus_per_node
    return code


@given(st.sampled_from(NAMES), st.floats(0, 1))
def test_a_cut_recording_is_refused_in_one_sentence(name: str, share: float) -> None:
    whole = (FOLDER / f"{name}.json").read_text(encoding="utf-8").rstrip()
    assert outcome(whole[: int(share * (len(whole) - 1))]) == 2


def scrambled(value: Any, data: st.DataObject) -> Any:
    """The value with one part, somewhere inside of it, in another's place."""
    if isinstance(value, dict) and value:
        key = data.draw(st.sampled_from(sorted(value)))
        return {**value, key: scrambled(value[key], data)}
    if isinstance(value, list) and value:
        at = data.draw(st.integers(0, len(value) - 1))
        return [*value[:at], scrambled(value[at], data), *value[at + 1 :]]
    if isinstance(value, str) and data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(value)))
        return value[:at] + data.draw(st.text(max_size=3)) + value[at + 1 :]
    return data.draw(
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(-(2**70), 2**70),
            st.floats(allow_nan=False, allow_infinity=False),
            st.text(max_size=5),
            st.just([]),
            st.just({}),
        )
    )


@given(st.data())
def test_no_changed_recording_crashes_detect(data: st.DataObject) -> None:
    document = json.loads((FOLDER / f"{data.draw(st.sampled_from(NAMES))}.json").read_text())
    for _ in range(data.draw(st.integers(1, 4))):
        document = scrambled(document, data)
    assert outcome(json.dumps(document)) in (0, 2, 4)


def test_an_empty_recording_is_a_host_without_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty.json").write_text(recording_json(Recording()))
    out, _ = detect(capsys, "--from", "empty.json")
    assert "no GPU was found on localhost" in " ".join(out.split())
