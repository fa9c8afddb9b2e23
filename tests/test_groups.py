"""Several workers share the tests as tests/conftest.py says."""

from __future__ import annotations

import os

import pytest


@pytest.mark.gloo
@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="one process runs all tests")
def test_what_loads_the_machine_is_on_one_worker(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("loadgroup", default=False):
        assert request.node.nodeid.endswith("@machine"), "make: pytest-xdist ignores its groups"
