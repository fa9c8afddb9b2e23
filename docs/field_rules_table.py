"""Tables of the rules of the field, from the module that looks for them."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from fsdpplan.search.advice.field_rules import RULES  # noqa: E402

GOLDEN = ROOT / "tests" / "golden" / "field_rules.toml"


def field_rules_table(name: str) -> list[str]:
    """The lines of a table: `rules`, `remedies` or `recipes`."""
    match name:
        case "rules":
            head = ("rule", "what it asks for", "number", "limit", "said only where")
            rows = [
                (f"`{rule.name}`", rule.says, rule.number, rule.limit_words, rule.where or "always")
                for rule in RULES
            ]
        case "remedies":
            head = ("rule", "what to do", "source")
            rows = [(f"`{rule.name}`", rule.do, rule.source) for rule in RULES]
        case "recipes":
            head = ("recipe", "breaks", "and why that is no false alarm")
            told = tomllib.loads(GOLDEN.read_text(encoding="utf-8"))["recipes"]
            rows = [(row["name"], ", ".join(row["breaks"]), row["why"]) for row in told]
        case _:
            raise ValueError(name)
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows)]
