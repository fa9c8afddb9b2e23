"""The container that a job's ranks run in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
