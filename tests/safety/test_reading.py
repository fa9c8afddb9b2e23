"""Nothing that is read runs: no pickle, no evaluated text, no shell where a program will do."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "fsdpplan"

RUNS_WHAT_IT_READS = frozenset(
    (
        *("eval", "exec", "compile", "__import__"),
        *("pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load", "marshal.loads"),
        *("shelve.open", "dill.load", "dill.loads", "joblib.load", "runpy.run_path"),
        *("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load"),
        *("dist.all_gather_object", "dist.gather_object", "dist.broadcast_object_list"),
        *("dist.scatter_object_list", "dist.recv_object_list"),
        *("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"),
    )
)
FORESEEN = frozenset(("tempfile.mktemp",))
"""Its name can be taken by somebody else before the file is made."""

AMONG_RANKS = "ranks of one job run the same program as the same user"
EXCEPTIONS = {
    ("trainer/checkpoint/storage.py", "pickle.Unpickler"): (
        "the index of a torch checkpoint is a pickle; this reader makes no class but the index's "
        "own, whatever the file names"
    ),
    ("trainer/watch/watch.py", "dist.all_gather_object"): AMONG_RANKS,
    ("trainer/checkpoint/base.py", "dist.all_gather_object"): AMONG_RANKS,
    ("trainer/huggingface/peft.py", "dist.all_gather_object"): AMONG_RANKS,
    ("trainer/checkpoint/runs.py", "dist.all_gather_object"): AMONG_RANKS,
    ("trainer/checkpoint/runs.py", "dist.broadcast_object_list"): AMONG_RANKS,
}
"""(file, what) -> why it may stand there."""


def unsafe(tree: ast.AST) -> Iterator[str]:
    """What in `tree`, or in a program that it holds as text, would run what it reads."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=function, keywords=keywords):
                yield from _unsafe_call(ast.unparse(function), keywords)
            case ast.ClassDef(bases=bases):
                yield from ({ast.unparse(base) for base in bases} & RUNS_WHAT_IT_READS)
            case ast.Constant(value=str(text)) if "\n" in text:
                try:
                    program = ast.parse(text)
                except SyntaxError:
                    continue
                yield from unsafe(program)


def _unsafe_call(name: str, keywords: list[ast.keyword]) -> Iterator[str]:
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in keywords}
    if name in RUNS_WHAT_IT_READS | FORESEEN:
        yield name
    if name == "torch.load" and given.get("weights_only") != "True":
        yield "torch.load without weights_only=True"
    if name.endswith(".load") and given.get("allow_pickle", "False") != "False":
        yield "allow_pickle"
    for keyword in ("shell", "trust_remote_code"):
        if given.get(keyword, "False") != "False":
            yield keyword


def test_no_module_runs_what_it_reads() -> None:
    found = {
        (str(path.relative_to(PACKAGE)), what)
        for path in sorted(PACKAGE.rglob("*.py"))
        for what in unsafe(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert not found - EXCEPTIONS.keys()


@pytest.mark.parametrize("place", EXCEPTIONS)
def test_an_exception_is_still_one(place: tuple[str, str]) -> None:
    path, what = place
    assert what in unsafe(ast.parse((PACKAGE / path).read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "text",
    [
        "eval(x)",
        "pickle.loads(x)",
        "class A(pickle.Unpickler): pass",
        "torch.load(p)",
        "torch.load(p, weights_only=False)",
        "yaml.load(f, Loader=yaml.Loader)",
        "subprocess.run(c, shell=True)",
        "AutoModel.from_pretrained(n, trust_remote_code=True)",
        "np.load(p, allow_pickle=True)",
        "tempfile.mktemp()",
        "PROGRAM = '''import os\\nos.system(x)\\n'''",
    ],
)
def test_it_would_be_found(text: str) -> None:
    assert list(unsafe(ast.parse(text)))


def test_what_is_safe_is_not_found() -> None:
    text = "torch.load(p, weights_only=True)\nre.compile(x)\nmodel.eval()\nyaml.safe_load(t)"
    assert not list(unsafe(ast.parse(text)))
