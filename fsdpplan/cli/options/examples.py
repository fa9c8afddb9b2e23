"""What can be typed, of each command: the end of its help.

`tests/cli/test_help.py` reads each of them as the command would, and runs those that are quick.
"""

from __future__ import annotations

import re
import textwrap

EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "": (
        ("recommend --params 70e9 --gpus 64", "the best layout, saved as fsdpplan.json"),
        ("emit-launch > job.sbatch", "the script that runs it"),
        ("help recommend", "options and examples of one command"),
    ),
    "recommend": (
        ("recommend --params 70e9 --gpus 64", "on the machines that are found here"),
        (
            "recommend --model llama-3.1-8b --gpus 8 --hardware dgx-h100 --seq-len 16k",
            "a model and machines of the catalogues",
        ),
        (
            "recommend --model llama-3.1-70b --gpus 64:512 --tokens 2T --deadline 30d --price 2.10",
            "how many GPUs, too",
        ),
    ),
    "estimate": (
        (
            "estimate --params 8e9 --gpus 16 --dp-shard 8 --dp-replicate 2",
            "HSDP; what is not said is as recommend would choose it",
        ),
        ("estimate --model gpt2-xl --gpus 8 --hardware dgx-a100 --sharding ddp --json", ""),
        (
            "estimate --from ds_config.json --model llama-3.1-8b --gpus 8",
            "what DeepSpeed, Accelerate or torchtitan is told",
        ),
    ),
    "explain": (
        ("explain", "every term of fsdpplan.json with its formula"),
        ('explain --why "tp 4"', "what lost that layout, and where it would win"),
        ("explain plan.json --nccl", "the variables that its job gets, and why"),
    ),
    "what-if": (
        ("what-if --inter-bw 400Gb/s", "fsdpplan.json on another network"),
        ("what-if --gain 10%", "what brings so much more, the cheapest first"),
        ("what-if plan.json --gpus 128 --save larger.json", ""),
    ),
    "compare": (
        ("compare a.json b.json --tokens 1T", "saved plans, in days and GPU hours"),
        ("compare --params 8e9 --hardware dgx-h100,dgx-b200 --gpus 16,8", "two questions"),
    ),
    "sweep": (
        ("sweep --params 8e9 --gpus 8:256 --hardware dgx-h100", "the doublings from 8 to 256"),
        (
            "sweep --params 70e9 --gpus 64,128 --hardware dgx-h100,dgx-b200 --csv > curves.csv",
            "as a table for other programs",
        ),
    ),
    "replan": (
        ("replan --gpus 56", "the run of fsdpplan.json goes on with a node less"),
        (
            "replan plan.json --gpus 128 --checkpoint-dir /shared/run --storage-bw 20GB/s",
            "with the time to read that checkpoint",
        ),
    ),
    "diff": (
        ("diff a.json b.json", ""),
        ("diff a.json b.json --json", "for a program"),
    ),
    "check": (
        ("check --list", "what a condition may name"),
        ("check plan.json --assert 'mfu >= 0.38 and peak_reserved <= 72GiB'", "code 6 if false"),
        ("check plan.json --lock plan.lock --write-lock", ""),
    ),
    "report": (
        ("report", "fsdpplan.json as report.html"),
        (
            "report plan.json --gpus 8:512 --tokens 2T --out plan.html",
            "how it scales and what it takes, too",
        ),
        ("report --run runs/last --out run.html", "predicted beside measured"),
    ),
    "emit-launch": (
        ("emit-launch > job.sbatch", "of fsdpplan.json; sbatch takes it, and bash"),
        ("emit-launch plan.json --out job --steps 1000 --checkpoint-dir /shared/run", "a folder"),
        ("emit-launch --target kubernetes --image registry/torch:2.9 > job.yaml", ""),
    ),
    "rehearse": (
        ("rehearse", "the program of fsdpplan.json, all ranks in one process here"),
        ("rehearse plan.json --ranks 0,last", "of those ranks only"),
    ),
    "run": (
        ("run", "the job of fsdpplan.json, here or through Slurm, and how it compares"),
        ("run --dry-run", "what it would start"),
        ("run --attach", "follow the job that is under way"),
    ),
    "status": (
        ("status", "all runs of this folder"),
        ("status --json", "for a program"),
    ),
    "logs": (
        ("logs --follow", "of the newest run of this folder, until it ends"),
        ("logs --node n07 --tail 100", ""),
    ),
    "cancel": (
        ("cancel", "the run of this folder that goes on"),
        ("cancel --all", ""),
    ),
    "verify": (
        ("verify", "the newest run of this folder"),
        ("verify metrics.jsonl --plan plan.json --min-mfu 40% --max-error 15%", "code 6 past one"),
    ),
    "export": (
        ("export --checkpoint-dir /shared/ckpt --out /shared/model", ""),
        (
            "export --checkpoint-dir ckpt --out model --init-from Llama-3.1-8B",
            "with the config and tokenizer that the run began with",
        ),
    ),
    "trace": (
        ("trace --out plan.trace.json", "fsdpplan.json, for Perfetto"),
        ("trace --overlay real_trace.json --out both.json.gz", "and where a profile differs most"),
    ),
    "learn": (
        ("learn my_runs.csv", "a table of measured runs, of any software"),
        ("learn fsdpplan-runs/20260101-120000 --ledger ours.sqlite", "a run's folder"),
    ),
    "ledger": (
        ("ledger", "the newest runs, and the errors of each cluster"),
        ("ledger --cluster dgx-h100 --export runs.jsonl", ""),
    ),
    "detect": (
        ("detect", "this machine"),
        ("detect --nodes --save mycluster", "all nodes of an allocation, and their profile"),
    ),
    "calibrate": (
        ("calibrate --save ours.toml", "all GPUs here, as a profile"),
        ("calibrate --check --hardware ours.toml --seconds 30", "code 6 where one is slow"),
    ),
    "validate": (
        ("validate", "the published runs"),
        ("validate my_runs.csv --leave-one-out", "yours, each after learning from the others"),
    ),
    "profiles": (
        ("profiles", "all of them"),
        ("profiles dgx-h100", "its numbers with their sources"),
        ("profiles 8 a100 --kind node", "those that have these words"),
    ),
    "models": (
        ("models", "all of them"),
        ("models moe 100b..500b", "mixtures of that size"),
        ("models llama-3.1-70b --json", ""),
    ),
    "bug-report": (
        ("bug-report --out report.md", "to read before you send it"),
        ("bug-report --plan plan.json --run newest", "with the end of that run"),
    ),
}
"""Command (empty: the program itself) -> what is typed after `fsdpplan`, and what that does."""

_BREAKS = re.compile(r" (?=--?[a-z]|> )")
"""Where a command may go on in the next line."""


def example_lines(command: str, *, width: int) -> str:
    """The examples, each command with its end of line escaped where it is too wide, so that it can
    be pasted as it stands."""
    return "\n".join(
        "\n".join((*_command_lines(f"fsdpplan {typed}", width), *_said(words, width)))
        for typed, words in EXAMPLES.get(command, ())
    )


def _said(words: str, width: int) -> list[str]:
    indent = " " * 6
    return textwrap.wrap(words, width, initial_indent=indent, subsequent_indent=indent)


def _command_lines(text: str, width: int) -> list[str]:
    lines, line = [], "  "
    for index, part in enumerate(_BREAKS.split(text)):
        if index and len(line) + 1 + len(part) + len(" \\") > width:
            lines.append(f"{line} \\")
            line = f"      {part}"
        else:
            line += f" {part}" if index else part
    return [*lines, line]
