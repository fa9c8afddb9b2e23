"""Plan: what is asked of the cost model, what it says, and the layouts chosen for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fsdpplan.errors import SpecError
from fsdpplan.spec.adapters import adapted, plain
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.layout import MESH_AXES, Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import TorchRelease, Training
from fsdpplan.spec.values import RemembersHash, remembered_hash, replace, require_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class Case(RemembersHash):
    """What is trained, on what, and how: all that decides its time, its memory, its collectives and
    what it needs of torch.

    A part of a model is a case of its own: blocks without experts, or those that keep everything
    while others recompute.
    """

    __hash__ = remembered_hash

    model: Model
    cluster: Cluster
    training: Training
    layout: Layout

    def __post_init__(self) -> None:
        training = self.training
        if training.adapters is not None or type(self.model) is not Model:
            model = adapted(self.model, training.adapters, training.activation_dtype)
            object.__setattr__(self, "model", model)

    def of_blocks(self, kind: Model) -> Case:
        """As it is for the blocks of one kind: `kind` is the model with all blocks like them."""
        return self if kind is self.model else replace(self, model=kind)

    @property
    def phases(self) -> tuple[tuple[float, Case], ...]:
        """(share of the steps, case) of each part of the run; itself where nothing changes."""
        if self.training.precision_switch == "none":
            return ((1.0, self),)
        return tuple((share, replace(self, training=each)) for share, each in self.training.phases)

    @property
    def trades_heads(self) -> bool:
        """Whether context-parallel ranks trade heads for tokens around attention."""
        return self.layout.cp_attention == "ulysses" or not self.on_cuda

    @property
    def on_cuda(self) -> bool:
        """Whether it trains on CUDA devices."""
        return self.cluster.device.kind == "cuda"


Collective = Literal[
    "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv", "broadcast"
]
"""What is priced, measured and counted, as torch spells it; `send_recv` is a message on its way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An expected value with its 80 % band."""

    lower: float
    expected: float
    upper: float

    def scaled(self, factor: float) -> Interval:
        """So many times as much: the band in the same proportion."""
        return Interval(
            lower=self.lower * factor, expected=self.expected * factor, upper=self.upper * factor
        )

    def inverse(self, expected: float) -> Interval:
        """What goes by the inverse of this, as a rate does by its time: the band turned round."""
        return Interval(
            lower=expected * (self.expected / self.upper),
            expected=expected,
            upper=expected * (self.expected / self.lower),
        )


TIME_WORDS = {
    "compute_seconds": "compute",
    "exposed_communication_seconds": "communication",
    "bubble_seconds": "pipeline bubble",
    "optimizer_seconds": "optimizer",
    "host_seconds": "host copies",
}
"""The parts of a step, and how people read them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeBreakdown:
    """Seconds of one optimizer step on the slowest rank; the parts add up to the step."""

    compute_seconds: float
    """Forward, backward and recomputation kernels."""
    exposed_communication_seconds: float
    """Time in which the device waits for a collective or a point-to-point message."""
    bubble_seconds: float
    """Time in which a pipeline rank waits for its neighbours."""
    optimizer_seconds: float
    """Gradient norm, clipping and optimizer step."""
    host_seconds: float = 0.0
    """Time in which the device waits for copies from and to the host and for what it adds, with
    offload."""
    matmul_seconds: float = 0.0
    """Part of compute: the matmuls of the blocks, but those in `launch_seconds`."""
    attention_seconds: float = 0.0
    """Part of compute: the blocks' scores, softmax and weighted values, likewise."""
    launch_seconds: float = 0.0
    """Part of compute: passes through blocks whose kernels the host cannot start fast enough."""
    launch_chance_seconds: float = 0.0
    """Passes through blocks, each by the chance that it waits for the host: what `launch_seconds`
    are if hosts, and programs on them, are as different as they are."""
    passes: tuple[tuple[float, float], ...] = ()
    """Passes through blocks, forward and backward of each kind: (seconds of the host, of the
    device), of which a pass takes the longer."""
    exposed_inside_seconds: float = 0.0
    """Part of exposed communication: on the innermost level of the network."""
    exposed_across_seconds: float = 0.0
    """Part of exposed communication: on outer levels."""

    @property
    def terms(self) -> dict[str, float]:
        """The parts of the step in seconds, by the names that people read."""
        return {words: getattr(self, field) for field, words in TIME_WORDS.items()}

    @property
    def total_seconds(self) -> float:
        """Sum of the parts: the step."""
        return (
            self.compute_seconds
            + self.exposed_communication_seconds
            + self.bubble_seconds
            + self.optimizer_seconds
            + self.host_seconds
        )


MEMORY_WORDS = {
    "parameters_bytes": "parameters",
    "gradients_bytes": "gradients",
    "optimizer_bytes": "optimizer state",
    "unsharded_parameters_bytes": "gathered parameters",
    "unsharded_gradients_bytes": "unreduced gradients",
    "activations_bytes": "activations",
    "logits_bytes": "logits and loss",
    "temporaries_bytes": "temporaries",
    "reserved_overhead_bytes": "allocator reserve",
    "context_bytes": "driver and libraries",
}
"""The parts of a peak, and how people read them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBreakdown:
    """Bytes on the fullest rank at its peak; `*_bytes` parts add up to `peak_allocated_bytes`."""

    parameters_bytes: int
    """Sharded (or replicated) master parameters."""
    gradients_bytes: int
    """Sharded gradients that are alive at the peak."""
    optimizer_bytes: int
    """Optimizer state."""
    unsharded_parameters_bytes: int
    """Gathered parameters and gather buffers alive at the peak."""
    unsharded_gradients_bytes: int
    """Gradients not yet reduced, and reduction buffers, alive at the peak."""
    activations_bytes: int
    """Saved for backward, at the peak."""
    logits_bytes: int
    """Logits, loss and their gradients, at the peak."""
    temporaries_bytes: int
    """Short-lived tensors of the operation at the peak."""
    reserved_overhead_bytes: int
    """Reserved by torch's allocator beyond what is allocated."""
    context_bytes: int
    """Outside torch's allocator: CUDA context, NCCL buffers."""
    peak_phase: str
    """Where in the step the peak is: forward, loss, backward, optimizer."""
    host_bytes: int = 0
    """Host memory of one rank that offloading takes: parameter and gradient shards, optimizer."""
    initialization_peak_bytes: int = 0
    """Allocated on the device at the highest point before the first step."""
    checkpoint_peak_bytes: int = 0
    """Allocated on the device at the highest point while a checkpoint is written between steps."""
    checkpoint_host_bytes: int = 0
    """Host memory that an asynchronous checkpoint stages its copy in."""
    stage_peak_device_bytes: tuple[int, ...] = ()
    """`peak_device_bytes` of each pipeline rank, first to last; the highest is described here."""
    releasable_bytes: int = 0
    """Part of `reserved_overhead_bytes` that the allocator gives back before a request fails."""
    peak_device_band_bytes: Interval | None = None
    """`peak_device_bytes`, as measured runs say where there are some, with its 80 % band; None: not
    known, as of CPU processes."""
    fits_fraction: float | None = None
    """Chance that `peak_device_bytes` stays within the device's memory; None likewise."""

    @property
    def terms(self) -> dict[str, int]:
        """The parts of the peak on the device, in bytes, by the names that people read."""
        return {words: getattr(self, field) for field, words in MEMORY_WORDS.items()}

    @property
    def peak_allocated_bytes(self) -> int:
        """What `torch.cuda.max_memory_allocated` should show."""
        return int(
            self.parameters_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.unsharded_parameters_bytes
            + self.unsharded_gradients_bytes
            + self.activations_bytes
            + self.logits_bytes
            + self.temporaries_bytes
        )

    @property
    def peak_reserved_bytes(self) -> int:
        """What `torch.cuda.max_memory_reserved` should show."""
        return self.peak_allocated_bytes + self.reserved_overhead_bytes

    @property
    def peak_device_bytes(self) -> int:
        """What `nvidia-smi` should show for the process."""
        return self.peak_reserved_bytes + self.context_bytes

    @property
    def expected_over_predicted(self) -> float:
        """What measured runs make of predicted peaks."""
        band = self.peak_device_band_bytes
        return 1.0 if band is None else band.expected / self.peak_device_bytes

    @property
    def least_device_bytes(self) -> int:
        """What the step cannot run without: the peak less what the allocator gives back."""
        return self.peak_device_bytes - self.releasable_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCost:
    """All calls of one collective on one mesh axis, for one rank and one step."""

    collective: str
    """`all_gather`, `reduce_scatter`, `all_reduce`, `all_to_all`, `send_recv`."""
    axis: str
    """Mesh axis, or axes joined by `*`."""
    ranks: int
    """Ranks in the group."""
    level: str
    """Outermost level of the network that the group spans."""
    dtype: str
    """Number format of the payload."""
    count: int
    """Calls."""
    bytes: int
    """The full unsharded buffer, summed over the calls."""
    seconds: float
    """Time of the calls, summed, without contention from compute."""
    exposed_seconds: float
    """Part of it in which the device has nothing else to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedStep:
    """What measured runs changed in a predicted step."""

    runs: int
    """Runs that tell of such a step."""
    factor: float
    """Expected step time over that without them."""
    without: Interval
    """The step without them, in seconds."""
    nearest: str
    """The run that tells most, in words: `same model, 32 GPUs, tp 2`."""
    far: str
    """In what even that run is far, such as `nearest run has 8 times fewer GPUs`; empty: in
    nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseEstimate:
    """Prediction for the part of a run that is in one precision."""

    precision: str
    from_fraction: float
    """Share of the steps that come before it."""
    step_seconds: Interval
    tokens_per_second: float
    mfu_fraction: float
    peak_device_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Estimate:
    """Prediction for one layout.

    Where the precision changes in mid-run, times are the mean over all steps, memory is that of
    the part that needs more, and `phases` has each part by itself.
    """

    step_seconds: Interval
    """An optimizer step, with its 80 % band."""
    tokens_per_second: float
    """Of all GPUs together."""
    tokens_per_second_per_gpu: float
    """Of one of them."""
    mfu_fraction: float
    """Useful FLOPs over the dense peak of the precision; recomputation does not count."""
    hfu_fraction: float
    """Executed FLOPs, recomputation included, over the same peak."""
    bottleneck: str
    """The largest part of the step; of communication the collective that is waited for most."""
    runnable: bool
    """Today's trainer can run this layout."""
    time: TimeBreakdown
    """The parts of the step."""
    memory: MemoryBreakdown
    """Of the fullest rank at its peak."""
    communication: tuple[CollectiveCost, ...]
    """Each collective on each axis of the mesh, a rank and step."""
    learned: LearnedStep | None = None
    """What the user's runs changed; None: nothing. The parts of the time are without them."""
    phases: tuple[PhaseEstimate, ...] = ()
    """The parts of a run whose precision changes; empty: it does not."""

    def __repr__(self) -> str:
        from fsdpplan.spec.shown import as_text  # for whoever looks at one

        return as_text("Estimate", _estimate_rows(self))

    def _repr_html_(self) -> str:
        from fsdpplan.spec.shown import as_html

        return as_html("Estimate", _estimate_rows(self))


def _estimate_rows(estimate: Estimate) -> list[tuple[str, str]]:
    """What people look at first."""
    from fsdpplan.units import format_gib, format_percent, format_seconds

    step, memory = estimate.step_seconds, estimate.memory
    ends = f"{format_seconds(step.lower)} to {format_seconds(step.upper)}"
    return [
        ("step", f"{format_seconds(step.expected)} ({ends})"),
        ("tokens/s", f"{estimate.tokens_per_second:,.0f}"),
        ("MFU", format_percent(estimate.mfu_fraction)),
        ("bottleneck", estimate.bottleneck),
        ("memory", f"{format_gib(memory.peak_device_bytes)} in {memory.peak_phase}"),
    ]


TORCH_SOURCE = "training.torch"
"""Names the source of the release in a plan's sources."""
VOCAB_SOURCE = "model.vocab_multiple"
"""Names the source of a padded vocabulary."""
DEFAULT_SOURCE = "default"
"""Source of what was not said."""

_PADDED = "vocabulary padded from"


def assumed(said: tuple[str, ...], *, model: Model, layout: Layout) -> tuple[str, ...]:
    """The assumptions `said`, with what this `layout` takes for granted of `model` in the place of
    what another one does."""
    rest = tuple(sentence for sentence in said if not sentence.startswith(_PADDED))
    rows = model.vocab_rows(layout.tp)
    if rows == model.vocab:
        return rest
    why = f" for tp {layout.tp}"
    if model.vocab_multiple > 1:
        why = f", {model.vocab_multiple} by {rows // model.vocab_multiple:,} (--vocab-multiple)"
    return (*rest, f"{_PADDED} {model.vocab:,} to {rows:,} rows{why}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenRule:
    """A rule of the field that a layout breaks, with what obeying it brings."""

    rule: str
    """Its name: `exposed-communication`."""
    what: str
    """What `number` is: `exposed communication over the step`."""
    number: float
    """What broke it: the estimate's own, or the layout's place on the network."""
    limit: float
    """What it must not cross."""
    says: str
    """A sentence with the number."""
    advice: str
    """What to do, and what that brings where it was priced."""
    source: str
    """Where the rule is from."""
    change: str = ""
    """What to type beside the options that name the layout; empty: nothing that was tried helps, or
    it is not a matter of options."""
    gain_seconds: float = 0.0
    """What obeying takes off a step, for the same tokens; 0: nothing is claimed."""
    gain_bytes: int = 0
    """What it takes off the peak of the fullest device."""
    cost_fraction: float = 0.0
    """By which they are ordered: the gain, or without one what is past the limit, as a share of the
    step or of the device's memory."""
    risks_run: bool = False
    """The run itself is at stake, not its time; such a rule comes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedLayout:
    """One line of the answer."""

    rank: int
    """1 comes first: the fastest that fits, or one that is not told apart from it."""
    layout: Layout
    estimate: Estimate
    reason: str
    """Why it is first, or why it is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """What was said of how a cluster fails. None: it was not, and published figures stand in."""

    gpu_mtbf_seconds: float | None = None
    """Mean time between failures of one GPU."""
    node_mtbf_seconds: float | None = None
    """Of one node, for what is not its GPUs'."""
    storage_bytes_per_second: float | None = None
    """What all ranks together write of a checkpoint, or read."""
    restart_seconds: float | None = None
    """From a failure until the next start reads its checkpoint."""
    requeue_seconds: float | None = None
    """Part of that in which it waits for a node in the place of the one that failed."""

    def __post_init__(self) -> None:
        for name in ("gpu_mtbf_seconds", "node_mtbf_seconds", "storage_bytes_per_second"):
            if getattr(self, name) is not None:
                require_positive(**{name: getattr(self, name)})
        for name in ("restart_seconds", "requeue_seconds"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise SpecError(f"{name} must be a finite number of at least 0, not {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """What a node draws in training."""

    node_watts: float
    log_error: float = 0.0
    """Standard deviation of its logarithm; 0: it was said."""

    def __post_init__(self) -> None:
        require_positive(node_watts=self.node_watts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What was said of the money, energy and time of a whole training; None: it was not."""

    price: float | None = None
    """Of a GPU hour, in dollars."""
    draw: Draw | None = None
    pue: float = 1.0
    """Energy of the site over that of its nodes."""
    co2_grams_per_kwh: float | None = None
    deadline_seconds: float | None = None
    deadline_chance: float | None = None
    """With which the deadline is to be met."""

    def __post_init__(self) -> None:
        for name in ("price", "pue", "deadline_seconds", "deadline_chance"):
            if getattr(self, name) is not None:
                require_positive(**{name: getattr(self, name)})
        grams = self.co2_grams_per_kwh
        if grams is not None and not 0 <= grams < float("inf"):
            raise SpecError(f"co2_grams_per_kwh must be a finite number of at least 0, not {grams}")

    def on(self, cluster: Cluster, *, instead_of: Cluster) -> Terms:
        """What of them holds on other machines: prices and draws are those of a device in its
        node."""
        device = cluster.device.name == instead_of.device.name
        node = device and cluster.gpus_per_node == instead_of.gpus_per_node
        return replace(self, price=self.price if device else None, draw=self.draw if node else None)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan:
    """All that emitting, running and checking need: they never plan again."""

    model: Model
    """What is trained."""
    cluster: Cluster
    """On what."""
    training: Training
    """How much of it, and in which formats."""
    layout: Layout
    """The layout to run."""
    estimate: Estimate
    """Its prediction."""
    alternatives: tuple[RankedLayout, ...]
    """The ranked list that the layout was taken from, itself included."""
    sources: tuple[tuple[str, str], ...]
    """(field, where its value came from) for each input: flag, catalogue, profile, default."""
    assumptions: tuple[str, ...]
    """Sentences on what was not given and what is taken instead."""
    warnings: tuple[str, ...]
    """Sentences on what the user should look at."""
    versions: tuple[tuple[str, str], ...]
    """(name, version) of fsdpplan and Python; torch's is checked where it runs."""
    rules: tuple[BrokenRule, ...] = ()
    """Rules of the field that the layout breaks, the dearest first; the trainer says them."""
    failures: Failures | None = None
    """What was said of how its machines fail; None: nothing."""
    terms: Terms | None = None
    """What was said of the money, energy and time of its training; None: nothing."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", plain(self.model))  # a case's has what training adds
        if self.layout.world != self.cluster.gpus:
            raise SpecError(
                f"the layout has {self.layout.world} ranks, the cluster {self.cluster.gpus} GPUs: "
                "both must be the same"
            )
        if self.layout.global_batch != self.training.global_batch:
            raise SpecError(
                f"the layout takes {self.layout.global_batch} sequences a step, the training "
                f"{self.training.global_batch}: both must be the same"
            )

    def __repr__(self) -> str:
        from fsdpplan.spec.shown import as_text

        return as_text(self._title, self._rows)

    def _repr_html_(self) -> str:
        from fsdpplan.spec.shown import as_html

        return as_html(self._title, self._rows)

    @property
    def _title(self) -> str:
        cluster = self.cluster
        return f"Plan: {self.model.name} on {cluster.gpus} x {cluster.device.name}"

    @property
    def _rows(self) -> list[tuple[str, str]]:
        layout = self.layout
        degrees = ((axis, getattr(layout, axis)) for axis in MESH_AXES)
        split = " x ".join(f"{axis} {degree}" for axis, degree in degrees if degree > 1)
        passes = f"{layout.num_microbatches} x micro-batch {layout.micro_batch}"
        return [
            ("layout", f"{split or 'one rank'}, {layout.sharding}"),
            ("batch", f"{layout.global_batch:,} sequences, {passes} a rank"),
            *_estimate_rows(self.estimate),
        ]

    @property
    def case(self) -> Case:
        """What is trained, on what, and how."""
        return Case(
            model=self.model, cluster=self.cluster, training=self.training, layout=self.layout
        )

    @property
    def torch_source(self) -> str:
        """Where its release of torch came from: a flag, a Python that was asked, an assumption."""
        return dict(self.sources).get(TORCH_SOURCE, DEFAULT_SOURCE)

    @property
    def known_torch(self) -> TorchRelease | None:
        """The release of torch that the job will run; None where it is only assumed."""
        return None if self.torch_source == DEFAULT_SOURCE else self.training.torch_release
