"""Bad input of ten kinds, by a seed: whatever it is, one sentence, and nothing of ours half there.

    python -m tests.safety.fuzz --cases 1500            as root in a mount namespace of its own
    python -m tests.safety.fuzz --cases 1500 --as nobody

Each case runs in this process, in a folder of its own: no exception, no hang, a documented exit
code, a message for each failure that says what to do, no temporary file left, and every device,
pipe, link and folder as it was. In the namespace all but that folder is read-only, and /dev is a
copy.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import pkgutil
import random
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import fsdpplan
from tests.next_steps import has_next_step
from tests.safety.fuzz_inputs import Documents, broken, hostile_word

DOCUMENTED = frozenset({0, 2, 3, 4, 5, 6})
MOST_SECONDS = 20
NOBODY = 65534
NODES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9)}
IN_NAMESPACE = "FSDPPLAN_FUZZ_NAMESPACE"


class Hangs(BaseException):
    """A case takes longer than anybody waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One input and what is done with it."""

    kind: str
    number: int
    words: tuple[str, ...]
    """The command line; empty: `call` is called."""
    call: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of it."""

    case: Case
    code: int
    problem: str
    """Which promise was broken; empty where none was."""


def run_case(case: Case, folder: Path) -> Result:
    """Do what the case says in `folder`."""
    before = _nodes(folder)
    out, err = io.StringIO(), io.StringIO()
    code, problem = 0, ""
    _watch(MOST_SECONDS)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = _outcome(case)
    except Hangs:
        problem = f"it hangs: {traceback.format_exc()[-600:]}"
    except BaseException:
        problem = traceback.format_exc()
    finally:
        _watch(0)
    problem = problem or _broken_promise(code, err.getvalue(), case)
    if not problem and (changed := _changed(before, _nodes(folder))):
        problem = f"changed: {changed}"
    if not problem and (left := [p.name for p in folder.rglob(".*.tmp")]):
        problem = f"left half-written: {left}"
    return Result(case=case, code=code, problem=problem)


def _outcome(case: Case) -> int:
    if case.call is not None:
        case.call()
        return 0
    from fsdpplan.cli.app import exit_code_of

    return exit_code_of(case.words)


def _watch(seconds: float) -> None:
    """By the clock of this process for what turns in a circle, and, as machines may be busy, by six
    times as much of the wall's for what waits."""
    signal.signal(signal.SIGPROF, _hang)
    signal.signal(signal.SIGALRM, _hang)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, 6 * seconds)


def _hang(_number: int, _frame: FrameType | None) -> None:
    raise Hangs


def _broken_promise(code: int, err: str, case: Case) -> str:
    if code not in DOCUMENTED:
        return f"exit code {code} is not documented: {err}"
    if "Traceback" in err:
        return err
    said = [line for line in err.splitlines() if line.startswith("fsdpplan: ")]
    if code and case.words and not said and code not in (3, 6):
        return f"exit code {code} without a word: {err!r}"
    if code and said and not any(map(has_next_step, said)):
        return f"nothing says what to do: {err!r}"
    return ""


def _nodes(folder: Path) -> dict[str, tuple[int, int, int]]:
    """All that is no regular file, in the folder and in /dev: its kind, its number, its inode."""
    found = {}
    for path in (*folder.rglob("*"), *Path("/dev").glob("*")):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode):
                found[str(path)] = stat.S_IFMT(status.st_mode), status.st_rdev, status.st_ino
    return found


def _changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name, was in before.items() if after.get(name) != was]


def cases(number: int, *, seed: int, folder: Path, documents: Documents) -> Iterator[Case]:
    """The kinds in turn; each case lies in a folder of its own, which is made when it is due."""
    kinds = list(KINDS)
    for index in range(number):
        kind = kinds[index % len(kinds)]
        chance = random.Random(f"{seed} {index}")
        place = folder / f"{index:05d}"
        place.mkdir()
        os.chdir(place)
        yield KINDS[kind](index, chance, documents, place)
        os.chdir(folder)
        shutil.rmtree(place, ignore_errors=True)


SHAPE = (
    "--layers=2",
    "--hidden=64",
    "--ffn-hidden=128",
    "--heads=4",
    "--kv-heads=2",
    "--vocab=256",
)
SMALL = ("--gpus=2", "--dp-shard=2", "--seq-len=128", "--global-batch=4", "--no-ledger")
CPU = ("--hardware=cpu",)


def _command(kind: str, index: int, *words: str) -> Case:
    return Case(kind=kind, number=index, words=words)


def command_lines(index: int, chance: random.Random, documents: Documents, place: Path) -> Case:
    """A command with options and words that nobody would type."""
    (place / "fsdpplan.json").write_bytes(documents.plan)
    command = chance.choice(list(COMMANDS))
    words = list(COMMANDS[command])
    for _ in range(chance.randrange(1, 4)):
        words.append(f"{chance.choice(OPTIONS)}={hostile_word(chance, place)}")
    if chance.random() < 0.3:
        words.append(hostile_word(chance, place))
    chance.shuffle(words)
    return _command("command lines", index, command, *words)


COMMANDS: dict[str, tuple[str, ...]] = {
    "recommend": (*SHAPE, *CPU, *SMALL),
    "estimate": (*SHAPE, *CPU, *SMALL),
    "emit-launch": (),
    "explain": (),
    "what-if": ("--no-ledger",),
    "sweep": (*SHAPE, *CPU, "--gpus=1,2", "--seq-len=128", "--global-batch=4", "--no-ledger"),
    "compare": ("fsdpplan.json", "fsdpplan.json", "--no-ledger"),
    "check": ("--assert=mfu > 0", "--lock=plan.lock"),
    "diff": ("fsdpplan.json", "fsdpplan.json"),
    "report": (),
    "replan": ("--gpus=4", "--hardware=cpu", "--no-ledger"),
    "run": ("--dry-run",),
    "verify": (),
    "ledger": (),
    "logs": (),
    "status": (),
    "cancel": (),
    "profiles": (),
    "models": (),
    "bug-report": (),
    "export": ("--checkpoint-dir", "nothing", "--out", "model"),
    "validate": ("nothing.csv",),
    "learn": ("nothing",),
}
OPTIONS = (
    *("--params", "--model", "--config", "--gpus", "--hardware", "--gpu", "--intra-bw", "--save"),
    *("--seq-len", "--global-batch", "--precision", "--tokens", "--tp", "--pp", "--micro-batch"),
    *("--schedule", "--runs", "--ledger", "--out", "--alerts", "--job-name", "--env", "--args"),
    *("--export", "--plan", "--rank", "--target", "--max-memory", "--job", "--node", "--tail"),
    *("--checkpoint-dir", "--torch", "--headroom", "--stage-blocks", "--nonsense", "--json"),
    *("--init-from", "--export-hf", "--sft", "--chat-template", "--eval-data", "--eval-tokens"),
    *("--why", "--assert", "--lock", "--check"),
)


def plans(index: int, chance: random.Random, documents: Documents, place: Path) -> Case:
    """A saved plan that was damaged or edited."""
    broken(chance, place / "plan.json", documents.plan)
    command = chance.choice(("emit-launch", "explain", "run", "report"))
    more = ("--dry-run",) if command == "run" else ()
    if command == "emit-launch" and chance.random() < 0.5:
        more = (f"{chance.choice(('--out', '--alerts'))}={hostile_word(chance, place)}",)
    return _command("plans", index, command, "plan.json", *more)


def clusters(index: int, chance: random.Random, documents: Documents, place: Path) -> Case:
    """A cluster file, to plan for."""
    broken(chance, place / "mine.toml", chance.choice(documents.profiles))
    return _command("clusters", index, "estimate", *SHAPE, *SMALL, "--hardware=./mine.toml")


def configs(index: int, chance: random.Random, documents: Documents, place: Path) -> Case:
    """A model's config."""
    broken(chance, place / "config.json", documents.config)
    return _command("configs", index, "estimate", "--config=config.json", *CPU, *SMALL)


def tables(index: int, chance: random.Random, documents: Documents, place: Path) -> Case:
    """A table of measured runs, or of kernels."""
    broken(chance, place / "runs.csv", documents.table)
    if chance.random() < 0.4:
        return _command("tables", index, "learn", "runs.csv", "--ledger=ledger.sqlite")
    if chance.random() < 0.3:
        return _command("tables", index, "validate", "--matmuls=runs.csv")
    return _command("tables", index, "validate", "runs.csv")


def metrics(index: int, chance: random.Random, documents: Documents, place: Path) -> Case:
    """What a job reported."""
    run = place / "fsdpplan-runs" / "20260101-000000"
    run.mkdir(parents=True)
    (run / "job.sbatch").write_bytes(documents.script)
    broken(chance, run / "metrics.jsonl", documents.metrics)
    if chance.random() < 0.3:
        broken(chance, run / "job.json", documents.record)
    command = chance.choice(("verify", "verify", "status", "logs", "learn"))
    more = (str(run), "--ledger=ledger.sqlite") if command == "learn" else ()
    return _command("metrics", index, command, *more)


def checkpoints(index: int, chance: random.Random, documents: Documents, place: Path) -> Case:
    """What lies in a folder of checkpoints, as a rank reads it."""
    path = place / "step-00000005"
    path.mkdir()
    files = documents.checkpoint
    damaged = chance.choice([*files, "latest"])
    for name, data in files.items():
        (path / name).write_bytes(data)
    (place / "latest").write_text("step-00000005\n")
    where = place / "latest" if damaged == "latest" else path / damaged
    data = where.read_bytes()
    where.unlink()
    broken(chance, where, data)

    def read() -> None:
        from fsdpplan.trainer.checkpoint.files import damage, resumable
        from fsdpplan.trainer.checkpoint.progress import read_progress
        from fsdpplan.trainer.checkpoint.runs import require_manifest
        from fsdpplan.trainer.errors import TrainerError

        try:
            for one in resumable(place):
                damage(require_manifest(one), one, rank=0, ranks=1)
                read_progress(one)
        except TrainerError as error:
            if not 0 < len(str(error).strip()) < 2000:
                raise AssertionError(f"no sentence: {error}") from error

    return Case(kind="checkpoints", number=index, words=(), call=read)


def nccl_logs(index: int, chance: random.Random, documents: Documents, place: Path) -> Case:
    """What NCCL wrote."""
    broken(chance, place / "nccl.log", chance.choice(documents.nccl))

    def read() -> None:
        from fsdpplan.run.follow.tail import FileTail
        from tests.topology.nccl_logs import read_nccl_log

        tail = FileTail(place / "nccl.log", from_start=True)
        read_nccl_log(tail.rest())

    return Case(kind="NCCL logs", number=index, words=(), call=read)


def recordings(index: int, chance: random.Random, documents: Documents, place: Path) -> Case:
    """A host that was recorded."""
    broken(chance, place / "host.json", chance.choice(documents.recordings))
    more = (f"--save={hostile_word(chance, place)}",) if chance.random() < 0.4 else ()
    return _command("recordings", index, "detect", "--from=host.json", *more)


def ledgers(index: int, chance: random.Random, documents: Documents, place: Path) -> Case:
    """The ledger, to look at and to plan with."""
    broken(chance, place / "ledger.sqlite", documents.ledger)
    command = chance.choice(("ledger", "estimate", "learn"))
    if command == "ledger":
        more = (f"--export={hostile_word(chance, place)}",) if chance.random() < 0.5 else ()
        return _command("ledgers", index, "ledger", "--ledger=ledger.sqlite", *more)
    if command == "learn":
        return _command("ledgers", index, "learn", "ledger.sqlite", "--ledger=other.sqlite")
    small = [word for word in SMALL if word != "--no-ledger"]
    return _command("ledgers", index, "estimate", *SHAPE, *CPU, *small, "--ledger=ledger.sqlite")


Kind = Callable[[int, random.Random, Documents, Path], Case]
KINDS: dict[str, Kind] = {
    made.__name__: made
    for made in (
        *(command_lines, plans, clusters, configs, tables),
        *(metrics, checkpoints, nccl_logs, recordings, ledgers),
    )
}


def main() -> int:
    """Run the cases; 1 where any breaks a promise."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one case")
    parser.add_argument("--as", dest="user", choices=("me", "nobody"), default="me")
    asked = parser.parse_args()
    if os.geteuid() == 0 and IN_NAMESPACE not in os.environ:
        inside = _in_a_namespace()
        if inside is not None:
            return inside
        print("no mount namespace can be made here: the system's own /dev is only watched")
    print(json.dumps(summary(asked)))
    return 1 if FAILED else 0


FAILED: list[Result] = []


def summary(asked: argparse.Namespace) -> dict[str, Any]:
    """Run, print what breaks a promise, and count."""
    codes: Counter[str] = Counter()
    documents = Documents.made()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        root = Path(folder)
        os.environ.update(HOME=folder, XDG_STATE_HOME=folder, COLUMNS="80")
        if asked.user == "nobody" and os.geteuid() == 0:
            _import_all(root, documents)
            os.chown(root, NOBODY, NOBODY)
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        for case in cases(asked.cases, seed=asked.seed, folder=root, documents=documents):
            if asked.only not in (None, case.number):
                continue
            result = run_case(case, Path.cwd())
            codes[f"{case.kind}: {result.code}"] += 1
            if result.problem:
                FAILED.append(result)
                print(
                    f"case {case.number}, {case.kind}: {case.words}\n{result.problem}\n", flush=True
                )
        os.chdir("/")
    return {"cases": asked.cases, "failed": len(FAILED), "codes": dict(sorted(codes.items()))}


def _import_all(root: Path, documents: Documents) -> None:
    """Nobody may read where this Python lies."""
    for encoding in ("utf_8_sig", "utf_16", "utf_16_le", "utf_16_be", "utf_32", "latin_1", "idna"):
        importlib.import_module(f"encodings.{encoding}")
    for module in pkgutil.walk_packages(fsdpplan.__path__, "fsdpplan."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for case in cases(60, seed=-1, folder=root, documents=documents):
        run_case(case, Path.cwd())


def _in_a_namespace() -> int | None:
    """This program again, as it alone sees the mounts; None where none can be made. Its folder for
    what is written is its own: /tmp may be where this Python, or the code, lies."""
    nodes = "; ".join(
        f"mknod -m 666 /dev/{name} c {major} {minor}" for name, (major, minor) in NODES.items()
    )
    script = (
        "set -e; mount --make-rprivate /; mount -t tmpfs dev /dev; "
        f"{nodes}; ln -s /proc/self/fd /dev/fd; ln -s /proc/self/fd/1 /dev/stdout; "
        'mount -t tmpfs tmp "$1"; chmod 1777 "$1"; mount -o remount,bind,ro /; export TMPDIR="$1"; '
        f'export {IN_NAMESPACE}=1 PYTHONDONTWRITEBYTECODE=1; shift; exec "$@"'
    )
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(OSError):
        begin = ["unshare", "--mount", "bash", "-c", script, "bash", folder]
        if subprocess.run([*begin, "true"], capture_output=True).returncode == 0:
            words = [sys.executable, "-m", "tests.safety.fuzz", *sys.argv[1:]]
            return subprocess.run([*begin, *words]).returncode
    return None


if __name__ == "__main__":
    sys.exit(main())
