"""Tables of configs by their publishers: what is read, and how many parameters that makes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from fsdpplan.cost.model.params import active_parameter_count, parameter_count  # noqa: E402
from fsdpplan.files.huggingface.config import families, parse_hf_config  # noqa: E402

GOLDEN = ROOT / "tests" / "golden" / "huggingface_configs.jsonl"


def configs_table(name: str) -> list[str]:
    """The lines of a table: `families`, `planned` or `refused`."""
    rows = [json.loads(line) for line in GOLDEN.read_text(encoding="utf-8").splitlines()]
    match name:
        case "families":
            return _lines(("`model_type`",), [(", ".join(f"`{one}`" for one in families()),)])
        case "planned":
            found = [_planned(row) for row in rows if "refused" not in row]
            return _lines(("config", "transformers", "here", "off by", "active"), found)
        case "refused":
            found = [
                (_name(row), f"{row['parameters']:,}", row["refused"])
                for row in rows
                if "refused" in row
            ]
            return _lines(("config", "transformers", "why no plan is made of it"), found)
        case _:
            raise ValueError(name)


def _lines(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows)]


def _name(row: dict[str, str]) -> str:
    published = row["source"].removeprefix("shape of ")
    return f"`{row['name']}`" if published == row["source"] else published


def _planned(row: dict[str, object]) -> tuple[str, ...]:
    text = json.dumps(row["config"])
    model = parse_hf_config(text, where=str(row["name"]), name=str(row["name"])).model
    built, count = int(str(row["parameters"])), parameter_count(model)
    off = count / built - 1
    words = "0" if count == built else f"{off * 100:+.3f} %"
    active = f"{active_parameter_count(model) / 1e9:,.2f} B" if model.experts else ""
    return _name({k: str(v) for k, v in row.items()}), f"{built:,}", f"{count:,}", words, active
