"""Reading: files and links of this host, as `topology.read.recording` lists them, and texts that
become numbers, or None where they do not say one.
"""

from __future__ import annotations

import errno
import glob
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from fsdpplan.topology.read.recording import FILES, LINKS, PCI_CLASSES, PCI_FILES, kept_text

MOST_LISTED = 65536
"""Numbers of a list: no kernel counts more cores or nodes."""


def whole_number(text: str | None) -> int | None:
    """`text` as a number of at most 18 digits, not negative: drivers say -1 for unknown."""
    stripped = (text or "").strip()
    return int(stripped) if re.fullmatch(r"[0-9]{1,18}", stripped) else None


def first_line(text: str | None) -> str | None:
    """The first line without spaces around it, if there is anything in it."""
    lines = (text or "").strip().splitlines()
    return lines[0].strip() if lines and lines[0].isprintable() else None


def is_name(text: str) -> bool:
    """`text` may name a device: the kernel takes anything but space and slash, a terminal does
    not."""
    return re.fullmatch(r"[!-.0-~]{1,64}", text) is not None


def labelled(text: str | None, label: str) -> str | None:
    """What follows `label:` in the first line that starts so, as in /proc/meminfo."""
    for line in (text or "").splitlines():
        name, colon, value = line.partition(":")
        if colon and name.strip() == label and value.strip():
            return value.strip()
    return None


def numbers_in_list(text: str | None) -> frozenset[int] | None:
    """The numbers of a kernel list, such as `0-3,8`; None for an empty or malformed one.

    Source: Linux, Documentation/admin-guide/kernel-parameters.rst, cpu lists.
    """
    found: set[int] = set()
    listed = 0
    for part in (text or "").strip().split(","):
        match = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", part)
        if match is None:
            return None
        numbers = range(int(match[1]), int(match[2] or match[1]) + 1)
        listed += len(numbers)
        if listed > MOST_LISTED:
            return None
        found |= set(numbers)
    return frozenset(found) or None


MAX_FILE_CHARACTERS = 64 * 2**10
"""Most that is kept of one file, to its last whole line."""
MAX_READ_BYTES = 8 * 2**20
"""Most that is read of a file, before `kept_text` shortens it."""
READ_BYTES = 64 * 2**10

_NO_VALUE = frozenset(
    {
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EINVAL,
        errno.ENODATA,
        errno.ENODEV,
        errno.ENXIO,
        errno.EOPNOTSUPP,
    }
)
"""What the kernel says of a file without a value, such as the speed of an interface that is down,
or the type of an empty GID. That is an answer, not a failure."""
_PCI = "/sys/bus/pci/devices"


def host_files(root: Path) -> tuple[dict[str, str], dict[str, str]]:
    """(path -> text, path -> why it could not be read), of the host whose files are in `root`."""
    devices = (f"{device}/{name}" for device in _pci_devices(root) for name in PCI_FILES)
    return _read_files(root, (*_matches(root, FILES), *devices))


def host_links(root: Path) -> dict[str, str]:
    """Path -> real path."""
    return _real_paths(root, (*_matches(root, LINKS), *_pci_devices(root)))


def _matches(root: Path, patterns: Iterable[str]) -> Iterator[str]:
    """Paths, absolute under `root`, that match."""
    for pattern in patterns:
        for found in sorted(glob.glob(pattern.lstrip("/"), root_dir=root)):
            yield f"/{found}"


def _pci_devices(root: Path) -> Iterator[str]:
    """Accelerators and adapters among the hundreds of functions that a host has."""
    for path in _matches(root, [f"{_PCI}/*"]):
        kind, _ = _read_files(root, [f"{path}/class"])
        if kind.get(f"{path}/class", "").startswith(PCI_CLASSES):
            yield path


def _read_files(root: Path, paths: Iterable[str]) -> tuple[dict[str, str], dict[str, str]]:
    """(path -> text, path -> why it could not be read)."""
    texts: dict[str, str] = {}
    failed: dict[str, str] = {}
    for path in paths:
        try:
            text = _file_text(root / path.lstrip("/"))
        except OSError as error:
            if error.errno not in _NO_VALUE:
                failed[path] = error.strerror or str(error)
        else:
            if text is not None:
                texts[path] = _beginning(kept_text(path, text))
    return texts, failed


def _file_text(path: Path) -> str | None:
    """The text of a regular file; reading another kind may wait for ever."""
    if not path.is_file():
        return None
    content = b""
    with path.open("rb", buffering=0) as file:
        # /proc/sys refuses to be read in pieces of 4 MiB and more
        while len(content) < MAX_READ_BYTES and (piece := file.read(READ_BYTES)):
            content += piece
    return content.decode(errors="replace")


def _beginning(text: str) -> str:
    """The first lines of a text, as many as are kept."""
    if len(text) <= MAX_FILE_CHARACTERS:
        return text
    whole, newline, _ = text[:MAX_FILE_CHARACTERS].rpartition("\n")
    return whole + newline


def _real_paths(root: Path, paths: Iterable[str]) -> dict[str, str]:
    """Path -> where it leads to under `root`, of those that lead somewhere."""
    base = os.path.realpath(root).rstrip("/")
    found = {path: os.path.realpath(root / path.lstrip("/")) for path in paths}
    return {
        path: real.removeprefix(base)
        for path, real in found.items()
        if real.startswith(f"{base}/") and os.path.exists(real)
    }
