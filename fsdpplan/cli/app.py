"""The program: its commands, and the one place where errors become messages and exit codes."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.main import get_command

from fsdpplan import __version__
from fsdpplan.cli import process
from fsdpplan.cli.commands import SETTINGS, SUMMARIES, Program
from fsdpplan.cli.views.render import PROGRAM, tell
from fsdpplan.emit.safe_text import printable, redacted, secret_values, without_values
from fsdpplan.errors import (
    FsdpPlanError,
    LaunchError,
    NoFeasibleLayout,
    ProbeError,
    SpecError,
    did_you_mean,
)

COMPLETES = "_FSDPPLAN_COMPLETE"
"""The variable by which a shell asks what can be typed."""

INTERRUPTED = 130
BROKEN_PIPE = 141
"""What a shell shows for a program that the closing of its pipe ended."""
BAD_INPUT = 2
FAULT = 1
"""Of this program; also Python's own."""

USAGE_ERROR: Any = typer.BadParameter.__base__
"""click's UsageError: newer releases of Typer carry a click of their own."""

_NO_COMMAND = re.compile(r"No such command '(.*?)'(?:\.|$)", re.S)

_NO_ARGUMENT = re.compile(r"Got unexpected extra arguments?(?:\(s\))? \((.+)\)", re.S)

app = typer.Typer(
    name=PROGRAM,
    cls=Program,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True, context_settings=SETTINGS)
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
    """What the console script runs."""
    try:
        process.go_on()
        if COMPLETES in os.environ:
            app(prog_name=PROGRAM)
        code = exit_code_of(sys.argv[1:])
        process.be_deaf()
    except KeyboardInterrupt as error:  # in the moments before all is heard, and after all is said
        process.be_deaf()
        code = process.exit_code_of_signal(error)
    except Exception as error:
        code = _crashed(error, sys.argv[1:])
    sys.exit(code)


def _crashed(error: Exception, words: list[str]) -> int:
    """Say that this is a fault of this program, and how to tell those who can mend it."""
    import traceback

    from fsdpplan.run.crash import note_crash

    traceback.print_exception(error)
    noted = note_crash(words, error)
    lost = "" if noted else ", with what stands above"
    message = (
        f"that is a fault of {PROGRAM}, not of yours: {PROGRAM} bug-report --out report.md writes "
        f"down what helps to mend it{lost}; read that before you pass it on"
    )
    return _report(message, type(error).__name__, FAULT, words)


def exit_code_of(words: Sequence[str]) -> int:
    """Run the program with these arguments."""
    try:
        code = _run(list(words))
        sys.stdout.flush()
    except BrokenPipeError:
        return _close_quietly(BROKEN_PIPE)
    except process.OutputFailed as failed:
        if isinstance(failed.cause, BrokenPipeError):
            return _close_quietly(BROKEN_PIPE)
        reason = failed.cause.strerror or failed.cause
        tell(f"standard output cannot be written to: {reason}; send it elsewhere")
        return _close_quietly(BAD_INPUT)
    except KeyboardInterrupt as error:  # once more, while it was leaving
        return process.exit_code_of_signal(error)
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
        where = _help_command(error, words)
        message = f"{_misused(error)}; type {where} for its options"
        return _report(redacted(message), "UsageError", BAD_INPUT, words)
    except BrokenPipeError:
        raise
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "torch":
            raise
        from fsdpplan.topology.probe import without_torch

        code = LaunchError.exit_code
        return _report(without_torch("this"), LaunchError.__name__, code, words)
    except OSError as error:
        refused = _refused(error)
        return _report(str(refused), type(refused).__name__, refused.exit_code, words)
    except MemoryError:
        message = "this machine has no memory left for it; free some, and type it again"
        return _report(message, ProbeError.__name__, ProbeError.exit_code, words)
    except KeyboardInterrupt as error:
        code = process.exit_code_of_signal(error)
        typer.echo("interrupted" if code == INTERRUPTED else "terminated", err=True)
        return code
    return 0


def _refused(error: OSError) -> FsdpPlanError:
    """What the system refused, where no place nearer to it said what was being done."""
    from fsdpplan.files.table import path_text

    reason = error.strerror or str(error)
    if not isinstance(error.filename, str | bytes):
        return ProbeError(f"this machine refused to go on: {reason}; see to that, and try again")
    place = path_text(os.fsdecode(error.filename))
    return SpecError(f"{place} cannot be used: {reason}; check the path and its permissions")


def _report(
    message: str, kind: str, code: int, words: list[str], more: Mapping[str, Any] | None = None
) -> int:
    """Say on stderr, and with --json also on stdout, what went wrong."""
    # It may hold what another program said, such as sbatch.
    message = printable(without_values(message, known=secret_values(os.environ)))
    tell(message)
    if "--json" in words:
        import json

        error = {"kind": kind, "message": message, "exit_code": code, **(more or {})}
        typer.echo(json.dumps({"error": error}, indent=2))
    return code


def _misused(error: Any) -> str:
    """What was wrong with the words, with the nearest command or option that there is."""
    said = str(error.format_message()).rstrip(".")
    if found := _NO_COMMAND.match(said):
        return f"there is no command {found[1]}{did_you_mean(found[1], SUMMARIES)}"
    if error.ctx is None:
        return said
    options = (one for one in error.ctx.command.params if one.param_type_name == "option")
    known = [name for one in options for name in (*one.opts, *one.secondary_opts)]
    if found := _NO_ARGUMENT.match(said):  # such as `recommend tp 4`
        word = found[1].split(" ")[0]
        return f"{error.ctx.info_name} takes no word {word}{did_you_mean(word, known)}"
    option = getattr(error, "option_name", None)
    if type(error).__name__ != "NoSuchOption" or not isinstance(option, str):
        return said
    return f"there is no option {option}{did_you_mean(option, known)}"


def _help_command(error: Any, words: list[str]) -> str:
    path = error.ctx.command_path if error.ctx is not None else PROGRAM
    if path == PROGRAM and words and words[0] in getattr(get_command(app), "commands", {}):
        path = f"{PROGRAM} {words[0]}"  # an option without its value has no context of its own
    return f"`{path} --help`"


def _close_quietly(code: int) -> int:
    """Nothing more can be printed: keep Python from trying when it flushes at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, process.OutputFailed):
            os.dup2(null, stream.fileno())
    return code
