"""Which tool a configuration is of, and what it asks for."""

from __future__ import annotations

from pathlib import Path

from fsdpplan.errors import SpecError
from fsdpplan.files.configurations import accelerate, deepspeed, torchtitan
from fsdpplan.files.configurations.configuration import Configuration
from fsdpplan.files.configurations.tree import configuration_fields
from fsdpplan.files.seems import seems
from fsdpplan.files.table import path_text, text_of

TOOLS = (
    (deepspeed.MARKS, deepspeed.deepspeed_configuration),
    (accelerate.MARKS, accelerate.accelerate_configuration),
    (torchtitan.MARKS, torchtitan.torchtitan_configuration),
)


def read_configuration(path: Path) -> Configuration:
    """What the file asks for. Raises SpecError, with the file, for one that no tool here has."""
    fields = configuration_fields(path)
    where = path_text(path)
    tables = {name.partition(".")[0] for name in fields}
    for marks, reader in TOOLS:
        if tables & marks:
            return reader(fields, where=where)
    raise SpecError(
        f"{where}: {seems(text_of(path, limit_bytes=2**18))}; read are configurations of DeepSpeed "
        "(JSON), Accelerate (YAML) and torchtitan (TOML)"
    )
