"""The container that a job's ranks run in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from fsdpplan.emit.safe_text import require_no_token, require_passable, shell_word
from fsdpplan.errors import SpecError
from fsdpplan.spec.cluster import Device
from fsdpplan.spec.values import require_choice

ContainerRuntime = Literal["pyxis", "apptainer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """An image, and what of the host is seen inside."""

    image: str
    """As the runtime names it: `nvcr.io#nvidia/pytorch:25.08-py3` or a `.sqsh` for pyxis, a `.sif`
    or `docker://...` for apptainer."""
    runtime: ContainerRuntime = "pyxis"
    mounts: tuple[str, ...] = ()
    """`SOURCE`, `SOURCE:TARGET` or `SOURCE:TARGET:OPTIONS`."""

    def __post_init__(self) -> None:
        require_choice("container_runtime", self.runtime, get_args(ContainerRuntime))
        if not self.image:
            raise SpecError("container is empty: give an image, or leave --container out")
        if self.image.startswith("-"):
            raise SpecError(
                f"container {self.image!r} would be an option of the runtime: give an image, by "
                "./ before it where it is a file of that name"
            )
        for text in (self.image, *self.mounts):
            require_no_token("--container", text)
            require_passable("--container", text)
        for mount in self.mounts:
            parts = mount.split(":")
            if "," in mount or not 1 <= len(parts) <= 3 or not all(parts):
                raise SpecError(
                    f"container mount {mount!r} must be SOURCE:TARGET, such as /data:/data, "
                    "without commas"
                )


def step_lines(container: Container | None, *, folder: str | None) -> list[str]:
    """Lines that set `container`, the words of srun for a step inside it; none without pyxis."""
    if container is None or container.runtime != "pyxis":
        return []
    mounts = "".join(f"{_pair(mount)}," for mount in container.mounts)
    own = "" if folder is None else ' "$FSDPPLAN_JOB_FOLDER"'
    return [f"in_container {shell_word(container.image)} {shell_word(mounts)}{own}"]


_GPUS_INSIDE = {"nvidia": "--nv ", "amd": "--rocm "}
"""Apptainer's words for the driver's files of GPUs. Source: apptainer-exec(1)."""


def prefix_words(container: Container | None, *, device: Device, folder: str | None) -> str:
    """Words of a shell before the Python of the ranks, with a blank behind them.

    Apptainer passes the environment in. Source: apptainer-exec(1).
    """
    if container is None or container.runtime != "apptainer":
        return ""
    binds = "".join(f"--bind={shell_word(mount)} " for mount in container.mounts)
    own = '--bind="$PWD" --bind="$FSDPPLAN_RUN_FOLDER" --pwd="$PWD" '
    own = ("" if folder is None else '--bind="$FSDPPLAN_JOB_FOLDER" ') + own
    gpus = _GPUS_INSIDE[device.vendor] if device.kind == "cuda" else ""
    return f"apptainer exec {gpus}{binds}{own}{shell_word(container.image)} "


def _pair(mount: str) -> str:
    """A mount with both ends said, as pyxis wants it."""
    return mount if ":" in mount else f"{mount}:{mount}"
