"""The commands by name, each imported when it is asked for: one process runs one of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from fsdpplan.cli.options.expand import GroupedCommand, OwnParsing, expanded

SUMMARIES = {
    "recommend": "Search, rank, explain on one screen, save the plan.",
    "estimate": "Predict the time and memory of one layout.",
    "explain": "Explain a plan: its terms, its environment, or why not another.",
    "what-if": "A saved plan under other inputs: what changes, by terms.",
    "compare": "Compare saved plans, or questions, side by side.",
    "sweep": "How a training scales over numbers of GPUs, with the knee.",
    "replan": "Plan a saved plan again for more or fewer GPUs: a run goes on.",
    "diff": "What two saved plans say otherwise, term by term.",
    "check": "Check a saved plan: conditions on its numbers, and its lock.",
    "emit-launch": "Print what launches a plan: for Slurm, Kubernetes or others.",
    "rehearse": "Run the plan's program at full size on one CPU; no GPU.",
    "run": "Run the job and compare it with the prediction.",
    "status": "Show how the runs of this folder stand.",
    "logs": "Print what a run has printed, on all nodes.",
    "cancel": "End a run of this folder.",
    "trace": "The predicted step as a trace, beside a measured one.",
    "verify": "Compare a finished run with its plan; gates.",
    "export": "Write a checkpoint as transformers loads it.",
    "learn": "Take measured runs into the ledger, for plans to learn from.",
    "ledger": "Show finished runs and how far their plans were off.",
    "detect": "What this machine and its network are, and their profile.",
    "calibrate": "Measure this machine: write its profile, or check it.",
    "validate": "Predict a table of measured runs, and report the errors.",
    "profiles": "Hardware profiles: list or search them, or show one.",
    "models": "Catalogue of models: list it, or show one.",
}
"""Command -> its line on the first help page, which is the first sentence of its docstring: that
page imports no command. In the order of the page."""

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 80}


class Commands(Mapping[str, Any]):
    """The commands of the program: `emit-launch` is `emit_launch` of
    `fsdpplan.cli.commands.emit_launch`."""

    def __getitem__(self, name: str) -> Any:
        if name not in SUMMARIES:
            raise KeyError(name)
        return _command(name)

    def __iter__(self) -> Iterator[str]:
        return iter(SUMMARIES)

    def __len__(self) -> int:
        return len(SUMMARIES)


def _command(name: str) -> Any:
    word = name.replace("-", "_")
    function = getattr(import_module(f"fsdpplan.cli.commands.{word}"), word)
    # rich's help costs 50 ms, and draws boxes into pipes
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.command(name=name, cls=GroupedCommand, context_settings=SETTINGS)(expanded(function))
    return get_command(alone)


class Program(OwnParsing, TyperGroup):
    """The group of all commands."""

    def __init__(self, **of: Any) -> None:
        super().__init__(**of)
        self.commands: Any = Commands()

    def list_commands(self, ctx: Any) -> list[str]:
        """Their names; none is imported."""
        return list(self.commands)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the first page's section of commands; none is imported."""
        with formatter.section("Commands"):
            formatter.write_dl(list(SUMMARIES.items()))
