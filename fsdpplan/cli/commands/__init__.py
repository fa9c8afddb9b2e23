"""The commands by name, each imported when it is asked for: one process runs one of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from fsdpplan.cli.options.expand import GroupedCommand, OwnParsing, expanded, write_examples
from fsdpplan.cli.views.render import PROSE_COLUMNS
from fsdpplan.cli.working import watching

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
    "report": "Write a saved plan as one page to look at: charts, no network.",
    "trace": "The predicted step as a trace, beside a measured one.",
    "emit-launch": "Print what launches a plan: for Slurm, Kubernetes or others.",
    "rehearse": "Run the plan's program at full size on one CPU; no GPU.",
    "run": "Run the job and compare it with the prediction.",
    "status": "Show how the runs of this folder stand.",
    "logs": "Print what a run has printed, on all nodes.",
    "cancel": "End a run of this folder.",
    "verify": "Compare a finished run with its plan; gates.",
    "export": "Write a checkpoint for transformers, or adapters for PEFT.",
    "learn": "Take measured runs into the ledger, for plans to learn from.",
    "ledger": "Show finished runs and how far their plans were off.",
    "detect": "What this machine and its network are, and their profile.",
    "calibrate": "Measure this machine: write its profile, or check it.",
    "validate": "Predict a table of measured runs, and report the errors.",
    "profiles": "Hardware profiles: list or search them, or show one.",
    "models": "Catalogue of models: list or search it, or show one.",
    "bug-report": "What helps to mend a fault, without secrets and names.",
}
"""Command -> its line on the first help page, which is the first sentence of its docstring: that
page imports no command. In the order of the page."""

SECTIONS = {
    "recommend": "Plan",
    "what-if": "Ask what follows",
    "report": "Look at it",
    "emit-launch": "Launch and run",
    "verify": "After the run",
    "detect": "Machines, models and measurements",
    "bug-report": "The program itself",
}
"""Command -> the heading before it on the first help page."""

AT_WORK = {
    **dict.fromkeys(
        ("recommend", "estimate", "explain", "what-if", "compare", "sweep", "replan"),
        "searching layouts",
    ),
    **dict.fromkeys(("status", "cancel"), "asking the scheduler"),
    **dict.fromkeys(("emit-launch", "run", "check"), "preparing"),
    "rehearse": "rehearsing",
    "verify": "reading the run",
    "report": "drawing the plan",
    "trace": "playing the step",
    "bug-report": "looking at this machine",
    "export": "writing the model",
    "learn": "reading the runs",
    "detect": "looking at this machine",
    "calibrate": "preparing",
    "validate": "predicting the runs",
}
"""Command -> what is said of it once it takes long, until it says more itself; the others only
read."""

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": PROSE_COLUMNS}
"""Lines of help are no longer than can be read."""


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
    command = watching(expanded(function), AT_WORK.get(name, ""))
    alone.command(name=name, cls=GroupedCommand, context_settings=SETTINGS)(command)
    return get_command(alone)


class Program(OwnParsing, TyperGroup):
    """The group of all commands."""

    def __init__(self, **of: Any) -> None:
        super().__init__(**of)
        self.commands: Any = Commands()

    def list_commands(self, ctx: Any) -> list[str]:
        """Their names; none is imported."""
        return list(self.commands)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """The commands and the program's own options, for Tab; no command is imported."""
        self.commands = {name: TyperCommand(name, help=said) for name, said in SUMMARIES.items()}
        return list(super().shell_complete(ctx, incomplete))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the first page's sections of commands; none is imported."""
        sections: list[tuple[str, list[tuple[str, str]]]] = []
        for name, summary in SUMMARIES.items():
            if name in SECTIONS:
                sections.append((SECTIONS[name], []))
            sections[-1][1].append((name, summary))
        longest = max(map(len, SUMMARIES))
        for heading, lines in sections:
            with formatter.section(heading):
                formatter.write_dl([(f"{name:<{longest}}", summary) for name, summary in lines])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """What to type first."""
        write_examples("", formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """`help COMMAND` is `COMMAND --help`."""
        if args[:1] == ["help"]:
            args = [*args[1:2], "--help"]
        return list(super().parse_args(ctx, args))
