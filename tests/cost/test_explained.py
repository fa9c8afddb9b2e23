"""`explained`: terms that add up to what is predicted, and formulas that give their values."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import pytest

from fsdpplan.cost.estimate import estimate
from fsdpplan.cost.explained import Explained, explained_step
from fsdpplan.cost.explained_memory import explained_memory
from fsdpplan.files.catalogue import load_model
from fsdpplan.files.clusters import load_cluster
from fsdpplan.search.rules.legality import legal_layout_problem
from fsdpplan.spec.adapters import Adapters, BaseFormat
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import Case
from fsdpplan.spec.training import Training

OPERATORS: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def worked_out(formula: str, values: Mapping[str, float]) -> float:
    """A formula worked out by hand: numbers, symbols, four operations and brackets."""

    def of(node: ast.expr) -> float:
        match node:
            case ast.Constant(value=int() as value):
                return float(value)
            case ast.Name(id=name):
                return values[name]
            case ast.BinOp(left=left, op=op, right=right):
                return OPERATORS[type(op)](of(left), of(right))
        raise AssertionError(f"{formula}: {ast.dump(node)}")

    return of(ast.parse(formula, mode="eval").body)


def terms_value(term: Explained) -> float:
    symbols = [one.symbol for one in term.inputs]
    assert len(symbols) == len(set(symbols)), term
    return worked_out(term.formula, {one.symbol: one.value for one in term.inputs})


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    model: str
    hardware: str
    gpus: int
    layout: Layout
    seq_len: int
    training: Mapping[str, object]

    def case(self) -> Case:
        found = Case(
            model=load_model(self.model),
            cluster=load_cluster(self.hardware, gpus=self.gpus).cluster,
            training=Training(
                seq_len=self.seq_len,
                global_batch=self.layout.global_batch,
                **self.training,  # type: ignore[arg-type]
            ),
            layout=self.layout,
        )
        assert legal_layout_problem(found) is None
        return found


def case(
    model: str, hardware: str, gpus: int, layout: Layout, *, seq_len: int = 4096, **training: object
) -> Made:
    return Made(
        model=model,
        hardware=hardware,
        gpus=gpus,
        layout=layout,
        seq_len=seq_len,
        training=training,
    )


TP = {"sequence_parallel": True, "loss_parallel": True}

CASES = {
    "one device": case("llama-3.2-1b", "dgx-h100", 1, Layout(num_microbatches=4, sharding="ddp")),
    "ddp": case(
        "llama-3.2-1b",
        "dgx-a100-80g-hdr",
        16,
        Layout(dp_replicate=16, sharding="ddp", num_microbatches=2),
    ),
    "zero1": case(
        "llama-3.2-1b", "dgx-h100", 16, Layout(dp_shard=16, sharding="zero1"), runtime="megatron"
    ),
    "fsdp": case(
        "llama-3.1-8b",
        "dgx-h100",
        16,
        Layout(dp_shard=16, num_microbatches=4, activation_checkpointing="op"),
    ),
    "hsdp over a slow network": case(
        "llama-3.1-8b",
        "dgx-h100",
        32,
        Layout(dp_replicate=4, dp_shard=8, micro_batch=2, num_microbatches=2, loss_chunks=8),
    ),
    "eager": case("llama-3.2-1b", "dgx-h100", 8, Layout(dp_shard=8, compile=False)),
    "offload": case("llama-3.2-1b", "dgx-h100", 8, Layout(dp_shard=8, offload="cpu")),
    "tp": case(
        "llama-3.1-70b",
        "dgx-h100",
        64,
        Layout(dp_shard=8, tp=8, num_microbatches=8, activation_checkpointing="full", **TP),  # type: ignore[arg-type]
    ),
    "cp": case(
        "llama-3.1-8b",
        "dgx-h100",
        16,
        Layout(dp_shard=4, cp=4, cp_attention="ulysses"),
        seq_len=32768,
    ),
    "pipeline": case(
        "llama-3.1-70b",
        "dgx-h100",
        64,
        Layout(
            dp_shard=4,
            tp=4,
            pp=4,
            schedule="interleaved_1f1b",
            virtual_stages=2,
            num_microbatches=16,
            reshard_after_forward="never",
            gradient_sync="last",
            **TP,  # type: ignore[arg-type]
        ),
    ),
    "experts": case(
        "mixtral-8x7b",
        "dgx-h100",
        32,
        Layout(
            dp_shard=32,
            ep=8,
            num_microbatches=2,
            activation_checkpointing="full",
            checkpoint_blocks=10,
        ),
    ),
    "dense blocks before experts": case(
        "deepseek-v3",
        "dgx-h100",
        512,
        Layout(
            dp_shard=64,
            pp=8,
            ep=32,
            schedule="1f1b",
            num_microbatches=32,
            reshard_after_forward="never",
            gradient_sync="last",
            activation_checkpointing="full",
        ),
    ),
    "fp8": case("llama-3.1-8b", "dgx-h100", 8, Layout(dp_shard=8), precision="fp8"),
    "muon": case("llama-3.2-1b", "dgx-h100", 8, Layout(dp_shard=8), optimizer="muon"),
    "a precision that changes": case(
        "llama-3.1-8b",
        "dgx-h100",
        8,
        Layout(dp_shard=8, activation_checkpointing="full"),
        precision_switch="fp8@0.8",
    ),
    "processes": case("gpt2", "cpu", 2, Layout(dp_shard=2), seq_len=512),
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", CASES)
def test_terms_add_up_and_formulas_give_their_values(name: str) -> None:
    """To the step and to the peak; and what models of kernels and of networks leave of a rate is
    a share, so that no factor hides a missing term."""
    one = CASES[name].case()
    found = estimate(one)
    step, memory = explained_step(one), explained_memory(one)
    assert sum(term.value for term in step) == pytest.approx(found.time.total_seconds, rel=1e-12)
    assert sum(term.value for term in memory) == found.memory.peak_device_bytes
    assert {term.name: term.value for term in memory} == {
        name: size for name, size in found.memory.terms.items() if size
    }
    for term in step:
        assert terms_value(term) == pytest.approx(term.value, rel=1e-9, abs=1e-12), term
        for given in term.inputs:
            if given.symbol == "q" or (given.symbol == "x" and "exposed" in term.name):
                assert 0 < given.value <= 1 + 1e-9, term
    for term in memory:
        assert terms_value(term) == pytest.approx(term.value, rel=1e-9, abs=1), term
    waits = [row for row in found.communication if row.exposed_seconds > 1e-9]
    named = [term for term in step if term.name.startswith("exposed ")]
    assert len(named) >= len(waits)


def test_inputs_are_those_of_the_case() -> None:
    one = CASES["tp"].case()
    terms = {term.name: term for term in explained_step(one)}
    inputs = {found.symbol: found.value for found in terms["matmuls"].inputs}
    model = one.model
    weights = 2 * model.hidden * (model.query_dim + model.kv_dim) + 3 * model.hidden * (
        model.ffn_hidden
    )
    assert inputs["W"] == weights / 8
    assert (inputs["m"], inputs["b"], inputs["t"]) == (8, 80, 4096)
    assert inputs["P"] == one.cluster.device.peak_bf16_flops_per_second
    state = {term.name: term for term in explained_memory(one)}
    assert {i.symbol: i.value for i in state["optimizer state"].inputs}["e"] == 8
    fewer = replace(one.cluster.device.fit, communicator_bytes=0)
    cluster = replace(one.cluster, device=replace(one.cluster.device, fit=fewer))
    outside = {t.name: t for t in explained_memory(replace(one, cluster=cluster))}
    assert outside["driver and libraries"].value == fewer.context_bytes


@pytest.mark.parametrize("base", ["bf16", "nf4"])
def test_a_frozen_base_has_one_product_in_backward_and_its_adapters_two(base: BaseFormat) -> None:
    adapters = Adapters(rank=16, alpha=32.0, base=base)
    case = Made(
        model="llama-3.1-8b",
        hardware="dgx-h100",
        gpus=1,
        layout=Layout(sharding="ddp", micro_batch=2),
        seq_len=4096,
        training={"adapters": adapters},
    ).case()
    passes = {
        term.name: {one.symbol: one.value for one in term.inputs}["d"]
        for term in explained_step(case)
        if term.name in ("matmuls", "head, loss and embedding")
    }
    assert passes["head, loss and embedding"] == 2
    assert 2 < passes["matmuls"] < 2.05
