"""The memory's constants are what their program finds in the repository's table."""

from __future__ import annotations

from fsdpplan.files.clusters import load_cluster
from fsdpplan.files.runs.table import bundled_runs, read_runs
from fsdpplan.validate.fit.memory import fit_communicator_bytes, fit_fragmentation, main


def test_the_profiles_hold_a_fresh_fit() -> None:
    assert main(["--check"]) == 0


def test_both_constants_are_physical_and_the_same_for_every_device() -> None:
    runs = read_runs(bundled_runs())
    fragments = fit_fragmentation(runs)
    communicator = fit_communicator_bytes(runs, fragments=fragments)
    assert 0 < fragments < 0.3
    assert 2**28 < communicator < 2**31
    for profile in ("dgx-a100-80g-hdr", "dgx-h100", "dgx-b200"):
        fit = load_cluster(profile, gpus=8).cluster.device.fit
        assert fit.fragmentation_fraction == fragments
        assert fit.communicator_bytes == communicator
