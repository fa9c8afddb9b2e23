"""What this program was doing when it failed by a fault of its own: kept for a bug report."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fsdpplan import __version__
from fsdpplan.emit.safe_text import is_secret_name, redacted, shell_word
from fsdpplan.errors import SpecError
from fsdpplan.files.ledger import ledger_path
from fsdpplan.files.table import text_of
from fsdpplan.files.writing import write_text_atomically

CRASH_NAME = "crash.json"
MAX_BYTES = 2**20

PREFIXES = (
    *("CUDA_", "FI_", "FSDPPLAN_", "GLOO_", "HSA_", "NCCL_", "OMP_", "PYTORCH_", "RCCL_"),
    *("TORCH_", "TORCHINDUCTOR_", "UCX_", "AWS_OFI_"),
)
NAMES = frozenset(
    {
        *("COLUMNS", "HIP_VISIBLE_DEVICES", "LANG", "LC_ALL", "NO_COLOR", "ROCR_VISIBLE_DEVICES"),
        *("TERM", "SLURM_CPUS_ON_NODE", "SLURM_CPUS_PER_TASK", "SLURM_GPUS_ON_NODE"),
        *("SLURM_GPUS_PER_NODE", "SLURM_JOB_CPUS_PER_NODE", "SLURM_JOB_NUM_NODES"),
        *("SLURM_LOCALID", "SLURM_MEM_PER_NODE", "SLURM_NNODES", "SLURM_NODEID", "SLURM_NTASKS"),
        *("SLURM_NTASKS_PER_NODE", "SLURM_PROCID", "SLURM_RESTART_COUNT", "SLURM_TASKS_PER_NODE"),
    }
)
"""What a report may say of the environment; SLURM_* has users, accounts, hosts and a token."""
WITHOUT = frozenset({"FSDPPLAN_PLAN"})
"""Is a whole plan."""


def allowed(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of which a report may have the values."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if (name in NAMES or name.startswith(PREFIXES))
        and name not in WITHOUT
        and not is_secret_name(name)
    }


def note_crash(words: Sequence[str], error: BaseException) -> bool:
    """Keep what is known of an error of ours, for this user alone; whether that could be done."""
    said = "".join(traceback.format_exception(error))
    document = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "fsdpplan": __version__,
        "python": sys.version.split()[0],
        "command": redacted(" ".join(map(shell_word, words))),
        "traceback": redacted(said),
        "environment": allowed(os.environ),
    }
    try:
        place = crash_path()
        place.parent.mkdir(parents=True, exist_ok=True)
        before = os.umask(0o077)
        try:
            write_text_atomically(place, json.dumps(document, indent=2) + "\n")
        finally:
            os.umask(before)
    except (OSError, SpecError):
        return False
    return True


def crash_path() -> Path:
    """Beside the ledger of the user."""
    return ledger_path().with_name(CRASH_NAME)


def last_crash() -> dict[str, Any] | None:
    """What was kept last; None where nothing was, or it cannot be read."""
    try:
        found = json.loads(text_of(crash_path(), limit_bytes=MAX_BYTES))
    except (ValueError, SpecError):
        return None
    return found if isinstance(found, dict) else None
