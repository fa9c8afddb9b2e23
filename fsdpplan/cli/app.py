"""The program: its commands, and the one place where errors become messages and exit codes."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.main import get_command

from fsdpplan import __version__
from fsdpplan.cli import (
    calibrate,
    cancel,
    detect,
    emit_launch,
    estimate,
    explain,
    learn,
    ledger,
    logs,
    models,
    profiles,
    recommend,
    rehearse,
    run,
    status,
    validate,
    verify,
)
from fsdpplan.cli.expand import GroupedCommand, Program, expanded
from fsdpplan.cli.render import printable
from fsdpplan.emit.secrets import redacted, secret_values, without_values
from fsdpplan.errors import FsdpPlanError, NoFeasibleLayout

PROGRAM = "fsdpplan"
INTERRUPTED = 130
BROKEN_PIPE = 141
"""What a shell shows for a program that the closing of its pipe ended."""
BAD_INPUT = 2
OTHER = 1

USAGE_ERROR: Any = typer.BadParameter.__base__
"""click's UsageError: newer releases of Typer carry a click of their own."""

app = typer.Typer(
    name=PROGRAM,
    cls=Program,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich's help costs 50 ms, and draws boxes into pipes
)

for command in (
    recommend.recommend,
    estimate.estimate,
    explain.explain,
    emit_launch.emit_launch,
    rehearse.rehearse,
    run.run,
    status.status,
    logs.logs,
    cancel.cancel,
    verify.verify,
    learn.learn,
    ledger.ledger,
    detect.detect,
    calibrate.calibrate,
    validate.validate,
    profiles.profiles,
    models.models,
):
    app.command(
        name=command.__name__.replace("_", "-"),
        cls=GroupedCommand,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
    )(expanded(command))


@app.callback(
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
)
def start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Plan distributed PyTorch training: recommend a layout, emit its launch script, run it."""
    if version:
        typer.echo(f"{PROGRAM} {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> NoReturn:
    """The console script."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A name from somebody's file must not end the program on an ASCII terminal.
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(exit_code_of(sys.argv[1:]))


def exit_code_of(words: Sequence[str]) -> int:
    """Run the program with these arguments."""
    try:
        code = _run(list(words))
        sys.stdout.flush()
    except BrokenPipeError:
        return _close_quietly(BROKEN_PIPE)
    except OSError as error:  # a full disk behind stdout, for one
        typer.echo(f"{PROGRAM}: cannot write: {error.strerror or error}", err=True)
        return _close_quietly(OTHER)
    return code


def _run(words: list[str]) -> int:
    try:
        with get_command(app).make_context(PROGRAM, words) as context:
            context.command.invoke(context)
    except typer.Exit as done:
        return done.exit_code
    except FsdpPlanError as error:
        more = {"rejected": error.rejected} if isinstance(error, NoFeasibleLayout) else {}
        return _report(str(error), type(error).__name__, error.exit_code, words, more)
    except USAGE_ERROR as error:
        message = (
            f"{error.format_message().rstrip('.')}; type {_help_command(error)} for its options"
        )
        return _report(redacted(message), "UsageError", BAD_INPUT, words)
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        return INTERRUPTED
    return 0


def _report(
    message: str, kind: str, code: int, words: list[str], more: Mapping[str, Any] | None = None
) -> int:
    """Say on stderr, and with --json also on stdout, what went wrong."""
    # It may hold what another program said, such as sbatch.
    message = printable(without_values(message, known=secret_values(os.environ)))
    typer.echo(f"{PROGRAM}: {message}", err=True)
    if "--json" in words:
        import json

        error = {"kind": kind, "message": message, "exit_code": code, **(more or {})}
        typer.echo(json.dumps({"error": error}, indent=2))
    return code


def _help_command(error: Any) -> str:
    path = error.ctx.command_path if error.ctx is not None else PROGRAM
    return f"`{path} --help`"


def _close_quietly(code: int) -> int:
    """Nothing more can be printed: keep Python from trying when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code
