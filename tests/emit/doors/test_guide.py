"""The guide's table of fields is what the targets say."""

from __future__ import annotations

from pathlib import Path

from fsdpplan.spec.layout import Layout
from fsdpplan.spec.programs import accelerate, megatron, torchtitan
from fsdpplan.spec.programs.words import field_names
from fsdpplan.spec.training import Training

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "other-launchers.md"


def table() -> str:
    """One row a field, by the words of each target."""
    rows = ["| field | torchtitan | Megatron-LM | Accelerate |", "|---|---|---|---|"]
    targets = (torchtitan.WORDS, megatron.WORDS, accelerate.WORDS)
    for name in (*field_names(Layout), *field_names(Training)):
        said = " | ".join(words[name].says for words in targets)
        rows.append(f"| `{name}` | {said} |")
    return "\n".join(rows)


def test_the_table_is_what_the_targets_say() -> None:
    found = GUIDE.read_text(encoding="utf-8").partition("`idle` fields change nothing there.\n\n")
    assert found[2].strip() == table()
