"""Groups of options: a dataclass whose fields become the flags of a command.

Every value arrives as text and is read by the field's own parser, so that all bad input ends in one
kind of error, which names the flag and what to type.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Annotated, Any, Generic, TypeVar, get_args, get_type_hints

import typer
from typer.core import TyperCommand

from fsdpplan.cli.options.everyday import EVERYDAY, MOST_SHOWN
from fsdpplan.cli.options.examples import example_lines
from fsdpplan.cli.options.offered import Offered, literals, one_of
from fsdpplan.cli.options.parse import (
    Choice,
    Parser,
    choice,
    line,
    number,
    positive,
    stage_blocks,
    whole,
)
from fsdpplan.errors import SpecError
from fsdpplan.spec.trainer_options import Option, kind_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One option; sits in the `Annotated` type of a group's field."""

    help: str
    metavar: str | None = None
    """What the help shows as value."""
    parse: Parser | None = None
    """Text to value. None: the option takes no value and is on or off."""
    many: bool = False
    """May be given more than once; the field is a tuple."""
    name: str | None = None
    """The flag where it is not the field's name with dashes."""
    offered: Offered | None = None
    """The values that a shell offers; None: those of its choice or its metavar."""


Group = TypeVar("Group", covariant=True)


@dataclass(frozen=True, slots=True)
class Each:
    """Marks a parameter of type `Lists`: the options of `group`, where those in `fields` take
    several values with commas between them."""

    group: type[Any]
    fields: tuple[str, ...] | None = None
    """None: all that take a value, but those whose one value has commas."""
    instead: Mapping[str, Flag] = field(default_factory=dict)
    """Field -> the flag that stands in the place of its own; its value is what that one reads."""

    def has_many(self, name: str, flag: Flag) -> bool:
        """Whether the field takes several values."""
        if name in self.instead or flag.parse in (None, stage_blocks):
            return False
        return self.fields is None or name in self.fields


@dataclass(frozen=True, slots=True)
class Lists(Generic[Group]):
    """Options of which each may have several values."""

    group: type[Group]
    values: Mapping[str, tuple[Any, ...]]
    """Field -> its values, of those that were given."""

    @property
    def longest(self) -> int:
        """Values of the option that has most."""
        return max(map(len, self.values.values()), default=1)

    def at(self, index: int, **other: Any) -> Group:
        """The options of the question number `index`: an option with one value has it in all of
        them; `other` values stand in the place of those that were given."""
        taken = {
            name: values[0] if len(values) == 1 else values[index]
            for name, values in self.values.items()
        }
        return self.group(**{**taken, **other})

    def require_length(self, length: int) -> None:
        """Raise SpecError where an option has several values, but not so many."""
        for name, values in self.values.items():
            if len(values) not in (1, length):
                raise SpecError(
                    f"--{name.replace('_', '-')} has {len(values)} values where another option "
                    f"has {length}: give one for all, or one for each"
                )


def flag_of(field_name: str, flag: Flag) -> str:
    """How the flag of a field is typed."""
    return flag.name or "--" + field_name.replace("_", "-")


def expanded(function: Callable[..., None]) -> Callable[..., None]:
    """A command for Typer: each parameter of a dataclass type becomes that dataclass's flags."""
    hints = get_type_hints(function, include_extras=True)
    names = list(inspect.signature(function).parameters)
    groups = {name: hints[name] for name in names if is_dataclass(hints[name])}
    groups |= {name: each for name in names for each in _marks(hints[name])}

    def command(**values: Any) -> None:
        built = {name: _group_value(group, values) for name, group in groups.items()}
        function(**{name: built[name] if name in built else values[name] for name in names})

    parameters = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in groups:
            parameters += _group_parameters(groups[name])
        else:
            parameters.append(parameter.replace(annotation=hints[name], kind=_KEYWORD))
    # Arguments come before options in Typer's usage line whatever their order here.
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__name__ = function.__name__
    command.__doc__ = function.__doc__
    return command


_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def _marks(hint: Any) -> list[Each]:
    return [one for one in get_args(hint) if isinstance(one, Each)]


def _group_parameters(group: Any) -> list[inspect.Parameter]:
    if isinstance(group, Each):
        return _list_parameters(group)
    panel = group.HEADING
    hints = get_type_hints(group, include_extras=True)
    return [_parameter(field.name, hints[field.name], panel) for field in fields(group)]


def _parameter(name: str, hint: Any, panel: str) -> inspect.Parameter:
    flag = _flag(name, hint)
    info = typer.Option(
        flag_of(name, flag),
        metavar=flag.metavar,
        help=flag.help,
        rich_help_panel=panel,
        autocompletion=_offered(flag),
    )
    kind: Any = bool if flag.parse is None else list[str] if flag.many else str
    return inspect.Parameter(name, _KEYWORD, annotation=Annotated[kind | None, info], default=None)


def _offered(flag: Flag) -> Offered | None:
    words = flag.parse.allowed if isinstance(flag.parse, Choice) else literals(flag.metavar)
    return flag.offered or (one_of(words) if words else None)


def _list_parameters(each: Each) -> list[inspect.Parameter]:
    hints = get_type_hints(each.group, include_extras=True)
    found = []
    for one in fields(each.group):
        hint = hints[one.name]
        if one.name in each.instead:
            hint = Annotated[Any | None, each.instead[one.name]]
        found.append(_parameter(one.name, hint, each.group.HEADING))
    return found


def _lists(each: Each, values: dict[str, Any]) -> Lists[Any]:
    hints = get_type_hints(each.group, include_extras=True)
    found = dict[str, tuple[Any, ...]]()
    for one in fields(each.group):
        value = values[one.name]
        if value is None:
            continue
        flag = each.instead.get(one.name) or _flag(one.name, hints[one.name])
        texts = value.split(",") if each.has_many(one.name, flag) else [value]
        found[one.name] = tuple(_one(one.name, flag, text) for text in texts)
    return Lists(each.group, found)


def _group_value(group: Any, values: dict[str, Any]) -> Any:
    if isinstance(group, Each):
        return _lists(group, values)
    hints = get_type_hints(group, include_extras=True)
    return group(**{f.name: _parsed(f.name, hints[f.name], values[f.name]) for f in fields(group)})


def with_texts(group: Any, texts: Mapping[str, str]) -> Any:
    """A group of options where those that were not given are read from `texts` (field -> what would
    be typed; yes or no for one without a value)."""
    hints = get_type_hints(type(group), include_extras=True)
    given = {f.name: getattr(group, f.name) for f in fields(group)}
    read = {
        name: text == "yes"
        if _flag(name, hints[name]).parse is None
        else _parsed(name, hints[name], text)
        for name, text in texts.items()
        if name in given and given[name] is None
    }
    return type(group)(**{**given, **read})


def _parsed(name: str, hint: Any, value: Any) -> Any:
    flag = _flag(name, hint)
    if flag.many:
        return tuple(_one(name, flag, text) for text in value or ())
    return None if value is None else _one(name, flag, value)


def _one(name: str, flag: Flag, value: Any) -> Any:
    return value if flag.parse is None else flag.parse(value, name=flag_of(name, flag))


def _flag(name: str, hint: Any) -> Flag:
    optional, *said = get_args(hint)
    for item in said:
        if isinstance(item, Flag):
            return item
        if isinstance(item, Option):
            return _flag_of_trainer(name, kind_of(optional), item)
    raise AssertionError(f"{name} has no flag")


def _flag_of_trainer(name: str, kind: Any, option: Option) -> Flag:
    """The flag of an option of the reference trainer."""
    word, example = name.replace("_", "-"), option.example or ""
    if kind is tuple:
        return Flag(help=option.text, metavar=option.metavar, parse=line, many=True)
    if kind is bool:
        return Flag(help=option.text, name=f"--{word}/--no-{word}")
    if kind is int:
        parse = whole(example=int(example), least=int(option.least or 0))
    elif kind is float:
        least, below = option.least, option.below
        parse = (
            positive(example=example)
            if least is None
            else number(example=example, least=least, below=below)
        )
    else:
        parse = line if kind is str else choice(kind)
    return Flag(help=option.text, metavar=option.metavar, parse=parse)


class OwnParsing:
    """Mixed into a command: its values go to their own parsers as they were typed.

    Typer would first pass each through pydantic, which costs a tenth of what `recommend` does.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters, the help option included."""
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            parameter.process_value = partial(_as_typed, parameter)
        return parameters


def _as_typed(parameter: Any, context: Any, value: Any) -> Any:
    if value and parameter.callback is not None:
        parameter.callback(context, parameter, value)
    return value


class GroupedCommand(OwnParsing, TyperCommand):
    """A command whose plain help lists the options under the headings of their groups."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The arguments as they are typed, in brackets where they may be left out."""
        arguments = (one for one in self.get_params(ctx) if one.param_type_name == "argument")
        return [self.options_metavar or "", *(_usage_of(one) for one in arguments)]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """`--help-all` is `--help` with all options."""
        if HELP_ALL in args:
            ctx.meta[HELP_ALL] = True
            args = ["--help"]
        return list(super().parse_args(ctx, args))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write one section a group, in the order of the signature; of a command with many options
        those that most people need."""
        parameters = self.get_params(ctx)
        shown = parameters
        if len(parameters) > MOST_SHOWN and HELP_ALL not in ctx.meta:
            shown = [one for one in parameters if _is_everyday(one)]
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in shown:
            record = _record(parameter, ctx)
            if record is not None:
                heading = getattr(parameter, "rich_help_panel", None) or _heading(parameter)
                sections.setdefault(heading, []).append(record)
        if left_out := len(parameters) - len(shown):
            words = f"{left_out} more options: {ctx.command_path} {HELP_ALL}"
            formatter.write(f"\n{words}\n")
        for heading, records in sections.items():
            with formatter.section(textwrap.fill(heading, formatter.width - 1)):
                formatter.write_dl(records, col_max=34)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """What can be typed."""
        write_examples(self.name or "", formatter)


HELP_ALL = "--help-all"


def _is_everyday(parameter: Any) -> bool:
    return parameter.param_type_name == "argument" or not EVERYDAY.isdisjoint(parameter.opts)


def write_examples(command: str, formatter: Any) -> None:
    """The examples of a command; none of one that has none."""
    if lines := example_lines(command, width=formatter.width):
        formatter.write(f"\nExamples:\n{lines}\n")


def _usage_of(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    many = "..." if argument.nargs == -1 else ""
    return f"{name}{many}" if argument.required else f"[{name}{many}]"


def _record(parameter: Any, ctx: Any) -> tuple[str, str] | None:
    """What is typed, and what it means."""
    if parameter.param_type_name != "argument":
        record: tuple[str, str] | None = parameter.get_help_record(ctx)
        return record
    return None if parameter.hidden else (_usage_of(parameter), parameter.help or "")


def _heading(parameter: Any) -> str:
    return "Arguments" if parameter.param_type_name == "argument" else "Options"
