"""Files and links of this host, as `topology.places` lists them."""

from __future__ import annotations

import errno
import glob
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from fsdpplan.topology.read.places import FILES, LINKS, PCI_CLASSES, PCI_FILES, kept_text

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
