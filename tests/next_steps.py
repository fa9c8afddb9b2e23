"""What counts as a next step in a message, and every message that the code can raise.

A message has one where a clause behind its first `:`, `;`, `.` or `(` begins with a verb that tells
the reader to do something (`use --tp 2`, `leave it out`), perhaps behind a word that binds it
(`or`, `then`), or begins with a command (`fsdpplan status shows ...`, `pip install ...`); or where
it says what a value must be, which is what to write.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_VERBS = """
add allow ask begin build call change check choose copy correct download drop dump emit end exchange
export follow free give go install keep leave look lower make measure mount move name pad pass paste
pin plan print put quote read record rehearse remove rename report resume return run save say
see send set shorten split start submit switch take tokenize train try type unset update use
wait wrap write
"""
VERBS = frozenset(_VERBS.split())
COMMANDS = ("fsdpplan", "pip", "python", "kubectl", "nvidia-smi", "apt-get")
_STEP = re.compile(
    r"(?:[:;.(] |, or )(?:(?:or|and|then|else|first|only|to [a-z ]{,40},) )*"
    rf"(?:{'|'.join(sorted(VERBS))}|`?(?:{'|'.join(COMMANDS)})\b [-a-z]+)\b",
    re.IGNORECASE,
)
_MUST = re.compile(r"\bmust\b")


def has_next_step(message: str) -> bool:
    """Whether `message` says what to do, by the rule above."""
    return bool(_STEP.search(message) or _MUST.search(message))


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A sentence that the code raises; `...` stands for what is not written there."""

    place: str
    """File and function."""
    line: int
    text: str
    is_raised: bool
    """False: it is one of several problems that a function lists."""


UNKNOWN = "..."


def messages(path: Path, root: Path, raised: Mapping[str, int]) -> Iterator[Message]:
    """The messages of what is raised in a file, by `raised`: name of the call -> place of its text
    among the arguments; and those that functions called `...problems` yield."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    module = _assigned(tree.body)
    functions = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    for name, function, call in _calls(tree, "", None):
        if isinstance(call, ast.Yield):
            is_said = name.rpartition(".")[2].endswith("problems")
            argument = call.value if is_said and not isinstance(call.value, ast.Call) else None
        else:
            index = raised.get(_last_name(call.func))
            argument = None if index is None else _argument(call, index)
        if argument is None:
            continue
        scope = dict(module)
        if function is not None:
            scope.update(_assigned(list(ast.walk(function))))
        place = f"{path.relative_to(root)}:{name}"
        for text in _texts(argument, scope, functions, depth=0):
            yield Message(
                place=place,
                line=call.lineno,
                text=text,
                is_raised=isinstance(call, ast.Call),
            )


def _calls(
    node: ast.AST, name: str, function: ast.FunctionDef | None
) -> Iterator[tuple[str, ast.FunctionDef | None, ast.Call | ast.Yield]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            inner = child if isinstance(child, ast.FunctionDef) else function
            yield from _calls(child, f"{name}.{child.name}".lstrip("."), inner)
            continue
        if isinstance(child, ast.Call | ast.Yield):
            yield name, function, child
        yield from _calls(child, name, function)


def _argument(call: ast.Call, index: int) -> ast.expr | None:
    named = [word.value for word in call.keywords if word.arg == "sentence"]
    if named:
        return named[0]
    return call.args[index] if len(call.args) > index else None


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _assigned(nodes: list[ast.stmt] | list[ast.AST]) -> dict[str, ast.expr]:
    """Names that these statements give a value once."""
    found: dict[str, list[ast.expr]] = {}
    for node in nodes:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            targets = [node.target]
        for target in targets:
            if isinstance(target, ast.Name):
                found.setdefault(target.id, []).append(node.value)
    return {name: values[0] for name, values in found.items() if len(values) == 1}


def _texts(
    node: ast.expr | None,
    scope: Mapping[str, ast.expr],
    functions: Mapping[str, ast.FunctionDef],
    *,
    depth: int,
) -> list[str]:
    """All that an expression may come to, as far as the file says so."""

    def of(inner: ast.expr | None) -> list[str]:
        return _texts(inner, scope, functions, depth=depth + 1)

    if node is None or depth > 8:
        return [UNKNOWN]
    match node:
        case ast.Constant(value=value):
            return [str(value)]
        case ast.JoinedStr(values=values):
            return _joined([of(value) for value in values])
        case ast.FormattedValue(value=value):
            # Of what stands in a sentence only words that were written for it count.
            written = isinstance(value, ast.Name | ast.IfExp | ast.Constant | ast.Call)
            return of(value) if written else [UNKNOWN]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _joined([of(left), of(right)])
        case ast.IfExp(body=body, orelse=other):
            return [*of(body), *of(other)]
        case ast.BoolOp(values=values):
            return [text for value in values for text in of(value)]
        case ast.Name(id=name) if name in scope and not _is_itself(scope[name], name):
            return of(scope[name])
        case ast.Call(func=ast.Name(id=name)) if name in functions:
            return _returned(functions[name], scope, functions, depth=depth + 1)
    return [UNKNOWN]


def _returned(
    function: ast.FunctionDef,
    scope: Mapping[str, ast.expr],
    functions: Mapping[str, ast.FunctionDef],
    *,
    depth: int,
) -> list[str]:
    inner = {**scope, **_assigned(list(ast.walk(function)))}
    returned = [n.value for n in ast.walk(function) if isinstance(n, ast.Return)]
    texts = [t for value in returned for t in _texts(value, inner, functions, depth=depth)]
    return texts or [UNKNOWN]


def _is_itself(node: ast.expr, name: str) -> bool:
    return any(isinstance(inner, ast.Name) and inner.id == name for inner in ast.walk(node))


def _joined(parts: list[list[str]]) -> list[str]:
    texts = [""]
    for part in parts:
        texts = [text + one for text in texts for one in part][:16]
    return texts
