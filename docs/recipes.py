"""Write `docs/explanation/recipes.md`: layouts that everybody knows, as published and as searched.

    python docs/recipes.py              # predicts them again; searches as recorded
    python docs/recipes.py --search     # searches again, too: some CPU-minutes; or: make recipes

The rows are `tests/golden/bench/famous_recipes.csv`, to which nothing is fitted; what the searches
found is kept in `tests/golden/recipes.json`. `tests/validate/test_recipes.py` fails when the page
is stale, and searches a sample of the rows again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

from recipes_words import HEAD, MISSING, OPEN, SEARCHED, TERMS  # noqa: E402

from fsdpplan.cost.model.params import mfu_fraction  # noqa: E402
from fsdpplan.files.runs.table import MeasuredRun, read_runs  # noqa: E402
from fsdpplan.search.advice.words import POLICIES, degrees, differences  # noqa: E402
from fsdpplan.search.pins import Pins  # noqa: E402
from fsdpplan.search.recommend import recommend  # noqa: E402
from fsdpplan.spec.layout import Layout  # noqa: E402
from fsdpplan.spec.plan import Case, TimeBreakdown  # noqa: E402
from fsdpplan.validate.compare.predict import Prediction, predict_row  # noqa: E402
from fsdpplan.validate.runs.express import Expressed, express  # noqa: E402
from fsdpplan.validate.runs.fabric import load_request  # noqa: E402

PAGE = ROOT / "docs" / "explanation" / "recipes.md"
RUNS = ROOT / "tests" / "golden" / "bench" / "famous_recipes.csv"
RECORDED = ROOT / "tests" / "golden" / "recipes.json"

LISTED = 50
"""Ways to spread the ranks that a search ranks."""

GIB = 2**30
LEAST_SHARE = 0.02
"""Of the published step; parts that differ by less are not told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One row, predicted."""

    run: MeasuredRun
    expressed: Expressed
    prediction: Prediction

    @property
    def name(self) -> str:
        """Model, GPUs, and the sequence where it is long."""
        length = f", {self.run.seq_len:,} tokens" if (self.run.seq_len or 0) > 2**16 else ""
        return f"{self.run.model_name}, {self.run.gpus:,} {self.run.gpu.split('-')[0]}{length}"

    @property
    def case(self) -> Case:
        """As it was priced."""
        return Case(
            model=self.expressed.model,
            cluster=load_request(self.expressed.cluster_request),
            training=self.expressed.training,
            layout=self.prediction.layout,
        )

    @property
    def measured(self) -> float:
        """Seconds."""
        assert self.run.measured_step_seconds
        return self.run.measured_step_seconds

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.prediction.step_seconds.expected / self.measured - 1

    @property
    def is_inside(self) -> bool:
        """Whether the measured step lies in the band."""
        band = self.prediction.step_seconds
        return band.lower <= self.measured <= band.upper

    def mfu(self, seconds: float) -> float:
        """By the one formula of the planner, whatever the source counts."""
        case = self.case
        return mfu_fraction(
            model=case.model,
            seq_len=case.training.seq_len,
            tokens_per_second_per_gpu=case.training.tokens_per_step / seconds / case.cluster.gpus,
            peak_flops_per_second=case.cluster.device.peak_flops_per_second(
                case.training.precision
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search for a recipe's question found."""

    layout: Layout
    """The fastest."""
    time: TimeBreakdown
    peak_device_bytes: int
    seconds_listed: tuple[float, ...]
    """Of the fastest ways to spread the ranks, each at its best, in rising order."""


def recipes() -> list[Recipe]:
    """All rows; one that is not predicted is an error here."""
    found = []
    for run in read_runs(RUNS):
        expressed, prediction = express(run), predict_row(run)
        assert isinstance(expressed, Expressed), (run.model_name, expressed)
        assert isinstance(prediction, Prediction), (run.model_name, prediction)
        found.append(Recipe(run=run, expressed=expressed, prediction=prediction))
    return found


def searched(recipe: Recipe) -> Found:
    """Our own answer to the question of `recipe`: model, cluster, batch and software as published,
    with the same compilation; DualPipe, which a search takes only where it is asked to, stays."""
    case, layout = recipe.case, recipe.prediction.layout
    pins = Pins(
        compile=layout.compile,
        schedule="dualpipev" if layout.schedule == "dualpipev" else None,
    )
    result = recommend(
        model=case.model, cluster=case.cluster, training=case.training, pins=pins, limit=LISTED
    )
    ranked = sorted(result.listed.ranked, key=lambda row: row.estimate.time.total_seconds)
    best = ranked[0]
    return Found(
        layout=best.layout,
        time=best.estimate.time,
        peak_device_bytes=best.estimate.memory.peak_device_bytes,
        seconds_listed=tuple(round(row.estimate.time.total_seconds, 4) for row in ranked),
    )


def read_recorded() -> dict[str, Found]:
    """What searches found, by recipe."""
    entries: Mapping[str, Any] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return {name: _found(entry) for name, entry in entries.items()}


def _found(entry: Mapping[str, Any]) -> Found:
    layout = {**entry["layout"], "stage_blocks": tuple(entry["layout"]["stage_blocks"])}
    return Found(
        layout=Layout(**layout),
        time=TimeBreakdown(**entry["time"]),
        peak_device_bytes=entry["peak_device_bytes"],
        seconds_listed=tuple(entry["seconds_listed"]),
    )


def record(found: Mapping[str, Found]) -> None:
    """Keep what searches found."""
    entries = {
        name: {
            "layout": {f.name: getattr(one.layout, f.name) for f in fields(Layout)},
            "time": {
                key: round(value, 4)
                for key, value in asdict(one.time).items()
                if isinstance(value, float)
            },
            "peak_device_bytes": one.peak_device_bytes,
            "seconds_listed": one.seconds_listed,
        }
        for name, one in found.items()
    }
    RECORDED.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")


def page(rows: Sequence[Recipe], found: Mapping[str, Found]) -> str:
    """The text of the page."""
    errors = [abs(row.error) for row in rows]
    head = HEAD.format(
        rows=len(rows),
        median=f"{median(errors):.1%}",
        within=sum(error <= 0.15 for error in errors),
        inside=sum(row.is_inside for row in rows),
        fits=sum(row.prediction.fits for row in rows),
    )
    parts = [
        head,
        "## As published\n",
        OPEN,
        _published(rows),
        "## What is missing\n",
        _missing(rows),
        "## Beside our own\n",
        SEARCHED.format(listed=LISTED),
        _beside(rows, found),
        "## In which terms they differ\n",
        TERMS.format(least=f"{LEAST_SHARE:.0%}"),
        _terms(rows, found),
        "## What the rows leave open\n",
        _assumed(rows),
    ]
    return "\n".join(parts)


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]], *, left: int) -> str:
    lines = [
        "| " + " | ".join(headers) + " |",
        "|" + "---|" * left + "---:|" * (len(headers) - left),
    ]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def _words(layout: Layout) -> str:
    """Degrees, schedule, batch and recomputation in one line."""
    parts = [degrees(layout), {"fsdp": "FSDP", "ddp": "DDP"}.get(layout.sharding, layout.sharding)]
    if layout.pp > 1:
        stages = f" x {layout.virtual_stages}" if layout.virtual_stages > 1 else ""
        parts.append(f"{layout.schedule}{stages}")
    number = layout.num_microbatches
    parts.append(f"{number} micro-batch{'es' if number > 1 else ''} of {layout.micro_batch}")
    if layout.activation_checkpointing != "none":
        some = "" if layout.checkpoint_blocks == "all" else f" in {layout.checkpoint_blocks} blocks"
        parts.append(f"recomputes {layout.activation_checkpointing}{some}")
    return "; ".join(parts)


def _published(rows: Sequence[Recipe]) -> str:
    lines = []
    for row in rows:
        band, memory = row.prediction.step_seconds, row.prediction.memory
        has = row.case.cluster.device.memory_bytes / GIB
        chance = memory.fits_fraction
        lines.append(
            (
                row.name,
                _words(row.prediction.layout),
                f"{row.measured:.4g} s",
                f"{row.mfu(row.measured):.1%}",
                f"{band.expected:.4g} s",
                f"{row.mfu(band.expected):.1%}",
                f"{band.lower:.4g} to {band.upper:.4g} s",
                f"{row.error:+.1%}",
                "yes" if row.is_inside else "no",
                f"{memory.peak_device_bytes / GIB:.0f} of {has:.0f} GiB",
                "yes" if row.prediction.fits else "no",
                "-" if chance is None else f"{chance:.0%}",
            )
        )
    headers = (
        "recipe",
        "layout",
        "measured",
        "MFU",
        "predicted",
        "MFU",
        "80 % band",
        "error",
        "inside",
        "peak",
        "runs",
        "chance to fit",
    )
    return _table(headers, lines, left=2)


def is_missed(row: Recipe) -> bool:
    """Whether something must be missing: outside its band, over 15 % off, or no room."""
    return not row.is_inside or abs(row.error) > 0.15 or not row.prediction.fits


def _missing(rows: Sequence[Recipe]) -> str:
    missed = [row for row in rows if is_missed(row)]
    if not missed:
        return "Every recipe fits, lies inside its band, and is less than 15 % off.\n"
    lines = [f"* **{row.name}** ({row.error:+.1%}): {MISSING[row.name]}" for row in missed]
    return "\n".join(lines) + "\n"


def _beside(rows: Sequence[Recipe], found: Mapping[str, Found]) -> str:
    lines = []
    for row in rows:
        ours, published = found[row.name], row.prediction.time.total_seconds
        listed = len(ours.seconds_listed)
        faster = sum(seconds < published * (1 - 1e-4) for seconds in ours.seconds_listed)
        place = f"{faster + 1} of {listed}" if faster < listed else f"behind all {listed}"
        lines.append(
            (
                row.name,
                _words(ours.layout),
                f"{ours.time.total_seconds:.4g} s",
                f"{published / ours.time.total_seconds - 1:+.1%}",
                f"{ours.peak_device_bytes / GIB:.0f} GiB",
                place,
            )
        )
    headers = ("recipe", "our best", "predicted", "published takes", "peak", "published ranks")
    return _table(headers, lines, left=2)


PARTS: dict[str, Callable[[TimeBreakdown], float]] = {
    "computing": lambda time: time.compute_seconds,
    "waiting inside nodes": lambda time: time.exposed_inside_seconds,
    "waiting between nodes": lambda time: time.exposed_across_seconds,
    "pipeline bubble": lambda time: time.bubble_seconds,
    "optimizer": lambda time: time.optimizer_seconds,
}
"""Of a step, in the order in which they are told."""


def _terms(rows: Sequence[Recipe], found: Mapping[str, Found]) -> str:
    lines = []
    for row in rows:
        ours, published = found[row.name], row.prediction.time
        told = []
        for name, part in PARTS.items():
            more = part(ours.time) - part(published)
            if abs(more) >= LEAST_SHARE * published.total_seconds:
                told.append(f"{name} {more:+.3g} s")
        # a split of the blocks that is not named is the balanced one
        changes = [
            words
            for words in differences(ours.layout, row.prediction.layout)
            if ours.layout.stage_blocks or not words.startswith(POLICIES["stage_blocks"])
        ]
        lines.append((row.name, "; ".join(told) or "none", ", ".join(changes) or "degrees alone"))
    return _table(("recipe", "our best in seconds", "and in policies"), lines, left=3)


def _assumed(rows: Sequence[Recipe]) -> str:
    by_sentence: dict[str, list[str]] = {}
    for row in rows:
        for sentence in row.prediction.assumptions:
            by_sentence.setdefault(sentence, []).append(row.name)
    lines = []
    for sentence, names in by_sentence.items():
        whose = "all" if len(names) == len(rows) else "; ".join(names)
        if len(names) > 4 and len(names) < len(rows):
            whose = f"{len(names)} of them, {names[0]} to {names[-1]}"
        lines.append((sentence, whose))
    return _table(("taken", "of"), lines, left=2)


def main() -> None:
    """Write the page, and where asked search again."""
    parser = argparse.ArgumentParser(description="write docs/explanation/recipes.md")
    parser.add_argument("--search", action="store_true", help="search again, and record it")
    options = parser.parse_args()
    rows = recipes()
    if options.search:
        record({row.name: searched(row) for row in rows})
    text = page(rows, read_recorded())
    if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        PAGE.write_text(text, encoding="utf-8")
        print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
