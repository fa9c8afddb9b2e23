"""The tables of prices and power: every row has a date and a source, and is of a known profile."""

from __future__ import annotations

from collections import Counter
from datetime import date, timedelta

import pytest

from fsdpplan.cli.options.goal import BillOptions
from fsdpplan.cli.resolve.goal import AGED_DAYS, Goal, terms_of
from fsdpplan.errors import SpecError
from fsdpplan.files.clusters import load_cluster
from fsdpplan.files.prices import power_of, powers, price_of, prices
from fsdpplan.files.profiles.catalogue import profile_names

DEVICES, NODES = profile_names("device"), profile_names("node")


def test_every_price_has_a_date_a_source_and_a_device() -> None:
    assert prices()
    for row in prices():
        assert row.device in DEVICES, row
        assert 0.1 < row.usd_per_gpu_hour < 50, row
        assert date(2024, 1, 1) < row.read_on <= date(2030, 1, 1), row
        assert row.source.startswith("https://"), row
        assert row.page.startswith("https://"), row
        assert row.offer, row
    twice = Counter((row.provider, row.device) for row in prices())
    assert max(twice.values()) == 1


def test_every_power_has_a_source_and_leaves_room_for_the_rest_of_a_node() -> None:
    for row in powers():
        assert row.device in DEVICES, row
        assert row.source.startswith("https://"), row
        assert row.what, row
        if row.node:
            device = power_of(row.device)
            assert row.node in NODES, row
            assert device is not None, row
            assert row.gpus == load_cluster(row.node).cluster.gpus_per_node
            assert 1.2 < row.watts / (row.gpus * device.watts) < 2.5, row
    assert len({(row.node, row.device) for row in powers()}) == len(powers())


def test_the_age_of_a_price_is_said_and_warned_of_when_old() -> None:
    row = price_of("lambda", "h100-sxm-80g")
    cluster = load_cluster("dgx-h100", gpus=8).cluster
    for days in (0, AGED_DAYS, AGED_DAYS + 1, 400):
        asked = BillOptions(provider="lambda")
        goal = Goal(bill=asked, today=row.read_on + timedelta(days=days))
        found = terms_of(goal, cluster)
        assert found.value.price == row.usd_per_gpu_hour
        assert any(f"{days} days ago" in said for said in found.assumptions)
        assert bool(found.warnings) == (days > AGED_DAYS)
        for said in found.warnings:
            assert f"{days} days old" in said
            assert row.page in said


def test_what_has_no_row_is_one_error_that_says_what_has() -> None:
    with pytest.raises(SpecError, match=r"lambda.*--price 2\.10"):
        price_of("nowhere", "h100-sxm-80g")
    with pytest.raises(SpecError, match=r"no price of h20-96g.*--price 2\.10"):
        price_of("lambda", "h20-96g")
    unknown = load_cluster("dgx-h100", gpus=8, device="h20-96g").cluster
    with pytest.raises(SpecError, match="--node-watts"):
        terms_of(Goal(bill=BillOptions(pue=1.2), today=date(2026, 11, 26)), unknown)
