"""The options that most people need: `--help` of a command with many shows these, `--help-all`
all of them."""

from __future__ import annotations

MOST_SHOWN = 36
"""Options of a command that are all shown by `--help`."""

EVERYDAY = frozenset(
    {
        # the question
        "--params",
        "--active-params",
        "--model",
        "--config",
        "--gpus",
        "--hardware",
        "--gpus-per-node",
        "--inter-bw",
        "--min-gpus",
        "--from",
        "--from-slurm",
        "--seq-len",
        "--global-batch",
        "--fine-tune",
        "--data",
        "--tokens",
        "--epochs",
        "--precision",
        "--optimizer",
        "--program",
        "--objective",
        "--price",
        "--provider",
        "--deadline",
        "--torch",
        # the layout
        "--dp-replicate",
        "--dp-shard",
        "--tp",
        "--cp",
        "--pp",
        "--ep",
        "--micro-batch",
        "--activation-checkpointing",
        "--offload",
        # the job
        "--target",
        "--script",
        "--out",
        "--time",
        "--partition",
        "--account",
        "--nodes",
        "--exclude",
        "--container",
        "--image",
        "--env-setup",
        "--steps",
        "--learning-rate",
        "--warmup-steps",
        "--init-from",
        "--checkpoint-dir",
        "--checkpoint-every",
        "--export-hf",
        "--export-peft",
        "--resume",
        "--attach",
        "--chain",
        "--dry-run",
        # what is read and written
        "--plan",
        "--runs",
        "--goodput",
        "--save",
        "--no-save",
        "--json",
        "--help",
    }
)
"""Flags, of all commands together."""
