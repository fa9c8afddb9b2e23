"""CUDA_VISIBLE_DEVICES: GPUs and MIG devices by number and by UUID, as CUDA takes them."""

from __future__ import annotations

import pytest

from fsdpplan.topology.read.nvml import NamedGpu, visible_indices

GPUS = [
    NamedGpu(index=0, uuids=("GPU-0a", "MIG-aa", "MIG-ab"), mig=True),
    NamedGpu(index=1, uuids=("GPU-1a",), mig=False),
    NamedGpu(index=3, uuids=("GPU-1b", "MIG-ba"), mig=True),
]
"""The driver lost number 2."""


@pytest.mark.parametrize(
    ("wanted", "indices"),
    [
        (None, (0, 1, 3)),
        ("3,0", (3, 0)),
        (" 1 , 3 ", (1, 3)),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("1,2,3", (1,)),
        ("1,-1,3", (1,)),
        ("0,1,0", ()),
        ("GPU-0", (0,)),
        ("GPU-1b,GPU-0a", (3, 0)),
        ("GPU-0a,1", (0,)),
        ("0,GPU-1a", (0,)),
        ("GPU-1", ()),
        ("GPU-9,GPU-0a", ()),
        ("MIG-ba", (3,)),
        ("MIG-aa,MIG-ab,MIG-ba", (0, 3)),
        ("MIG-aa,MIG-zz,MIG-ba", (0,)),
        ("MIG-GPU-1b/1/0", (3,)),
        ("MIG-zz", ()),
    ],
)
def test_the_first_entry_that_names_no_gpu_ends_the_list(
    wanted: str | None, indices: tuple[int, ...]
) -> None:
    assert visible_indices(wanted, GPUS) == indices


@pytest.mark.parametrize(("divided", "indices"), [(1, (2,)), (2, ()), (0, ())])
def test_a_mig_device_without_a_name_is_on_the_only_divided_gpu(
    divided: int, indices: tuple[int, ...]
) -> None:
    gpus = [NamedGpu(index=at, uuids=("GPU-x",), mig=at >= 3 - divided) for at in range(3)]
    assert visible_indices("MIG-aa", gpus) == indices
