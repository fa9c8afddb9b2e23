"""The numbers of matmuls and links: what the repository's tables give, no more and no less."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest

from fsdpplan.cost.kernels.rates import matmul_flops
from fsdpplan.files.profiles.catalogue import load_profile, profile_names
from fsdpplan.files.profiles.devices import PhysicsProfile
from fsdpplan.files.profiles.levels import SOCKETS
from fsdpplan.files.profiles.nodes import NodeProfile
from fsdpplan.validate.compare.kernel_scores import size_class
from fsdpplan.validate.compare.kernels import MatmulRow, by_sweep, read_matmuls, swept_devices
from fsdpplan.validate.fit.kernels import TABLES, fitted_devices, main, matmul_errors, read_tables
from fsdpplan.validate.fit.levels import LEVELS, collective_errors
from fsdpplan.validate.fit.search_numbers import Range, capped, least
from tests.cost.clusters import golden

ROWS = read_tables(TABLES)


@pytest.mark.parametrize("row", golden("matmul")["sweep"], ids=lambda row: row["sweep"])
def test_matmuls_of_a_sweep_are_as_near_as_recorded(row: dict[str, Any]) -> None:
    rows = by_sweep(ROWS.matmuls)[row["sweep"]]
    assert len(rows) == row["rows"]
    errors = matmul_errors(rows, fitted_devices({}))
    assert median(map(abs, errors)) <= row["median_tolerance_fraction"] <= 0.06


@pytest.mark.parametrize(
    "row",
    golden("collectives")["sweep"],
    ids=lambda row: f"{row['sweep']}-{row['from_bytes']}",
)
def test_collectives_of_a_sweep_are_as_near_as_recorded(row: dict[str, Any]) -> None:
    rows = [r for r in ROWS.collectives if r.gathered_bytes >= row["from_bytes"]]
    rows = by_sweep(rows)[row["sweep"]]
    assert len(rows) == row["rows"]
    assert median(map(abs, collective_errors(rows, {}))) <= row["median_tolerance_fraction"]


def test_every_sweep_with_large_rows_has_a_recorded_error() -> None:
    recorded = {row["sweep"] for row in golden("collectives")["sweep"]}
    assert set(by_sweep(ROWS.collectives)) == recorded
    assert set(by_sweep(ROWS.matmuls)) == {row["sweep"] for row in golden("matmul")["sweep"]}


def test_calls_over_nodes_lie_in_the_range_that_their_source_gives() -> None:
    rows = [row for row in ROWS.collectives if row.fastest_seconds and row.nodes > 1]
    errors = collective_errors(rows, {})
    outside = [
        (row.collective, row.gpus)
        for row, error in zip(rows, errors, strict=True)
        if not 0.98 * (row.fastest_seconds or 0)
        <= (1 + error) * row.seconds
        <= (row.slowest_seconds or 0)
    ]
    # a shared cluster: over more than two nodes half of its samples are slower than is predicted,
    # by stalls that no hop takes, and at any size some are as fast
    assert rows
    assert not outside


def test_the_hop_of_one_cluster_is_that_of_the_fastest_samples_of_its_relative() -> None:
    """p5.48xlarge takes over p4de's hop; its own rows of one size are no fit for it, but how the
    fastest of them grow with the ranks is."""
    rows = {
        row.gpus: row
        for row in ROWS.collectives
        if row.profile == "p5-48xlarge" and row.collective == "all_gather" and row.nodes >= 8
    }
    errors = dict(zip(rows, collective_errors(rows.values(), {}), strict=True))
    first, last = min(rows), max(rows)
    predicted = [(1 + errors[gpus]) * rows[gpus].seconds for gpus in (first, last)]
    fastest = [rows[gpus].fastest_seconds or 0.0 for gpus in (first, last)]
    assert predicted[1] - predicted[0] == pytest.approx(fastest[1] - fastest[0], rel=0.1)


def test_no_size_of_matmuls_is_biased() -> None:
    devices = fitted_devices({})
    classes: dict[tuple[str, str], list[MatmulRow]] = {}
    for row in ROWS.matmuls:
        size = size_class(matmul_flops(m=row.m, n=row.n, k=row.k))
        classes.setdefault((row.sweep, size), []).append(row)
    for name, rows in classes.items():
        errors = matmul_errors(rows, devices)
        assert abs(median(errors)) < 0.035, name
        assert median(map(abs, errors)) < 0.065, name


@pytest.mark.sampled(0)
def test_the_profiles_hold_what_a_fresh_fit_gives(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0
    said = capsys.readouterr().out
    assert "stale: none" in said
    assert "fitted: 2 shared, 5 of each of 3 devices" in said


def test_no_level_has_more_than_five_fitted_numbers_and_all_share_few() -> None:
    # five: a start that every call has. Seventeen: the paces of three families of softwares, how
    # much devices differ, and how soon they throttle came to the twelve. Two are of the host.
    assert all(len(level.ranges) <= 5 for level in LEVELS)
    physics = load_profile("physics")
    assert isinstance(physics, PhysicsProfile)
    assert len(physics.fit) <= 24


def test_a_level_without_rows_of_its_own_names_the_one_it_takes_over() -> None:
    own = {level.key for level in LEVELS} | {SOCKETS}  # of which no table is public
    for name in profile_names("node"):
        node = load_profile(name)
        assert isinstance(node, NodeProfile)
        for level in node.levels:
            if name != "cpu":
                assert (level.fitted_as or f"{name}:{level.level.name}") in own


def test_the_tables_have_the_gpus_that_have_profiles() -> None:
    rows = read_matmuls(TABLES / "matmul.csv")
    assert {row.device for row in rows} == set(swept_devices().values())


def test_a_search_finds_the_least_to_its_digits() -> None:
    ranges = {
        "x": Range(lowest=0.1, highest=100.0, starts=(1.0, 50.0)),
        "y": Range(lowest=0.1, highest=2.0, starts=(1.0,)),
    }
    found = least(lambda p: (p["x"] - 7.0) ** 2 + (p["y"] - 3.0) ** 2, ranges)
    assert found["x"] == pytest.approx(7.0, rel=0.01)
    assert found["y"] == 2.0


def test_one_far_row_counts_no_more_than_the_cap() -> None:
    assert capped([0.1, -0.1, 50.0]) == pytest.approx((0.1 + 0.1 + 0.3) / 3)
