"""Torch rules: what the release of PyTorch that will run does not have."""

from __future__ import annotations

from collections.abc import Iterator

from fsdpplan.search.rules.rule import Problem
from fsdpplan.spec.case import Case
from fsdpplan.spec.torch_features import lacking


def torch_problems(case: Case) -> Iterator[Problem]:
    """The feature that the release lacks, with the first one that has it."""
    feature = lacking(case)
    if feature is not None:
        release = case.training.torch_release
        yield Problem(
            reason=f"torch {release} has no {feature.name} ({feature.since} has)",
            sentence=f"torch {release} has no {feature.name}, which came with {feature.since}: use "
            f"{feature.instead}, or --torch {feature.since} and an environment that has it",
        )
