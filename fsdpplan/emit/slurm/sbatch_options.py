"""More options for sbatch than the script writes of itself, as a person gives them."""

from __future__ import annotations

import re

from fsdpplan.errors import SpecError

RESERVED_SBATCH = {
    "nodes": "the plan fixes the number of nodes",
    "ntasks": "one task a node starts torchrun",
    "ntasks-per-node": "one task a node starts torchrun",
    "tasks-per-node": "one task a node starts torchrun",
    "gpus": "the plan fixes the GPUs a node",
    "gpus-per-node": "the plan fixes the GPUs a node",
    "gpus-per-task": "the plan fixes the GPUs a node",
    "cpus-per-task": "use --cpus-per-task",
    "job-name": "use --job-name",
    "time": "use --time",
    "partition": "use --partition",
    "account": "use --account",
    "qos": "use --qos",
    "output": "use --output",
    "signal": "use --signal-seconds",
    "exclude": "use --exclude",
    "requeue": "use --requeue",
    "no-requeue": "use --no-requeue",
    "no-kill": "use --spares",
    "open-mode": "the log has to outlive a requeue",
    "export": "the plan reaches the ranks through the exported environment",
    "array": "each array task would run the same plan on the same checkpoint",
    "segment": "the plan fixes it: leave it out by --no-segment",
    "wrap": "the script is the program",
}
"""Options of sbatch that the script sets itself, or must not have, and why."""

_SBATCH_OPTION = re.compile(r"--(?P<name>[a-z][a-z0-9-]*)(?:=(?P<value>.*))?", re.DOTALL)


def sbatch_option(option: str) -> tuple[str, str | None]:
    """(name, value) of one extra option. Raises SpecError for one the script must set itself."""
    match = _SBATCH_OPTION.fullmatch(option)
    if match is None:
        raise SpecError(
            f"sbatch option {option!r} must be written --name or --name=value, "
            "such as --constraint=h100"
        )
    name = match["name"]
    # sbatch takes any unambiguous beginning of a name, so --gpus-per-nod is --gpus-per-node.
    for reserved, reason in RESERVED_SBATCH.items():
        if name == reserved or (len(name) > 2 and reserved.startswith(name)):
            raise SpecError(f"sbatch option --{name} cannot be added ({reason}): leave it out")
    return name, match["value"]
