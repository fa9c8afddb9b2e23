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
    """Lines that set `container`, the words of srun for a step inside it; none without pyxis.

    The working folder, the run's and the job's are seen inside under their own names. Pyxis passes
    the environment in. Source: github.com/NVIDIA/pyxis, wiki, Usage.
    """
    if container is None or container.runtime != "pyxis":
        return []
    mounts = "".join(f"{_pair(mount)}," for mount in container.mounts)
    return [
        f'local mounts={shell_word(mounts) if mounts else ""}"$PWD:$PWD"',
        'mounts+=",$FSDPPLAN_RUN_FOLDER:$FSDPPLAN_RUN_FOLDER"',
        *(['mounts+=",$FSDPPLAN_JOB_FOLDER:$FSDPPLAN_JOB_FOLDER"'] if folder is not None else []),
        f"local container=(--container-image={shell_word(container.image)}",
        '  --container-workdir="$PWD" --container-mounts="$mounts")',
    ]


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


def missing_lines(container: Container | None) -> list[str]:
    """Lines of `check_node` for what a node needs to start the container."""
    if container is None or container.runtime != "apptainer":
        return []
    return [
        "command -v apptainer >/dev/null ||",
        '  refuse "$here: apptainer is not on PATH: load its module by --env-setup, or install it"',
    ]


def _pair(mount: str) -> str:
    """A mount with both ends said, as pyxis wants it."""
    return mount if ":" in mount else f"{mount}:{mount}"
