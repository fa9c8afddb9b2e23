"""Plans to emit: small, made by hand, with a prediction that agrees with itself."""

from __future__ import annotations

from typing import Any

from fsdpplan.spec.cluster import Cluster, Device, DeviceFit, DeviceKind, Level, StepError
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import Estimate, Interval, MemoryBreakdown, Plan, TimeBreakdown
from fsdpplan.spec.training import Training

SEQ_LEN = 64


def make_plan(
    kind: DeviceKind = "cpu", *, nodes: int = 1, per_node: int = 2, **layout: Any
) -> Plan:
    """A tiny decoder in HSDP: sharded inside the node, replicated across."""
    chosen = Layout(**{"dp_replicate": nodes, "dp_shard": per_node, "compile": False, **layout})
    training = Training(seq_len=SEQ_LEN, global_batch=chosen.global_batch, precision="fp32")
    return Plan(
        model=Model(
            name="tiny",
            layers=2,
            hidden=64,
            ffn_hidden=128,
            heads=4,
            kv_heads=2,
            head_dim=16,
            vocab=256,
            max_positions=128,
        ),
        cluster=make_cluster(kind, nodes=nodes, per_node=per_node),
        training=training,
        layout=chosen,
        estimate=make_estimate(tokens=training.tokens_per_step, gpus=nodes * per_node),
        alternatives=(),
        sources=(("model", "made by hand"),),
        assumptions=(),
        warnings=(),
        versions=(("fsdpplan", "0.1.0"),),
    )


def make_cluster(kind: DeviceKind, *, nodes: int, per_node: int) -> Cluster:
    """`nodes` nodes of `per_node` devices."""
    sizes = [("inside", per_node), ("between", nodes * per_node)][: 2 if nodes > 1 else 1]
    return Cluster(
        name=f"some-{kind}",
        device=_device(kind),
        gpus=nodes * per_node,
        gpus_per_node=per_node,
        levels=tuple(
            Level(
                name=name,
                domain_gpus=size,
                ports=1,
                port_bandwidth_bytes_per_second=1e9,
                latency_seconds=1e-5,
                bandwidth_fraction=0.8,
                half_bandwidth_bytes=1e5,
                gpudirect=True,
            )
            for name, size in sizes
        ),
    )


def make_estimate(*, tokens: int, gpus: int, seconds: float = 0.2) -> Estimate:
    """A prediction of `seconds` a step, with a band from half to twice that."""
    return Estimate(
        step_seconds=Interval(lower=seconds / 2, expected=seconds, upper=seconds * 2),
        tokens_per_second=tokens / seconds,
        tokens_per_second_per_gpu=tokens / seconds / gpus,
        mfu_fraction=0.2,
        hfu_fraction=0.2,
        bottleneck="compute",
        runnable=True,
        time=TimeBreakdown(
            compute_seconds=seconds / 2,
            exposed_communication_seconds=seconds / 4,
            bubble_seconds=0.0,
            optimizer_seconds=seconds / 4,
        ),
        memory=MemoryBreakdown(
            parameters_bytes=10**6,
            gradients_bytes=10**6,
            optimizer_bytes=2 * 10**6,
            unsharded_parameters_bytes=10**6,
            unsharded_gradients_bytes=10**6,
            activations_bytes=10**6,
            logits_bytes=10**6,
            temporaries_bytes=0,
            reserved_overhead_bytes=10**6,
            context_bytes=0,
            peak_phase="backward",
        ),
        communication=(),
    )


def _device(kind: DeviceKind) -> Device:
    return Device(
        name=f"some-{kind}-device",
        kind=kind,
        memory_bytes=2**32,
        memory_bandwidth_bytes_per_second=1e10,
        peak_bf16_flops_per_second=1e11,
        peak_fp16_flops_per_second=1e11,
        peak_fp32_flops_per_second=1e11,
        peak_fp8_flops_per_second=None,
        multiprocessors=1,
        host_link_bytes_per_second=1e10,
        evidence="measured",
        fit=DeviceFit(
            matmul_fraction=0.5,
            attention_forward_fraction=0.5,
            memory_fraction=0.5,
            attention_backward_ratio=1.0,
            kernel_launch_seconds=1e-6,
            overlap_slowdown_fraction=0.0,
            fragmentation_fraction=0.05,
            context_bytes=0,
            communicator_bytes=0,
        ),
        error=StepError(
            base_fraction=0.5,
            matmul_fraction=0.1,
            attention_fraction=0.1,
            element_wise_fraction=0.1,
            launch_fraction=0.1,
            inside_fraction=0.1,
            across_fraction=0.1,
            bubble_fraction=0.1,
            layout_fraction=0.01,
        ),
    )
