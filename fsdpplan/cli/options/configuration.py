"""The option that reads a configuration of another tool."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from fsdpplan.cli.options.expand import Flag
from fsdpplan.cli.options.parse import path


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigurationOptions:
    """What another tool was told."""

    HEADING: ClassVar[str] = "Configuration of another tool"

    file: Annotated[
        Path | None,
        Flag(
            name="--from",
            metavar="FILE",
            parse=path,
            help="A configuration of DeepSpeed (JSON), Accelerate (YAML) or torchtitan (TOML); "
            "options that are typed go before it.",
        ),
    ] = None
