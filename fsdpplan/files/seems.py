"""What a text seems to be that is not what a command reads: for a message that helps."""

from __future__ import annotations

import re

_BEGINNING = 64 * 2**10
"""Characters that are looked at."""

_SEEMS: tuple[tuple[str, str, str], ...] = (
    (r"\A\s*\Z", "an empty file", ""),
    (r"\x00", "a binary file", ""),
    (
        r"^# *nThread .*minBytes|^# +size +count +type|^# Avg bus bandwidth",
        "a table of nccl-tests",
        "fsdpplan validate --collectives FILE",
    ),
    (
        r"(Weight|Hops|Link Type) between two GPUs|ROCm System Management Interface",
        "the output of rocm-smi",
        "",
    ),
    (r"<graphs[\s>]", "the graphs of NCCL_GRAPH_DUMP_FILE", ""),
    (r"<system[\s>]", "the topology of NCCL_TOPO_DUMP_FILE", "fsdpplan detect --from FILE"),
    (
        r"^\s*(\x1b\[4m)?GPU0\s+(GPU1|NIC0|CPU)\b",
        "the output of nvidia-smi topo -m",
        "fsdpplan detect --from FILE",
    ),
    (r"^CA '\w+'\s*$|^Infiniband device '", "the output of ibstat", "fsdpplan detect --from FILE"),
    (r"^hca_id:", "the output of ibv_devinfo", ""),
    (r"NVIDIA-SMI [0-9]", "the table of nvidia-smi", ""),
    (r"NCCL INFO ", "a log of NCCL", ""),
    (
        r"^[0-9a-f:.]+ (PCI bridge|3D controller|Ethernet controller)|^-\+?-?\[[0-9a-f:]+\]",
        "the output of lspci",
        "",
    ),
    (r"^#SBATCH ", "a Slurm script", ""),
    (r"\A\s*<\?xml|\A\s*<!DOCTYPE html|\A\s*<html", "XML or HTML", ""),
    (
        r'"(zero_optimization|train_micro_batch_size_per_gpu|train_batch_size)"\s*:',
        "a DeepSpeed configuration",
        "fsdpplan estimate --from FILE",
    ),
    (
        r"^(distributed_type|fsdp_config|deepspeed_config|compute_environment):",
        "an accelerate configuration",
        "fsdpplan estimate --from FILE",
    ),
    (
        r"^\[(job|model|parallelism|training|activation_checkpoint)\]",
        "a torchtitan configuration",
        "fsdpplan estimate --from FILE",
    ),
    (
        r'"(architectures|model_type|num_hidden_layers)"\s*:',
        "a Hugging Face model's config.json",
        "fsdpplan recommend --config FILE",
    ),
    (r'"estimate"\s*:|"runners_up"\s*:', "a plan of fsdpplan", ""),
    (r'"nvml"\s*:', "a recording of fsdpplan", "fsdpplan detect --from FILE"),
    (r"^apiVersion: ", "a Kubernetes manifest", ""),
    (r"^FROM \S+", "a Dockerfile", ""),
    (r"\A#!.*(ba)?sh\b", "a shell script", ""),
    (
        r"\A#!.*python|^(from \w[\w.]* import |import \w+|def \w+\(|class \w+)",
        "a Python program",
        "",
    ),
    (r"\A\s*[{\[]", "JSON", ""),
    (
        r"^kind = \"(device|node|cluster)\"",
        "a hardware profile of fsdpplan",
        "fsdpplan recommend --hardware FILE",
    ),
    (r"^\[[\w.]+\]\s*$", "TOML", ""),
    (r"\A[\w-]+(,[\w -]+){2,}$", "a table with commas (CSV)", ""),
    (r"\A(---|#.*\n)*\s*[\w-]+:( |$)", "YAML", ""),
)
"""(pattern, what it is, who reads it), the most telling first."""


def seems(text: str) -> str:
    """`it seems to be a Slurm script`, and which command reads such a file, if one does."""
    beginning = text[:_BEGINNING]
    for pattern, what, reader in _SEEMS:
        if re.search(pattern, beginning, re.MULTILINE):
            return f"it seems to be {what}" + (f", which {reader} reads" if reader else "")
    first = next(line.strip() for line in beginning.splitlines() if line.strip())
    return f"it begins with {first[:60]!r}"
