"""Problems for the tests of the cost model and the search: legal ones, and a shorthand for one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import assume
from hypothesis import strategies as st

from fsdpplan.cost.estimate import estimate
from fsdpplan.cost.model.params import kind_views
from fsdpplan.cost.model.shape import infer_model
from fsdpplan.files.catalogue import load_model
from fsdpplan.files.clusters import load_cluster
from fsdpplan.search.rules.legality import first_problem
from fsdpplan.spec import plan as spec_case
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import DeltaRule, Experts, Mamba2, Model
from fsdpplan.spec.plan import Estimate
from fsdpplan.spec.training import Training
from fsdpplan.spec.values import remembered_hash
from tests.strategies import divisors

SMALL = Model(
    name="small",
    layers=8,
    hidden=1024,
    ffn_hidden=4096,
    heads=16,
    kv_heads=8,
    head_dim=64,
    vocab=32000,
)
"""Quick to price, and its widths divide by 8."""

DELTA = replace(
    SMALL,
    name="delta",
    qk_norm=True,
    attention_gate=True,
    mixers="DDA",
    delta=DeltaRule(key_heads=8, value_heads=16, key_head_dim=64, value_head_dim=64),
    experts=Experts(experts=8, active=2, hidden=512, shared_hidden=512, shared_gate=True),
)
"""Three kinds of layers less one, as Qwen 3 Next mixes them."""

STATES = replace(
    SMALL,
    name="states",
    mlp="gelu",
    mixers="M-MA-",
    networks="-E--F",
    mamba=Mamba2(heads=16, head_dim=64, groups=8, state=64),
    experts=Experts(experts=8, active=2, hidden=1024, shared_hidden=1024),
)
"""Blocks of one branch each, of four kinds, as Nemotron has them."""

EVERY_SECOND = replace(
    SMALL,
    name="every second",
    networks="FE",
    sliding_window=256,
    full_attention_every=4,
    window_kind="chunked",
    experts=Experts(experts=8, active=1, hidden=2048, shared_hidden=2048),
)
"""Experts in every second block, as Llama 4 Maverick has them."""

PATTERNED = (DELTA, STATES, EVERY_SECOND)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case(spec_case.Case):
    """A case that is priced when it is asked."""

    __hash__ = remembered_hash

    @property
    def estimate(self) -> Estimate:
        """Its prediction."""
        return estimate(self)

    @property
    def seconds(self) -> float:
        """Its expected step."""
        return self.estimate.step_seconds.expected

    @property
    def problem(self) -> object:
        """What is illegal about it."""
        return first_problem(self)

    def with_layout(self, **changes: object) -> Case:
        """The same with another layout, and the batch that this one takes."""
        layout = replace(self.layout, **changes)  # type: ignore[arg-type]
        training = replace(self.training, global_batch=layout.global_batch)
        return replace(self, layout=layout, training=training)


def case(
    model: str | Model = SMALL,
    *,
    profile: str = "dgx-h100",
    seq_len: int = 1024,
    precision: str = "bf16",
    reduce_dtype: str = "fp32",
    param_dtype: str = "fp32",
    runtime: str = "fsdp2",
    fp8_all_gather: bool = False,
    packed: bool = False,
    program: str = "reference",
    **layout: object,
) -> Case:
    """One case, whose cluster and batch are those that the layout takes."""
    built = Layout(**layout)  # type: ignore[arg-type]
    return Case(
        model=load_model(model) if isinstance(model, str) else model,
        cluster=load_cluster(profile, gpus=built.world).cluster,
        training=Training(
            seq_len=seq_len,
            global_batch=built.global_batch,
            precision=precision,  # type: ignore[arg-type]
            reduce_dtype=reduce_dtype,  # type: ignore[arg-type]
            param_dtype=param_dtype,  # type: ignore[arg-type]
            runtime=runtime,  # type: ignore[arg-type]
            fp8_all_gather=fp8_all_gather,
            program=program,  # type: ignore[arg-type]
            packed=packed,
        ),
        layout=built,
    )


@st.composite
def some_models(draw: st.DrawFn) -> Model:
    """Models of real proportions, with any number of layers."""
    base = draw(
        st.sampled_from(
            [
                SMALL,
                load_model("gpt2-large"),
                load_model("llama-3.1-8b"),
                infer_model(1_000_000_000),
            ]
        )
    )
    return replace(base, layers=draw(st.integers(1, 33)))


@st.composite
def patterned_models(draw: st.DrawFn) -> Model:
    """Models whose blocks are of several kinds, with any number of layers that has them all."""
    base = draw(st.sampled_from(PATTERNED))
    least = max(len(base.mixers), len(base.networks))
    return replace(base, layers=draw(st.integers(least, 33)))


BLOCKS = tuple(view for model in PATTERNED for view in kind_views(model))
"""Models whose blocks are of one of their kinds."""


@st.composite
def cases(draw: st.DrawFn, *, data_parallel_only: bool = False, gpus: int | None = None) -> Case:
    """Legal cases: any model, cluster, training and layout that the cost model prices."""
    profile = draw(st.sampled_from(["dgx-a100-80g-hdr1", "dgx-h100", "dgx-b200"]))
    world = gpus or draw(st.sampled_from([1, 2, 3, 4, 6, 8, 16, 24, 48, 64]))
    cluster = load_cluster(profile, gpus=world).cluster
    model = draw(some_models() | some_models() | patterned_models())
    tp = 1 if data_parallel_only else draw(st.sampled_from(divisors(world, 8)))
    pp = 1 if data_parallel_only else draw(st.sampled_from(divisors(world // tp, model.layers)))
    data_parallel = world // tp // pp
    dp_shard = draw(st.sampled_from(divisors(data_parallel, data_parallel)))
    is_fsdp = dp_shard > 1
    on_host = is_fsdp and draw(st.integers(0, 3)) == 0
    reshards = ["always", "never", *divisors(dp_shard, dp_shard)[1:-1]]
    interleaved = pp > 1 and 2 * pp <= model.layers and draw(st.booleans())
    num_microbatches = draw(st.integers(1, 6)) if pp == 1 else pp * draw(st.integers(1, 5))
    if pp > 1 and not interleaved:
        num_microbatches += draw(st.integers(0, pp))
    mode = draw(st.sampled_from(["none", "attention", "op", "full"]))
    some = st.just("all") | st.integers(1, -(-model.layers // (2 * pp if interleaved else pp)))
    layout = Layout(
        dp_replicate=data_parallel // dp_shard,
        dp_shard=dp_shard,
        tp=tp,
        pp=pp,
        sharding="fsdp" if is_fsdp else "ddp",
        reshard_after_forward=("never" if pp > 1 else draw(st.sampled_from(reshards)))
        if is_fsdp
        else "always",
        gradient_sync="last"
        if pp > 1
        else draw(st.sampled_from(["every", "reduce_scatter_only", "last"])),
        wrap_blocks=draw(st.integers(1, 3)) if is_fsdp else 1,
        micro_batch=draw(st.integers(1, 4)),
        num_microbatches=num_microbatches,
        schedule="none"
        if pp == 1
        else "interleaved_1f1b"
        if interleaved
        else draw(st.sampled_from(["1f1b", "gpipe"])),
        virtual_stages=2 if interleaved else 1,
        activation_checkpointing=mode,
        checkpoint_blocks="all" if mode == "none" else draw(some),
        sequence_parallel=tp > 1,
        loss_parallel=tp > 1,
        offload="cpu" if on_host else "none",
        compile=draw(st.booleans()),
    )
    plain = tp == pp == 1 and not on_host
    runtime = "autocast" if plain and draw(st.integers(0, 4)) == 0 else "fsdp2"
    training = Training(
        seq_len=draw(st.sampled_from([128, 1024])),
        global_batch=layout.global_batch,
        precision="bf16" if runtime == "autocast" else draw(st.sampled_from(["bf16", "fp32"])),
        reduce_dtype="fp32" if runtime == "autocast" else draw(st.sampled_from(["fp32", "bf16"])),
        runtime=runtime,  # type: ignore[arg-type]
    )
    drawn = Case(model=model, cluster=cluster, training=training, layout=layout)
    assume(drawn.problem is None)
    return drawn
