"""`fsdpplan completion`: what a shell offers when Tab is pressed, put into it by one command."""

from __future__ import annotations

import json as jsons
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NotRequired, TypedDict, get_args

import typer

from fsdpplan.cli.options.expand import Flag
from fsdpplan.cli.options.files import Json
from fsdpplan.cli.options.parse import choice
from fsdpplan.cli.views.render import note
from fsdpplan.errors import ProbeError, SpecError
from fsdpplan.files.table import path_text, read_text
from fsdpplan.files.writing import write_text_atomically

Shell = Literal["bash", "zsh", "fish"]

ShellName = Annotated[
    str | None,
    typer.Argument(metavar="bash|zsh|fish", help="Default: the shell that this was typed into."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOptions:
    """What is done with the script."""

    HEADING: ClassVar[str] = "Completion"

    install: Annotated[
        bool | None,
        Flag(name="--install", help="Put it where the shell finds it, for this user; say where."),
    ] = None
    uninstall: Annotated[
        bool | None, Flag(name="--uninstall", help="Take back what --install has done.")
    ] = None


class CompletionJson(TypedDict):
    """What `completion --json` prints."""

    shell: Shell
    script: NotRequired[str]
    """Without --install and --uninstall."""
    done: NotRequired[list[str]]
    """With one of them: what was done, in sentences."""


BASH = """\
# Completion of fsdpplan in bash; `fsdpplan completion bash` prints it.
_fsdpplan() {
    local line
    COMPREPLY=()
    while IFS= read -r line; do
        [ -n "$line" ] && COMPREPLY+=("$line")
    done < <(_FSDPPLAN_COMPLETE=bash fsdpplan "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
    case "${COMPREPLY[0]-}" in
    */) compopt -o nospace 2>/dev/null ;; # a folder, which goes on
    esac
}
complete -F _fsdpplan fsdpplan
"""

ZSH = """\
#compdef fsdpplan
# Completion of fsdpplan in zsh; `fsdpplan completion zsh` prints it.
_fsdpplan() {
    local line word
    local -a found folders
    local -a typed=("${(@Q)words[2,CURRENT]}")
    for line in "${(@f)$(_FSDPPLAN_COMPLETE=zsh fsdpplan "${(@)typed}" 2>/dev/null)}"; do
        word="${line%%$'\\t'*}"
        if [[ -z "$word" ]]; then
            continue
        elif [[ "$word" == */ ]]; then
            folders+=("$word") # it goes on
        else
            found+=("${word//:/\\\\:}:${line#*$'\\t'}")
        fi
    done
    (( $#found )) && _describe fsdpplan found
    (( $#folders )) && compadd -S '' -- "${(@)folders}"
}
if (( ! $+functions[compdef] )); then
    autoload -Uz compinit && compinit -i
fi
compdef _fsdpplan fsdpplan
"""

FISH = """\
# Completion of fsdpplan in fish; `fsdpplan completion fish` prints it.
function __fsdpplan_complete
    set -l typed (commandline -opc)
    set -l current (commandline -ct)
    set -lx _FSDPPLAN_COMPLETE fish
    fsdpplan $typed[2..-1] "$current" 2>/dev/null
end
complete -c fsdpplan -f -a '(__fsdpplan_complete)'
"""

SCRIPTS: dict[Shell, str] = {"bash": BASH, "zsh": ZSH, "fish": FISH}

BEGIN = "# >>> fsdpplan completion >>>"
END = "# <<< fsdpplan completion <<<"

NOTHING = "nothing to do"

MOST_BYTES = 4 << 20
"""Of a file that a shell reads when it starts."""


def completion(*, shell: ShellName = None, options: CompletionOptions, json: Json = False) -> None:
    """Complete commands, options, models and profiles by Tab.

    In bash, zsh and fish. By itself it prints the script; --install puts it where the shell reads
    it, once however often it is typed.
    """
    if options.install and options.uninstall:
        raise SpecError("--install and --uninstall contradict each other: give one of them")
    name = _shell(shell)
    if not (options.install or options.uninstall):
        script = SCRIPTS[name]
        printed: CompletionJson = {"shell": name, "script": script}
        typer.echo(jsons.dumps(printed) if json else script, nl=json)
        return
    done = installed(name) if options.install else uninstalled(name)
    if json:
        document: CompletionJson = {"shell": name, "done": done}
        typer.echo(jsons.dumps(document, indent=2))
        return
    for sentence in done:
        note(sentence)
    if options.install and not done[0].startswith(NOTHING):
        note(f"next: open a new {name}, and press Tab behind fsdpplan")


def _shell(name: str | None) -> Shell:
    if name is not None:
        parsed = choice(Shell)(name, name="completion")
        return next(one for one in SCRIPTS if one == parsed)
    for found in (_parent(), os.path.basename(os.environ.get("SHELL", ""))):
        for one in SCRIPTS:
            if one == found:
                return one
    names = " or ".join(get_args(Shell))
    raise ProbeError(f"which shell this is cannot be told: type fsdpplan completion {names}")


MOST_PARENTS = 8


def _parent() -> str:
    """The nearest shell above this program; empty where it cannot be told, as without /proc."""
    process = os.getppid()
    for _ in range(MOST_PARENTS):
        try:
            status = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        # its name stands in brackets, and may hold some itself
        head, _, rest = status.rpartition(")")
        name = head.partition("(")[2].lstrip("-")
        if name in SCRIPTS:
            return name
        process = int(rest.split()[1])
    return ""


def installed(shell: Shell) -> list[str]:
    """Write the script, and have the shell read it; what was done, in sentences."""
    script = _script_place(shell)
    done = [f"wrote {path_text(script)}"] if _write(script, SCRIPTS[shell]) else []
    if (start := _start_file(shell)) is not None:
        old = _text(start)
        block = _block(script)
        if block not in old:
            _write(start, f"{_without_block(old)}{block}")
            done.append(f"{path_text(start)} reads it now, by the lines at its end")
    return done or [f"{NOTHING}: {path_text(script)} is there, and {shell} reads it"]


def uninstalled(shell: Shell) -> list[str]:
    """Take both back; what was done, in sentences."""
    done = []
    if (start := _start_file(shell)) is not None and BEGIN in (old := _text(start)):
        write_text_atomically(start, _without_block(old), advice="take the lines out by hand")
        done.append(f"took its lines out of {path_text(start)}")
    script = _script_place(shell)
    if script.is_file():
        script.unlink()
        done.append(f"removed {path_text(script)}")
    return done or [f"{NOTHING}: {shell} has no completion of fsdpplan from here"]


def _write(place: Path, text: str) -> bool:
    """Write it if it is not there; whether it had to be."""
    if place.is_file() and _text(place) == text:
        return False
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise SpecError(
            f"{path_text(place)} cannot be written: {reason}; type fsdpplan completion without "
            "--install, and put what it prints where your shell reads it"
        ) from error
    write_text_atomically(place, text, advice="type fsdpplan completion without --install")
    return True


def _text(place: Path) -> str:
    if not place.exists():
        return ""
    return read_text(place, limit_bytes=MOST_BYTES, what="shell's start file")


def _block(script: Path) -> str:
    import shlex

    place = shlex.quote(str(script))
    return f"{BEGIN}\n[ -r {place} ] && . {place}\n{END}\n"


def _without_block(text: str) -> str:
    """`text` without our lines, which end in a line of its own."""
    head, begin, rest = text.partition(f"{BEGIN}\n")
    _, end, tail = rest.partition(f"{END}\n")
    if begin and end:
        text = head + tail
    return text if not text or text.endswith("\n") else f"{text}\n"


def _script_place(shell: Shell) -> Path:
    if shell == "fish":
        return _base("XDG_CONFIG_HOME", ".config") / "fish" / "completions" / "fsdpplan.fish"
    return _base("XDG_DATA_HOME", ".local/share") / "fsdpplan" / f"completion.{shell}"


def _start_file(shell: Shell) -> Path | None:
    """What the shell reads first; None of fish, which looks for the script itself."""
    match shell:
        case "bash":
            return Path.home() / ".bashrc"
        case "zsh":
            return Path(os.environ.get("ZDOTDIR") or Path.home()) / ".zshrc"
    return None


def _base(variable: str, otherwise: str) -> Path:
    given = os.environ.get(variable, "")
    return Path(given) if os.path.isabs(given) else Path.home() / otherwise
