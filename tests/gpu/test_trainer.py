"""The trainer on one GPU: the same losses as on a CPU, in the memory that was predicted."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdpplan.errors import SpecError
from fsdpplan.files.catalogue import load_model
from fsdpplan.files.clusters import load_cluster
from fsdpplan.files.plans import plan_json
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.layout import ActivationCheckpointing, Sharding
from fsdpplan.spec.training import Training
from fsdpplan.trainer.config import PlanConfig, load_plan, parse_plan
from fsdpplan.trainer.model.attention import AttentionCore, takes_windows
from fsdpplan.trainer.model.decoder import Decoder
from fsdpplan.trainer.model.documents import Documents, documents_of, window_mask
from fsdpplan.trainer.model.weights import initialise, named_parameters
from fsdpplan.trainer.optimizer import make_optimizer
from fsdpplan.trainer.options import parse_options
from fsdpplan.trainer.parallel.assemble import assemble
from fsdpplan.trainer.report import TrainingRun
from fsdpplan.trainer.signals import StopRequest
from fsdpplan.trainer.step import train_step
from fsdpplan.trainer.text.data import micro_batches, open_data, open_sequences
from fsdpplan.trainer.text.feed import AheadFeed, Feed
from fsdpplan.trainer.text.mixture import share_of
from fsdpplan.trainer.train import one_step, set_up, settle
from tests.benchmarks.single_gpu_cases import Trial, planned
from tests.gpu.program import no_waits, only_a_device_shows
from tests.trainer import loss_layouts, losses, plans

pytestmark = pytest.mark.gpu

FP32_LOSS_TOLERANCE = 1e-4
"""In losses near 4: other kernels sum in another order, and Adam turns rounding into steps."""
BF16_LOSS_TOLERANCE = 0.02
PEAK_TOLERANCE_FRACTION = 0.05
MEMORY_STEPS = 3
"""From the second step on all optimizer state is there."""

SMALL = replace(load_model("llama-3.2-1b"), name="small", layers=8, vocab=8192)
"""Half a billion parameters: enough for blocks to outweigh the libraries' workspaces."""
SMALL_TRAINING = Training(seq_len=2048, global_batch=4)


TINY = replace(SMALL, name="tiny", layers=2, hidden=64, ffn_hidden=96, heads=4, kv_heads=2)
TINY = replace(TINY, head_dim=16, vocab=256)
TINY_TRAINING = Training(seq_len=32, global_batch=2)
"""What a CPU takes a step of in no time."""


def plan_text_for(device: torch.device, **arguments: Any) -> str:
    """The tiny plan of the trainer's tests, on a device."""
    document = plans.plan_document(**arguments)
    document["cluster"]["device"]["kind"] = device.type
    return json.dumps(document)


def plan_for(device: torch.device, **arguments: Any) -> PlanConfig:
    """It as the trainer reads it."""
    return parse_plan(plan_text_for(device, **arguments))


def run_of(device: torch.device, folder: Path, *words: str, **arguments: Any) -> TrainingRun:
    """A run as a job begins it, from the file of its plan."""
    plan = folder / "plan.json"
    plan.write_text(plan_text_for(device, **arguments))
    options = parse_options(["--plan", str(plan), *words])
    return set_up(load_plan(plan), options, StopRequest())


@torch.no_grad()
def take_weights_of_a_cpu(model: nn.Module, plan: PlanConfig) -> None:
    """The same seed draws other numbers on another kind of device."""
    decoder = Decoder(plan.model)
    initialise(decoder, seed=0, layers=plan.model.layers)
    drawn = dict(decoder.named_parameters())
    for name, parameter in named_parameters(model):
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        local.copy_(drawn[name])


def trained_losses(plan: PlanConfig, device: torch.device) -> list[float]:
    """Losses of a few steps from a CPU's weights."""
    assembled = assemble(plan, device, seed=0)
    model = assembled.model
    take_weights_of_a_cpu(model, plan)
    optimizer = make_optimizer(model, losses.RECIPE)
    sequences = open_sequences(plan, None, seed=0)
    found = []
    for step in range(losses.STEPS):
        first = step * plan.training.global_batch
        batches = micro_batches(
            sequences, plan, first=first, rank=0, device=device, packs=plan.training.packed
        )
        output = train_step(assembled, optimizer, batches, plan, clip_norm=losses.RECIPE.clip_norm)
        found.append(output.loss.item())
    return found


# The compiler advises rounding of fp32 that would make losses differ.
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.sampled(2)
@pytest.mark.parametrize("sharding", ["fsdp", "ddp"])
def test_a_gpu_loses_as_a_cpu(alone: torch.device, sharding: str, compiled: bool) -> None:
    plan = plan_for(alone, sharding=sharding, compile=compiled, num_microbatches=2)
    expected = losses.reference({})["losses"]
    assert trained_losses(plan, alone) == pytest.approx(expected, abs=FP32_LOSS_TOLERANCE)


def test_data_comes_from_page_locked_memory_and_no_step_waits_for_it(
    alone: torch.device, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some text " * 500)
    plan = plan_for(alone, model={"vocab": 260}, num_microbatches=2)
    data = open_data(plan, [share_of(str(text))], seed=0)
    feed = AheadFeed(
        Feed(data=data, plan=plan, rank=0, device=alone, packs=True), workers=1, prefetch=2
    )
    feed.rate(0)
    try:
        with no_waits(alone):
            batches = feed.take(0)
    finally:
        feed.close()
    expected = micro_batches(data, plan, first=0, rank=0, device=torch.device("cpu"), packs=True)
    for batch, wanted in zip(batches, expected, strict=True):
        assert batch.tokens.device == alone
        assert torch.equal(batch.tokens.cpu(), wanted.tokens)
        assert torch.equal(batch.targets.cpu(), wanted.targets)
    only_a_device_shows("that nothing waits")


@pytest.mark.parametrize("checkpointing", ["none", "op", "full"])
@pytest.mark.sampled(2)
@pytest.mark.parametrize("sharding", ["fsdp", "ddp"])
def test_bf16_begins_as_fp32_does_and_learns(
    alone: torch.device, sharding: str, checkpointing: str
) -> None:
    plan = plan_for(
        alone,
        sharding=sharding,
        activation_checkpointing=checkpointing,
        training={"precision": "bf16"},
    )
    first, *_, last = trained_losses(plan, alone)
    assert first == pytest.approx(losses.reference({})["losses"][0], abs=BF16_LOSS_TOLERANCE)
    assert last < first


def test_a_run_updates_by_the_fused_optimizer(alone: torch.device, tmp_path: Path) -> None:
    run = run_of(alone, tmp_path, "--steps", "2")
    one_step(run)
    settle(run)
    assert math.isfinite(run.losses[0])
    only_a_device_shows("its fused kernel and its allocator")
    assert run.optimizer.defaults["fused"]
    assert run.memory.peaks()["allocated_bytes"] <= run.memory.peaks()["reserved_bytes"]


@pytest.mark.parametrize("more", [[], ["--on-spike", "skip"]], ids=["plain", "spikes skipped"])
def test_between_logged_steps_torch_sees_no_wait(
    alone: torch.device, more: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By CUDA's own count: whatever synchronises raises. Batches are there, as copies are the
    data's."""
    words = ("--steps", "9", "--log-every", "8", "--no-numbers", *more)
    run = run_of(alone, tmp_path, *words, compile=False)
    one_step(run)  # kernels are loaded, states are made
    batches = run.feed.take(0)
    monkeypatch.setattr(type(run.feed), "take", lambda *_: batches)
    with no_waits(alone):
        for _ in range(6):
            one_step(run)
    settle(run)
    assert len(run.losses) == len(run.step_seconds) == 7
    assert all(map(math.isfinite, run.losses))
    assert min(run.step_seconds) > 0
    only_a_device_shows("that nothing waits")


def one_gpu(device: torch.device) -> Cluster:
    """One GPU of this size; nothing else of it counts for what is allocated."""
    cluster = load_cluster("dgx-h100", gpus=1).cluster
    if device.type == "cpu":
        return cluster
    memory_bytes = torch.cuda.get_device_properties(device).total_memory
    return replace(cluster, device=replace(cluster.device, memory_bytes=memory_bytes))


def peak_allocated_bytes(plan: PlanConfig, device: torch.device) -> int | None:
    """The highest level of a few steps of the trainer; a CPU has no allocator that counts it."""
    gc.collect()
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    assembled = assemble(plan, device, seed=0)
    model = assembled.model
    optimizer = make_optimizer(model, losses.RECIPE)
    sequences = open_sequences(plan, None, seed=0)
    for _ in range(MEMORY_STEPS):
        batches = micro_batches(sequences, plan, first=0, rank=0, device=device)
        train_step(assembled, optimizer, batches, plan, clip_norm=1.0)
    if not on_cuda:
        return None
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


@pytest.mark.parametrize("checkpointing", ["none", "op", "full"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.sampled(3)
@pytest.mark.parametrize("sharding", ["fsdp", "ddp"])
def test_the_peak_is_as_predicted(
    alone: torch.device,
    sharding: Sharding,
    compiled: bool,
    checkpointing: ActivationCheckpointing,
) -> None:
    on_cuda = alone.type == "cuda"
    trial = Trial(
        model=SMALL if on_cuda else TINY,
        training=SMALL_TRAINING if on_cuda else TINY_TRAINING,
        compiled=compiled,
        checkpointing=checkpointing,
        sharding=sharding,
    )
    try:
        plan = planned(trial, one_gpu(alone))
    except SpecError as error:
        pytest.skip(f"this GPU is too small: {error}")
    document = json.loads(plan_json(plan))
    document["cluster"]["device"]["kind"] = alone.type
    measured = peak_allocated_bytes(parse_plan(json.dumps(document)), alone)
    only_a_device_shows("what is allocated")
    predicted = plan.estimate.memory.peak_allocated_bytes
    assert predicted == pytest.approx(measured, rel=PEAK_TOLERANCE_FRACTION)


def heads_of(device: torch.device, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of two rows; a CPU has shorter ones."""
    length = 512 if device.type == "cuda" else 64
    q, k, v = (
        torch.randn(2, heads, length, head_dim, device=device, dtype=torch.bfloat16)
        for heads in (4, 2, 2)
    )
    return q, k, v


def with_gradients(
    attend: Callable[..., Tensor], heads: Iterable[Tensor], **given: Any
) -> list[Tensor]:
    """What is attended to, and gradients of queries, keys and values."""
    q, k, v = leaves = [each.detach().requires_grad_() for each in heads]
    out = attend(q, k, v, **given)
    out.float().square().sum().backward()  # type: ignore[no-untyped-call]
    gradients = [each.grad for each in leaves if each.grad is not None]
    return [out.detach(), *gradients]


def require_near(found: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_windows_of_the_kernel_are_those_of_the_masks(alone: torch.device, head_dim: int) -> None:
    config = plans.config_of(
        heads=4, kv_heads=2, head_dim=head_dim, sliding_window=100, full_attention_every=4
    )
    heads = heads_of(alone, head_dim)
    window = 100 if alone.type == "cuda" else 10
    length = heads[0].shape[2]
    by_hand = window_mask(heads[0], queries=length, before=0, window=window)
    core = AttentionCore(head_dim**-0.5)
    core.window = window
    masked = with_gradients(core, heads, mask=by_hand)
    only_a_device_shows("its kernel for windows")
    if not takes_windows(config, heads[0]):
        pytest.skip("this torch or device has no kernel for windows")
    require_near(with_gradients(core, heads), masked)


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_documents_of_the_kernel_are_those_one_by_one(
    alone: torch.device, head_dim: int, window: int
) -> None:
    config = plans.config_of(heads=4, kv_heads=2, head_dim=head_dim)
    heads = heads_of(alone, head_dim)
    length = heads[0].shape[2]
    rows = [[1, 130, 333, 512, 512, 512, 512, 512], [40, 41, 42, 43, 44, 400, 512, 512]]
    ends = torch.tensor(rows, device=alone, dtype=torch.int32) * length // 512
    core = AttentionCore(head_dim**-0.5)
    core.window = window * length // 512

    def documents(by_kernel: bool) -> Documents:
        return documents_of(ends, length, length=length, by_kernel=by_kernel)

    one_by_one = with_gradients(core, heads, documents=documents(False))
    only_a_device_shows("its kernel for documents")
    if not takes_windows(config, heads[0]):
        pytest.skip("this torch or device has no kernel for documents")
    require_near(with_gradients(core, heads, documents=documents(True)), one_by_one)


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.sampled(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_packed_documents_lose_as_a_cpu_does_with_each_alone(
    alone: torch.device, precision: str, compiled: bool
) -> None:
    model = {"vocab": 64, "head_dim": 16}
    plan = plan_for(
        alone, model=model, training={"precision": precision, "packed": True}, compile=compiled
    )
    expected = loss_layouts.documents_apart(model)["losses"]
    tolerance = FP32_LOSS_TOLERANCE if precision == "fp32" else BF16_LOSS_TOLERANCE
    assert trained_losses(plan, alone) == pytest.approx(expected, abs=tolerance)
