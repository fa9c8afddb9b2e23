"""What is written replaces files, and nothing else."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fsdpplan.errors import SpecError
from fsdpplan.files.writing import write_folder_at_once, write_text_atomically

SOMEBODY_ELSE = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="device nodes and owners need root")


def node(path: Path) -> tuple[int, int]:
    """What must not change of a name: its inode and its kind."""
    status = path.lstat()
    return status.st_ino, stat.S_IFMT(status.st_mode)


def test_a_link_keeps_pointing_to_its_target_which_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "plan.json").write_text("old")
    (tmp_path / "hop").symlink_to("there/plan.json")
    link = tmp_path / "plan.json"
    link.symlink_to("hop")
    write_text_atomically(link, "new")
    assert os.readlink(link) == "hop"
    assert (tmp_path / "there" / "plan.json").read_text() == "new"
    assert not (tmp_path / "there" / "plan.json").is_symlink()


def test_a_link_to_nothing_yet_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("new.json")
    write_text_atomically(tmp_path / "link", "text")
    assert (tmp_path / "new.json").read_text() == "text"
    assert (tmp_path / "link").is_symlink()


def test_links_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(SpecError, match=r"in a circle; choose another place"):
        write_text_atomically(tmp_path / "a", "text")


@as_root
def test_a_link_that_somebody_else_laid_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    (tmp_path / "plan.json").symlink_to("mine")
    os.lchown(tmp_path / "plan.json", SOMEBODY_ELSE, SOMEBODY_ELSE)
    with pytest.raises(SpecError, match="a link that somebody else made"):
        write_text_atomically(tmp_path / "plan.json", "text")
    assert (tmp_path / "mine").read_text() == "kept"


@as_root
def test_a_device_is_written_into_and_stays_one(tmp_path: Path) -> None:
    null = tmp_path / "null"
    try:
        os.mknod(null, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        null.open("wb").close()
    except PermissionError:
        pytest.skip("device nodes cannot be made or opened here")
    before = node(null)
    write_text_atomically(null, "text")
    assert node(null) == before
    assert os.listdir(tmp_path) == ["null"]


@as_root
def test_a_disk_is_refused(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    try:
        os.mknod(disk, 0o600 | stat.S_IFBLK, os.makedev(7, 250))
    except PermissionError:
        pytest.skip("device nodes cannot be made here")
    with pytest.raises(SpecError, match="it is a disk, not a file"):
        write_text_atomically(disk, "text")


def test_a_folder_and_a_socket_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(SpecError, match="it is a folder, not a file"):
        write_text_atomically(tmp_path / "folder", "text")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        with pytest.raises(SpecError, match="it is a socket, not a file"):
            write_text_atomically(tmp_path / "socket", "text")


def test_a_pipe_that_nobody_reads_is_refused_and_one_that_is_read_is_written(
    tmp_path: Path,
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    before = node(pipe)
    with pytest.raises(SpecError, match="a pipe, and nobody reads it"):
        write_text_atomically(pipe, "text")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    text = "x" * 300_000  # more than a pipe holds
    got: list[str] = []
    os.set_blocking(reader, True)

    def read() -> None:
        with open(reader) as file:
            got.append(file.read())

    # Without another writer, the reader would find the end before the text comes.
    writer = os.open(pipe, os.O_WRONLY)
    thread = threading.Thread(target=read)
    thread.start()
    write_text_atomically(pipe, text)
    os.close(writer)
    thread.join()
    assert got == [text]
    assert node(pipe) == before


def test_standard_output_is_written_into_whatever_the_shell_made_of_it(tmp_path: Path) -> None:
    program = (
        "from pathlib import Path; from fsdpplan.files.writing import write_text_atomically\n"
        "write_text_atomically(Path('/dev/stdout'), 'text')"
    )
    with (tmp_path / "out").open("wb") as out:
        subprocess.run([sys.executable, "-c", program], stdout=out, check=True)
    assert (tmp_path / "out").read_text() == "text"
    piped = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True)
    assert piped.stdout == b"text"


def test_permissions_are_kept_and_new_files_get_the_umasks(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("")
    old.chmod(0o640)
    write_text_atomically(old, "text")
    before = os.umask(0o027)
    try:
        write_text_atomically(new, "text")
    finally:
        os.umask(before)
    assert stat.S_IMODE(old.stat().st_mode) == 0o640
    assert stat.S_IMODE(new.stat().st_mode) == 0o640


@as_root
def test_an_owner_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "theirs"
    path.write_text("")
    os.chown(path, SOMEBODY_ELSE, SOMEBODY_ELSE)
    write_text_atomically(path, "text")
    assert path.stat().st_uid == SOMEBODY_ELSE


def test_a_name_may_be_as_long_as_names_may_be(tmp_path: Path) -> None:
    write_text_atomically(tmp_path / ("n" * 255), "text")
    with pytest.raises(SpecError, match="File name too long"):
        write_text_atomically(tmp_path / ("n" * 256), "text")


def test_data_reaches_the_disk_before_the_name_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        order.append("folder" if is_folder else "file")
        fsync(descriptor)

    def replaced(old: Path, new: Path) -> None:
        order.append("name")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    write_text_atomically(tmp_path / "a", "text")
    assert order == ["file", "name", "folder"]
    order.clear()
    write_folder_at_once(tmp_path / "b", {"x": "1", "y/z": "2"})
    assert order == ["file", "file", "folder", "folder", "name", "folder"]


def test_a_folder_appears_at_once_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"cannot be written: .*; choose another place"):
        write_folder_at_once(tmp_path / "job", {"a": "1", "n" * 300: "2"})
    assert os.listdir(tmp_path) == []
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    write_folder_at_once(tmp_path / "link", {"a": "1"})
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there" / "a").read_text() == "1"
