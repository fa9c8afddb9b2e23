"""Operators that the host dispatches: the counts behind the launch floor."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdpplan.cost.block.work import FSDP_UNIT_OPERATORS, block_work
from fsdpplan.cost.kernels.compute import operators
from fsdpplan.files.catalogue import load_model
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import Training
from fsdpplan.trainer.rehearse.rank import CPU, DecoderProgram, Stage, fake_cluster, on_cpu
from fsdpplan.trainer.step import forward_backward
from fsdpplan.trainer.text.data import micro_batches, open_sequences
from fsdpplan.trainer.torch_versions import RELEASE
from tests.ground_truth.fsdp_step import RECIPE, case_of, plan_config

LAYOUT = Layout(dp_shard=8, compile=False)
TRAINING = Training(seq_len=256, global_batch=8)
FSDP_OPERATORS = {
    "empty",
    "_foreach_copy_",
    "all_gather_copy_in",
    "_allgather_base_",
    "split_with_sizes_copy",
    "chunk_cat",
    "chunk_cat_mixed_dtype",
    "_reduce_scatter_base_",
}
FREE = {"_record_function_enter_new", "_record_function_exit", "_unsafe_view", "device", "detach"}
"""Launch nothing: profiler marks and reshapes."""


class OperatorCounter(TorchDispatchMode):
    """Dispatched operators by name, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is DTensor for kind in types):
            return NotImplemented
        if not getattr(func, "is_view", False):
            self.counts[func._overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def counted(model: Model) -> Counter[str]:
    """Operators of one forward and backward of the trainer's own FSDP2 step."""
    plan = on_cpu(plan_config(model, TRAINING, LAYOUT))
    with fake_cluster(plan, 0, cuda_like=True):
        batches = micro_batches(
            open_sequences(plan, None, seed=0), plan, first=0, rank=0, device=CPU
        )
        program = DecoderProgram(plan, batches, RECIPE, Stage(), on_spike="none")
        with program.mode:
            program.begin()
            with OperatorCounter() as counter:
                forward_backward(program.assembled, program.batches, plan)
    return counter.counts


def of_one_block(name: str) -> Counter[str]:
    """What the fourth block adds to three."""
    three, four = (counted(replace(load_model(name), layers=layers)) for layers in (3, 4))
    return Counter({k: n - three[k] for k, n in four.items() if n != three[k] and k not in FREE})


same_kernels = pytest.mark.skipif(
    RELEASE < (2, 9),
    reason="torch 2.8 makes other operators of attention on CPUs, and fewer of FSDP",
)


@same_kernels
@pytest.mark.parametrize(("name", "expected"), [("llama-3.2-1b", 27), ("gpt2-large", 32)])
def test_fsdp_dispatches_what_the_launch_floor_charges(name: str, expected: int) -> None:
    block = of_one_block(name)
    of_fsdp = sum(block[operator] for operator in FSDP_OPERATORS)
    assert of_fsdp == expected
    assert of_fsdp == pytest.approx(2 * FSDP_UNIT_OPERATORS, rel=0.12)


@same_kernels
@pytest.mark.parametrize("name", ["llama-3.2-1b", "gpt2-large"])
def test_the_blocks_own_operators_are_counted_within_a_tenth(name: str) -> None:
    work = block_work(case_of(load_model(name), TRAINING, LAYOUT))
    predicted = sum(operators(replace(work, wrapper_operators=0.0)))
    block = of_one_block(name)
    own = sum(n for operator, n in block.items() if operator not in FSDP_OPERATORS)
    assert predicted == pytest.approx(own, rel=0.1)
