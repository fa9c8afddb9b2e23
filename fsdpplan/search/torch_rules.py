"""Torch rules: what the release of PyTorch that will run does not have."""

from __future__ import annotations

from collections.abc import Iterator

from fsdpplan.search.rule import Problem
from fsdpplan.spec.torch_features import Setting, lacking


def torch_problems(setting: Setting) -> Iterator[Problem]:
    """The feature that the release lacks, with the first one that has it."""
    feature = lacking(setting)
    if feature is not None:
        release = setting.training.torch_release
        yield Problem(
            reason=f"torch {release} has no {feature.name} ({feature.since} has)",
            sentence=f"torch {release} has no {feature.name}, which came with {feature.since}: use "
            f"{feature.instead}, or --torch {feature.since} and an environment that has it",
        )
