"""The tables of `docs/reference/torch.md`: what each release of PyTorch has, and what was run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from fsdpplan.spec.torch_features import FEATURES, TorchFeature
from fsdpplan.spec.torch_release import NEWEST_TESTED, NVIDIA_IMAGES, OLDEST, TorchRelease

RESULTS = Path(__file__).resolve().parents[1] / "tests" / "golden" / "torch_versions.json"
"""Written by `make test-torch`: {version: {group of tests: {passed, skipped, failed}}}."""

RELEASES = [TorchRelease(2, minor) for minor in range(OLDEST.minor, NEWEST_TESTED.minor + 1)]


def torch_table(name: str) -> list[str]:
    """Lines of the table of that name."""
    return list({"features": _features, "images": _images, "runs": _runs}[name]())


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
    if not RESULTS.exists():
        return
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    groups = list(dict.fromkeys(group for run in found.values() for group in run))
    yield _row("torch", *groups)
    yield _row(*["---"] * (len(groups) + 1))
    for version, run in found.items():
        yield _row(version, *(_counts(run.get(group)) for group in groups))


def _counts(run: dict[str, int] | None) -> str:
    if run is None:
        return "not run"
    others = [f"{run[name]} {name}" for name in ("failed", "skipped") if run.get(name)]
    return ", ".join([f"{run['passed']} passed", *others])


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
