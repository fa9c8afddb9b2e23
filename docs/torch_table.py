"""The tables of `docs/reference/torch.md`: what each release of PyTorch has, and what was run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsdpplan.spec.torch_features import FEATURES, TorchFeature
from fsdpplan.spec.training import NEWEST_TESTED, NVIDIA_IMAGES, OLDEST, TorchRelease

RESULTS = Path(__file__).resolve().parents[1] / "tests" / "golden" / "torch_versions.json"
"""Written by `make test-torch`: {version: {files: {file of tests: {passed, skipped, failed}},
deprecated: [what torch warned of]}}."""

AREAS: dict[str, tuple[str, ...]] = {
    "losses of FSDP2, HSDP and DDP": (
        "trainer/test_losses",
        "trainer/test_step",
        "trainer/test_clip",
    ),
    "tensor and context parallelism": (
        "trainer/test_tensor_parallel",
        "trainer/test_parallel_layouts",
        "trainer/test_context_parallel",
        "trainer/test_loss",
    ),
    "experts": ("trainer/test_expert_parallel", "trainer/test_moe"),
    "pipelines": ("trainer/test_pipeline",),
    "axes that meet": ("trainer/test_matrix",),
    "checkpoints": ("trainer/test_checkpoint", "trainer/test_resharding", "trainer/test_kills"),
    "own models": (
        "trainer/test_user_model",
        "trainer/test_parallelize",
        "trainer/test_hugging_face",
        "trainer/test_mistakes",
    ),
    "precisions and optimizers": (
        "trainer/test_precision",
        "trainer/test_float8",
        "trainer/test_optimizer",
        "trainer/test_muon",
    ),
    "rehearsal": ("trainer/test_rehearse", "run/test_rehearse", "cli/commands/test_rehearse"),
    "ground truth of bytes, counts and peaks": ("ground_truth/",),
    "the rest of the trainer": ("trainer/",),
}
"""Names of areas, and how their files begin; the first that fits counts."""

RELEASES = [TorchRelease(2, minor) for minor in range(OLDEST.minor, NEWEST_TESTED.minor + 1)]


def torch_table(name: str) -> list[str]:
    """Lines of the table of that name."""
    tables = {
        "features": _features,
        "images": _images,
        "runs": _runs,
        "deprecated": _deprecated,
    }
    return list(tables[name]())


def _features() -> Iterator[str]:
    """One row a feature, one column a release up to the first that has all."""
    last = max(feature.since for feature in FEATURES)
    columns = [release for release in RELEASES if release <= last]
    heads = [*map(str, columns[:-1]), f"{last} and newer"]
    yield _row("feature", *heads, "before that", "source")
    yield _row(*["---"] * (len(columns) + 3))
    for feature in FEATURES:
        cells = [_cell(feature, release) for release in columns]
        yield _row(feature.name, *cells, _before(feature), feature.source)


def _cell(feature: TorchFeature, release: TorchRelease) -> str:
    if release >= feature.since:
        return "works"
    return "done without" if feature.done_without else "refused"


def _before(feature: TorchFeature) -> str:
    if not feature.done_without:
        return f"use {feature.instead}".replace("--", "`--").replace(" or", "` or") + "`"
    return f"the trainer {feature.done_without}" + (f"; {feature.slower}" if feature.slower else "")


def _images() -> Iterator[str]:
    yield _row("torch", "images `nvcr.io/nvidia/pytorch`")
    yield _row("---", "---")
    for release in sorted(set(NVIDIA_IMAGES.values())):
        months = [month for month, has in NVIDIA_IMAGES.items() if has == release]
        yield _row(str(release), ", ".join(months))


def _runs() -> Iterator[str]:
    counts = {version: _by_area(found["files"]) for version, found in _found().items()}
    yield _row("tests of", *counts)
    yield _row(*["---"] * (len(counts) + 1))
    for area in AREAS:
        yield _row(area, *(_said(counted[area]) for counted in counts.values()))


def _deprecated() -> Iterator[str]:
    """What each release warned of while the tests ran."""
    yield _row("torch", "what it deprecates of what is used here")
    yield _row("---", "---")
    for version, found in _found().items():
        yield _row(version, "; ".join(found["deprecated"]) or "nothing")


def _found() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return found


def _by_area(files: dict[str, dict[str, int]]) -> dict[str, Counter[str]]:
    counts: dict[str, Counter[str]] = {area: Counter() for area in AREAS}
    for file, outcomes in files.items():
        begins = ((area, start) for area, starts in AREAS.items() for start in starts)
        area = next((area for area, start in begins if file.startswith(start)), None)
        if area is not None:
            counts[area].update(outcomes)
    return counts


def _said(counts: Counter[str]) -> str:
    if not counts:
        return "not run"
    others = [f"{counts[name]} {name}" for name in ("failed", "skipped") if counts[name]]
    return ", ".join([f"{counts['passed']} passed", *others])


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
