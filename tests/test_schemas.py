"""The published JSON Schemas are the code's, and what the program writes and reads obeys them."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from docs.generate import shell
from docs.json_schemas import schema_texts
from fsdpplan.cli.commands import SUMMARIES
from tests.schemas import obeys, problems, schema, unsaid

jsonschema = pytest.importorskip("jsonschema")

ROOT = Path(__file__).resolve().parent.parent
COMMAND_FILES = ROOT / "fsdpplan" / "cli" / "commands"
RECORDINGS = ROOT / "tests" / "recordings"
OLD_PLANS = sorted((RECORDINGS / "0.2.0/plans").glob("*.json"))
PINNED = "--hardware dgx-h100 --pp 1 --cp 1 --tp 1 --micro-batch 1 --json"
TINY = "--layers 2 --hidden 64 --ffn-hidden 128 --heads 2 --kv-heads 2 --vocab 256 --seq-len 64"

COMMANDS = (
    ("recommend", f"recommend --model llama-3.2-1b --gpus 16 --dp-shard 16 {PINNED}"),
    (
        "recommend",
        f"recommend --model mixtral-8x7b --gpus 64 --ep 8 --tokens 1T {PINNED}",
    ),
    ("recommend", f"recommend {TINY} --precision fp32 --hardware cpu --gpus 4 --json"),
    (
        "recommend",
        "recommend --model llama-3.2-1b --gpus 16,32 --tokens 1T --price 2 --goodput --no-save "
        f"--dp-shard 16 {PINNED}",
    ),
    (
        "estimate",
        "estimate --params 1e9 --gpus 8 --hardware gb200-nvl72 --dp-shard 8 --json",
    ),
    (
        "estimate",
        f"estimate --params 1e9 --gpus 8 --dp-shard 8 --precision-switch fp8@80% {PINNED}",
    ),
    ("explain", "explain a.json --json"),
    ("explain", "explain a.json --goodput --mtbf-node 500h --json"),
    ("explain_rules", "explain a.json --rules --json"),
    ("explain_nccl", "explain a.json --nccl --json"),
    ("what_if", "what-if a.json --inter-bw 100Gb/s --json"),
    ("compare", "compare a.json b.json --json"),
    ("sweep", f"sweep --model llama-3.2-1b --gpus 8,16 --scaling strong {PINNED}"),
    ("replan", "replan a.json --gpus 8 --json"),
    ("check", "check a.json --list --json"),
    ("diff", "diff a.json b.json --json"),
    ("emit_launch", "emit-launch a.json --json"),
    ("validate", "validate runs.csv --json"),
    ("models", "models --json"),
    ("models", "models llama-3.2-1b --json"),
    ("profiles", "profiles dgx-h100 --kind node --json"),
    ("profiles", "profiles h200 --json"),
    ("learn", "learn runs.csv --ledger here.sqlite --json"),
    ("ledger", "ledger --ledger here.sqlite --json"),
    ("error", "estimate --model llama-3.1-8b --gpus 8 --hardware nowhere --json"),
    ("error", f"recommend --params 70e9 --gpus 8 --offload none {PINNED}"),
)
"""Which entry of the schema, and what prints it."""

COLUMNS = "source_id,framework,model_name,layers,hidden,ffn_hidden,heads,kv_heads,vocab,gpu,gpus,"
COLUMNS += "dtype,seq_len,zero_stage,micro_batch,global_batch,act_ckpt,compile,step_time_s,notes"
SHAPE = "mine,torchtitan,llama-3.1-8b,32,4096,14336,32,8,128256,H100-80GB,64,bf16,8192,3,1,64,op,n"
RUNS = f"{COLUMNS}\n{SHAPE},1.33,\n{SHAPE},,\n"


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[str, Any]]]:
    """What each command prints, by entry of the schema."""
    folder = tmp_path_factory.mktemp("printed")
    (folder / "runs.csv").write_text(RUNS, encoding="utf-8")
    saved = f"fsdpplan recommend --model llama-3.2-1b --gpus 16 --dp-shard 16 {PINNED} --save"
    for place, more in (("a.json", ""), ("b.json", " --precision fp8")):
        made = shell(f"{saved} {place}{more}", folder)
        assert made.returncode == 0, made.stderr
    found: dict[str, list[tuple[str, Any]]] = {"plan": []}
    for entry, command in COMMANDS:
        result = shell(f"fsdpplan {command}", folder)
        assert (result.returncode != 0) is (entry == "error"), f"{command}\n{result.stderr}"
        found.setdefault(entry, []).append((command, json.loads(result.stdout)))
    for place in ("a.json", "b.json"):
        found["plan"].append((place, json.loads((folder / place).read_text(encoding="utf-8"))))
    return found


def test_the_published_files_are_the_codes() -> None:
    for path, text in schema_texts().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is stale: type `make docs`"
        jsonschema.Draft202012Validator.check_schema(json.loads(text))


def test_what_is_printed_obeys_its_schema(printed: dict[str, list[tuple[str, Any]]]) -> None:
    for entry, answers in printed.items():
        for command, document in answers:
            if entry == "plan":
                assert not problems(document, schema("plan")), command
            else:
                obeys(entry, document)


def test_a_saved_plan_has_nothing_that_is_unsaid(
    printed: dict[str, list[tuple[str, Any]]],
) -> None:
    for place, document in printed["plan"]:
        assert not list(unsaid(document, schema("plan"), "plan")), place


def test_what_is_printed_otherwise_is_found(printed: dict[str, list[tuple[str, Any]]]) -> None:
    _, check = printed["check"][0]
    for wrong in (
        {**check, "plna": ""},
        {**check, "lock_written": "no"},
        {key: value for key, value in check.items() if key != "plan"},
        {**check, "differences": [{"part": "plan", "nmae": "x"}]},
    ):
        with pytest.raises(AssertionError):
            obeys("check", wrong)


def test_every_command_with_json_has_a_schema_that_is_held_against_what_it_prints() -> None:
    """Here, or by `obeys` in the tests of its own."""
    entries = {name for name in schema("output")["$defs"] if re.fullmatch("[a-z_]+", name)}
    for name in SUMMARIES:
        source = (COMMAND_FILES / f"{name.replace('-', '_')}.py").read_text(encoding="utf-8")
        assert name.replace("-", "_") in entries or "json: Json" not in source, name
    held = {entry for entry, _ in COMMANDS} | {"profiles_check", "validate_check"}
    for path in (ROOT / "tests" / "cli").rglob("test_*.py"):
        held |= set(re.findall(r'obeys\("([a-z_]+)"', path.read_text(encoding="utf-8")))
    assert held == entries


@pytest.mark.parametrize("path", OLD_PLANS, ids=lambda path: path.name)
def test_plans_of_earlier_versions_obey_the_schema(path: Path) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    assert not problems(document, schema("plan"))


def test_a_plan_that_is_none_does_not_obey(printed: dict[str, list[tuple[str, Any]]]) -> None:
    _, plan = printed["plan"][0]
    assert problems({**plan, "layout": {**plan["layout"], "sharding": "some"}}, schema("plan"))
    assert problems({key: plan[key] for key in plan if key != "model"}, schema("plan"))
    assert problems({**plan, "modle": {}}, schema("plan"))


def test_every_profile_obeys_the_schema_of_profiles() -> None:
    for path in (ROOT / "hardware_profiles").glob("*.toml"):
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        assert not problems(document, schema("profile")), path.name


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ('joins = "node"', 'joins = "rack"', "joins"),
        ("gpus_per_node = { value = 8,", "gpus_per_node = { valeu = 8,", "gpus_per_node"),
        ('source = "system" }', 'sorce = "system" }', "gpus_per_node"),
        ('description = "', 'remark = "', "$"),
        ("schema_version = 1", "schema_version = 2", "schema_version"),
    ],
)
def test_a_profile_with_a_fault_does_not_obey(old: str, new: str, where: str) -> None:
    text = (ROOT / "hardware_profiles" / "dgx-h100.toml").read_text(encoding="utf-8")
    assert old in text
    found = problems(tomllib.loads(text.replace(old, new, 1)), schema("profile"))
    assert any(where in fault for fault in found), found
