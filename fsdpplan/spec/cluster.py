"""Cluster: the devices, the links by level, and how many of them there are."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Literal, get_args

from fsdpplan.errors import SpecError
from fsdpplan.spec.nodes import Network
from fsdpplan.spec.runtime import StackFamily
from fsdpplan.spec.values import (
    RemembersHash,
    remembered_hash,
    require_choice,
    require_fraction,
    require_positive,
    require_positive_int,
)

DeviceKind = Literal["cuda", "cpu"]
Vendor = Literal["nvidia", "amd"]
Evidence = Literal["measured", "fitted", "datasheet"]
LowLatency = Literal["none", "ll", "ll128"]

NVLINK = "nvlink"
"""Name of the level of NVLink."""

_CAPABILITY = re.compile(r"[0-9]{1,2}\.[0-9]")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFit:
    """Fitted numbers of a device; its profile says how each was obtained.

    Four belong to the device (`matmul_fraction`, `sustained_fraction`,
    `attention_forward_fraction`, `memory_fraction`); the others are the same for every CUDA device
    and stand in the profile `physics`.
    """

    matmul_fraction: float
    """Share of the dense peak that a large bf16 matmul reaches."""
    attention_forward_fraction: float
    """Share of the dense peak that fused causal attention reaches in forward."""
    memory_fraction: float
    """Share of the memory bandwidth that element-wise kernels reach."""
    attention_backward_ratio: float
    """Rate of fused attention in backward as a share of its rate in forward."""
    kernel_launch_seconds: float
    """Least time between two kernels of an eager program: what one costs on the host."""
    overlap_slowdown_fraction: float
    """Extra compute time while a collective runs beside it, as a share of the overlapped time."""
    fragmentation_fraction: float
    """Memory reserved beyond the peak allocated, as a share of the latter."""
    context_bytes: int
    """Device memory outside torch's allocator: CUDA context and libraries."""
    communicator_bytes: int
    """Device memory of one NCCL communicator (one a mesh axis)."""
    growing_fragmentation_fraction: float | None = None
    """`fragmentation_fraction` where the allocator's segments grow and several streams have memory
    (with one nothing is reserved beyond what is allocated); None: as without."""
    lasting_fragments_fraction: float = 0.0
    """Share of the fragments that lies in segments where something lives: the allocator cannot give
    it back."""
    peak_memory_stack_fraction: float = 0.0
    """Standard deviation of the log of the peak memory of all ranks of one stack alike: how far
    softwares lie apart."""
    peak_memory_base_fraction: float = 0.0
    """The same of each peak by itself."""
    matmul_fill_depth: float = 0.0
    """Depth k that filling and draining the pipeline of one matmul tile is worth."""
    matmul_wave_fraction: float = 0.0
    """Share of the idle multiprocessors of the last wave that is really lost: 1 for one tile a
    multiprocessor at a time, less where kernels split tiles among them."""
    matmul_start_seconds: float = 0.0
    """Time on the device before and after the tiles of a matmul, whatever its size."""
    fp8_fraction: float = 1.0
    """Share of the fp8 peak that a large fp8 matmul reaches, relative to `matmul_fraction`."""
    unaligned_fraction: float = 1.0
    """Rate of matmuls whose rows do not begin at multiples of 16 bytes, as a share of aligned
    ones'."""
    native_attention_ratio: float = 1.0
    """Rate in forward of fused attention written for asynchronous tensor cores (Hopper, Blackwell)
    over that of kernels that are not."""
    native_backward_ratio: float = 0.8
    """Rate of such attention in backward as a share of its rate in forward."""
    throttled_fraction: float = 1.0
    """Rate of a matmul that runs on its own for long, as a share of a short one's: the power limit
    has lowered the clock by then."""
    throttle_seconds: float = 0.0
    """Time constant with which it does; 0: a matmul on its own never runs into it."""
    host_link_fraction: float = 1.0
    """Share of the host link's rate that large copies from and to pinned memory reach."""
    host_memory_fraction: float = 1.0
    """Share of the datasheet bandwidth of a node's own memory that additions and optimizers on its
    CPUs reach, and copies of all its devices together."""
    sustained_fraction: float = 1.0
    """Rate of matmuls and attention in a training step as a share of their rate on their own: a
    long step is held to the power cap, a short benchmark is not. Of the device, whatever trains."""
    stack_fraction: float = 1.0
    """Rate that softwares of others reach of that on devices of this generation: what they lose
    between kernels, and by other kernels than those that were timed alone."""

    straggler_fraction: float = 0.0
    """Standard deviation of the rate of single devices: a step waits for the slowest of them."""
    megatron_pace: float = 1.0
    """Rate that the kernels of Megatron Core sustain as a share of those of PyTorch's softwares:
    the mean over projects of that family, as the next two."""
    early_megatron_pace: float = 1.0
    """The same of Megatron-LM before FlashAttention and its relatives."""
    other_pace: float = 1.0
    """The same of softwares of which too few projects are known: the mean of the families."""

    def sustained(self, family: StackFamily) -> float:
        """`sustained_fraction`, less what softwares of that family lose; 1 at most."""
        paces = {
            "pytorch": 1.0,
            "megatron": self.megatron_pace,
            "early_megatron": self.early_megatron_pace,
            "other": self.other_pace,
        }
        if family == "own":
            return self.sustained_fraction
        return min(1.0, self.sustained_fraction * self.stack_fraction * paces[family])

    @property
    def attention_backward_fraction(self) -> float:
        """Share of the dense peak that fused causal attention reaches in backward."""
        return self.attention_forward_fraction * self.attention_backward_ratio

    def __post_init__(self) -> None:
        shares = {
            "matmul_fraction": self.matmul_fraction,
            "attention_forward_fraction": self.attention_forward_fraction,
            "memory_fraction": self.memory_fraction,
            "attention_backward_ratio": self.attention_backward_ratio,
            "fp8_fraction": self.fp8_fraction,
            "sustained_fraction": self.sustained_fraction,
            "stack_fraction": self.stack_fraction,
            "throttled_fraction": self.throttled_fraction,
            "host_link_fraction": self.host_link_fraction,
            "host_memory_fraction": self.host_memory_fraction,
        }
        require_positive(
            **shares,
            unaligned_fraction=self.unaligned_fraction,
            native_attention_ratio=self.native_attention_ratio,
            native_backward_ratio=self.native_backward_ratio,
        )
        require_fraction(
            **shares,
            unaligned_fraction=self.unaligned_fraction,
            overlap_slowdown_fraction=self.overlap_slowdown_fraction,
            straggler_fraction=self.straggler_fraction,
            fragmentation_fraction=self.fragmentation_fraction,
            matmul_wave_fraction=self.matmul_wave_fraction,
        )
        if not 0 <= self.matmul_fill_depth < 1e6 or not 0 <= self.matmul_start_seconds < 1:
            raise SpecError(
                "matmul_fill_depth must lie in [0, 1e6) and matmul_start_seconds in [0, 1), not "
                f"{self.matmul_fill_depth!r} and {self.matmul_start_seconds!r}"
            )
        require_positive(
            megatron_pace=self.megatron_pace,
            early_megatron_pace=self.early_megatron_pace,
            other_pace=self.other_pace,
        )
        if not 0 <= self.throttle_seconds < 1e3:
            raise SpecError(f"throttle_seconds must lie in [0, 1e3), not {self.throttle_seconds!r}")
        if not 0 <= self.kernel_launch_seconds < 1:
            raise SpecError(
                f"kernel_launch_seconds must lie in [0, 1), not {self.kernel_launch_seconds!r}"
            )
        for name in ("peak_memory_stack_fraction", "peak_memory_base_fraction"):
            if not 0 <= getattr(self, name) <= 3:
                raise SpecError(f"{name} must lie in [0, 3], not {getattr(self, name)!r}")
        require_fraction(
            lasting_fragments_fraction=self.lasting_fragments_fraction,
            growing_fragmentation_fraction=self.growing_fragmentation_fraction or 0.0,
        )
        if min(self.context_bytes, self.communicator_bytes) < 0:
            raise SpecError("context_bytes and communicator_bytes must be at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedPeaks:
    """What measured runs say of the peak of device memory of one stack."""

    runs: int
    """That were learned from."""
    shift_log: float
    """Mean of the log of measured over predicted peaks."""
    stack_fraction: float
    """What is left of `DeviceFit.peak_memory_stack_fraction`."""

    def __post_init__(self) -> None:
        require_positive_int(runs=self.runs)
        if not -3 <= self.shift_log <= 3:
            raise SpecError(f"shift_log must lie in [-3, 3], not {self.shift_log!r}")
        if not 0 <= self.stack_fraction <= 3:
            raise SpecError(f"stack_fraction must lie in [0, 3], not {self.stack_fraction!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepError:
    """How far predicted step times are off: standard deviations of their logarithm.

    Each kind of part of a step has its own error, which the step has in proportion to that part's
    share (`fsdpplan.cost.band`).
    """

    base_fraction: float
    """Of every step, whatever it is made of."""
    stack_fraction: float = 0.0
    """Of all steps of one stack alike, a project's software and machine: how far projects of one
    family lie apart. It cancels between layouts of one stack, and its own runs settle it."""
    own_stack_fraction: float = 0.0
    """The same of the package's own trainer on one GPU, where its kernels were profiled: how far
    machines lie apart. 0: as `stack_fraction`."""
    matmul_fraction: float
    """Of the matmuls of blocks."""
    attention_fraction: float
    """Of attention."""
    element_wise_fraction: float
    """Of all other kernels, the optimizer's among them."""
    launch_fraction: float
    """Of time in which the host cannot start kernels fast enough."""
    inside_fraction: float
    """Of exposed communication on the innermost level of the network."""
    across_fraction: float
    """Of exposed communication on outer levels."""
    bubble_fraction: float
    """Of the pipeline's bubble."""
    layout_fraction: float
    """Of the ratio of two layouts' step times, beyond what their parts explain."""

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if not 0 <= value <= 3:
                raise SpecError(f"{one.name} must lie in [0, 3], not {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device(RemembersHash):
    """One accelerator as torch sees it (or one CPU process)."""

    __hash__ = remembered_hash

    name: str
    """Profile name, such as `h100-sxm-80g`."""
    kind: DeviceKind
    """What torch calls it."""
    memory_bytes: int
    """Memory that torch reports for one device."""
    memory_bandwidth_bytes_per_second: float
    """Datasheet bandwidth of that memory."""
    peak_bf16_flops_per_second: float
    """Dense peak rate."""
    peak_fp16_flops_per_second: float
    """Dense peak rate."""
    peak_fp32_flops_per_second: float
    """Dense peak rate of true fp32 (not TF32): torch's default for fp32 matmuls."""
    peak_fp8_flops_per_second: float | None
    """Dense peak rate; None where there is no fp8."""
    multiprocessors: int
    """Units that run matmul tiles (SMs); 1 on a CPU."""
    host_link_bytes_per_second: float
    """Link between device and host, one direction."""
    evidence: Evidence
    """The weakest evidence behind the fitted numbers."""
    fit: DeviceFit
    """Fitted numbers."""
    error: StepError
    """How far step times on it are off, for its kind of evidence."""
    vendor: Vendor = "nvidia"
    """Whose software drives a device that torch calls `cuda`: CUDA and NCCL, or ROCm and RCCL."""
    learned_peaks: LearnedPeaks | None = None
    """What the user's runs say of peaks of memory on it; None: nothing, and so in profiles."""
    compute_capability: str | None = None
    """CUDA's name of the architecture, such as `9.0`; None: not known, or not CUDA's."""
    skypilot_name: str | None = None
    """What SkyPilot calls it; None: no cloud rents it by that, or it is not known."""

    @property
    def unit(self) -> str:
        """What people call one of it."""
        return "GPU" if self.kind == "cuda" else "process"

    def counted(self, number: int) -> str:
        """`8 GPUs`, `1 process`."""
        many = {"GPU": "GPUs", "process": "processes"}
        return f"{number:,} {self.unit if number == 1 else many[self.unit]}"

    def __post_init__(self) -> None:
        require_choice("kind", self.kind, get_args(DeviceKind))
        require_choice("vendor", self.vendor, get_args(Vendor))
        require_choice("evidence", self.evidence, get_args(Evidence))
        if self.compute_capability is not None and not _CAPABILITY.fullmatch(
            self.compute_capability
        ):
            raise SpecError(
                f"compute_capability must be as CUDA has it, such as 9.0, not "
                f"{self.compute_capability[:20]!r}"
            )
        require_positive_int(memory_bytes=self.memory_bytes, multiprocessors=self.multiprocessors)
        require_positive(
            memory_bandwidth_bytes_per_second=self.memory_bandwidth_bytes_per_second,
            peak_bf16_flops_per_second=self.peak_bf16_flops_per_second,
            peak_fp16_flops_per_second=self.peak_fp16_flops_per_second,
            peak_fp32_flops_per_second=self.peak_fp32_flops_per_second,
            host_link_bytes_per_second=self.host_link_bytes_per_second,
        )
        if self.peak_fp8_flops_per_second is not None:
            require_positive(peak_fp8_flops_per_second=self.peak_fp8_flops_per_second)

    def peak_flops_per_second(self, dtype: str) -> float:
        """Dense peak of `dtype` (bf16, fp16, fp32, fp8). Raises SpecError where it has none."""
        peaks = {
            "bf16": self.peak_bf16_flops_per_second,
            "fp16": self.peak_fp16_flops_per_second,
            "fp32": self.peak_fp32_flops_per_second,
            "fp8": self.peak_fp8_flops_per_second,
        }
        peak = peaks.get(dtype)
        if peak is None:
            raise SpecError(f"{self.name} has no {dtype} matmul rate; use --precision bf16")
        return peak


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of the network, from the inside out.

    A domain of this level joins `domain_gpus` GPUs of the job. It is made of domains of the level
    below (single GPUs for the innermost level), and each of those reaches this level by `ports`
    ports.
    """

    name: str
    """`nvlink`, `infiniband`, `ethernet`, `shm`, ..."""
    domain_gpus: int
    """GPUs of the job that one domain of this level joins."""
    ports: int
    """Ports by which one domain of the level below reaches this level."""
    port_bandwidth_bytes_per_second: float
    """One port, one direction, datasheet."""
    latency_seconds: float
    """Time of one hop of a small message."""
    bandwidth_fraction: float
    """Fitted share of the datasheet bandwidth that large collectives reach."""
    half_bandwidth_bytes: float
    """Fitted: below these bytes a large-message transfer fills its channels so badly that it
    reaches only half of that share."""
    gpudirect: bool
    """The ports read device memory directly; if not, data goes through host memory."""
    base_seconds: float = 0.0
    """Fitted: launch and synchronisation of a large-message collective that spans this level."""
    start_seconds: float = 0.0
    """Fitted: what any collective over this level, the innermost one, takes before its protocol's
    own start."""
    multicast_fraction: float = 0.0
    """Fitted share of the datasheet bandwidth of an all-reduce in which the switch itself
    reduces and multicasts (NVLS: NVSwitch of H100 and later); 0 where it cannot."""
    crowding_exponent: float = 0.0
    """Fitted: a collective over N domains of this level takes (N / 2) to this power as long as its
    bytes need; what routes, switches and stragglers lose as groups grow."""
    low_latency: LowLatency = "ll128"
    """The best of NCCL's protocols for small messages that runs over these links."""
    whole_gpus: int | None = None
    """GPUs that a domain has, where the job uses fewer of each: 72, beside `domain_gpus` 64. None:
    it uses all."""

    def __post_init__(self) -> None:
        require_positive_int(domain_gpus=self.domain_gpus, ports=self.ports)
        if self.whole_gpus is not None:
            require_positive_int(whole_gpus=self.whole_gpus)
            if self.whole_gpus <= self.domain_gpus:
                raise SpecError(
                    f"whole_gpus {self.whole_gpus} is of domains of which a job uses fewer, not "
                    f"{self.domain_gpus}: leave it out"
                )
        require_positive(
            port_bandwidth_bytes_per_second=self.port_bandwidth_bytes_per_second,
            bandwidth_fraction=self.bandwidth_fraction,
        )
        require_fraction(bandwidth_fraction=self.bandwidth_fraction)
        require_choice("low_latency", self.low_latency, get_args(LowLatency))
        if not 0 <= self.latency_seconds < 1:
            raise SpecError(f"latency_seconds must lie in [0, 1), not {self.latency_seconds!r}")
        require_fraction(multicast_fraction=self.multicast_fraction)
        if not 0 <= self.crowding_exponent <= 1:
            raise SpecError(f"crowding_exponent must lie in [0, 1], not {self.crowding_exponent!r}")
        if not 0 <= self.start_seconds < 1:
            raise SpecError(f"start_seconds must lie in [0, 1), not {self.start_seconds!r}")
        if not 0 <= self.base_seconds < 1:
            raise SpecError(f"base_seconds must lie in [0, 1), not {self.base_seconds!r}")
        if not 0 <= self.half_bandwidth_bytes < 1e12:
            raise SpecError(
                f"half_bandwidth_bytes must lie in [0, 1e12), not {self.half_bandwidth_bytes!r}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class WeakSpot:
    """A part of some nodes that is slower than its equals; all others wait for it."""

    nodes: tuple[str, ...]
    """Names of the nodes."""
    level: str | None
    """Level whose ports are slow; None: the device itself."""
    remaining_fraction: float
    """What is left of the bandwidth, or of the device's rate."""
    text: str
    """What is so: `mlx5_3 runs at 100 Gb/s, its equals at 400 Gb/s`."""

    def __post_init__(self) -> None:
        if not self.nodes or not all(self.nodes):
            raise SpecError("a weak spot needs the names of its nodes: give nodes")
        require_positive(remaining_fraction=self.remaining_fraction)
        require_fraction(remaining_fraction=self.remaining_fraction)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster(RemembersHash):
    """Equal nodes of equal devices, joined by levels of links."""

    __hash__ = remembered_hash

    name: str
    """Profile name, or what was declared."""
    device: Device
    """What every rank runs on."""
    gpus: int
    """Devices to train on, in all."""
    gpus_per_node: int
    """Devices used on each node."""
    levels: tuple[Level, ...]
    """Innermost first; the last one joins all devices. What is weak is counted in."""
    network: Network | None = None
    """What a launch must know of the network between nodes; None where nothing is known."""
    weak: tuple[WeakSpot, ...] = ()
    """What holds the others back; see `fsdpplan.spec.weak`."""
    host_memory_bytes_per_second: float | None = None
    """Datasheet bandwidth of a node's own memory, all sockets together; None: not known."""
    host_memory_bytes: int | None = None
    """A node's own memory, which its ranks share; None: not known."""

    def __post_init__(self) -> None:
        require_positive_int(gpus=self.gpus, gpus_per_node=self.gpus_per_node)
        if self.host_memory_bytes is not None:
            require_positive_int(host_memory_bytes=self.host_memory_bytes)
        if self.host_memory_bytes_per_second is not None:
            require_positive(host_memory_bytes_per_second=self.host_memory_bytes_per_second)
        if self.gpus % self.gpus_per_node:
            raise SpecError(
                f"{self.gpus} GPUs do not fill nodes of {self.gpus_per_node}: use --gpus "
                f"{self.gpus // self.gpus_per_node * self.gpus_per_node or self.gpus_per_node} or "
                f"{(self.gpus // self.gpus_per_node + 1) * self.gpus_per_node}, "
                "or give --gpus-per-node"
            )
        if not self.levels:
            raise SpecError("a cluster needs at least one level of links: give levels")
        sizes = [level.domain_gpus for level in self.levels]
        if sizes != sorted(set(sizes)):
            raise SpecError(
                f"levels must grow outwards: domain_gpus {sizes} is not strictly increasing"
            )
        if sizes[-1] < self.gpus:
            raise SpecError(
                f"the outermost level joins {sizes[-1]} GPUs, but {self.gpus} are asked for: use "
                f"--gpus {sizes[-1]}, or add a level"
            )

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.gpus // self.gpus_per_node

    @property
    def gpudirect(self) -> bool | None:
        """Whether ports between nodes read device memory, as collectives are priced and a job is
        launched; None where there is no such port: on one node, and of CPU processes."""
        if self.nodes == 1 or self.device.kind == "cpu":
            return None
        return all(level.gpudirect for level in self.levels if self.joins_nodes(level))

    def joins_nodes(self, level: Level) -> bool:
        """Whether domains of `level` reach beyond a node."""
        return level.domain_gpus > self.gpus_per_node

    def peerless_level(self, ranks: int) -> Level | None:
        """The innermost level among those that join `ranks` neighbouring GPUs over which they
        cannot map each other's memory; None where they can.

        Between nodes they can over NVLink alone. Processes of a CPU share the host's memory.
        """
        if self.device.kind == "cpu":
            return None
        below = 1
        for level in self.levels:
            maps = level.name == NVLINK if self.joins_nodes(level) else level.gpudirect
            if below < ranks and not maps:
                return level
            below = level.domain_gpus
        return None

    @property
    def nvlink_domain(self) -> Level | None:
        """The level by which NVLink joins GPUs of several nodes (NVL72); None where it joins none.

        The ranks of a domain must then be on nodes of one domain: a scheduler has to be told.
        """
        inner = self.levels[0]
        return inner if inner.name == NVLINK and self.joins_nodes(inner) else None

    @property
    def segment_nodes(self) -> int | None:
        """Nodes that must be of one NVLink domain, again and again from the first one on; None
        where NVLink joins no nodes, or the nodes do not fill its domains evenly."""
        domain = self.nvlink_domain
        if domain is None or self.gpus % domain.domain_gpus:
            return None
        return domain.domain_gpus // self.gpus_per_node
