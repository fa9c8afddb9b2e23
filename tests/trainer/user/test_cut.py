"""What is found in a user's model by calling it once, and what is refused in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from fsdpplan.trainer import TrainerError, forward_backward, load_plan, parallelize, token_loss
from fsdpplan.trainer.config import PlanConfig
from fsdpplan.trainer.parallel.parallelize import find_blocks
from fsdpplan.trainer.rehearse.own_model import rehearse_model
from fsdpplan.trainer.user.loss import named_head
from fsdpplan.trainer.user.stages import cut_model
from fsdpplan.trainer.user.tensor_parallel import planned_styles, split_styles
from fsdpplan.trainer.user.trace import traced
from tests.trainer import plans
from tests.trainer.own_layouts import MANY, PP, SHARD2
from tests.trainer.own_models import FLAT_PLAN, LENGTH, TP_PLAN, VOCAB, Block, Odd, Own
from tests.trainer.user_layouts import MODELS, TP2, WIDTHS


def plan_of(*, precision: str = "fp32", vocab: int = VOCAB, **layout: Any) -> PlanConfig:
    training = {"seq_len": LENGTH, "precision": precision}
    return load_plan(plans.plan_text(model={"vocab": vocab}, training=training, **layout))


def cut(model: nn.Module, plan: PlanConfig, example: Any = None) -> Any:
    blocks = find_blocks(model)
    return cut_model(model, blocks, traced(model, blocks, plan, example), plan)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_call_in_fake_tensors_finds_both_ends_of_a_model(device: str) -> None:
    with torch.device(device):
        model = Own("scaled")
    found = traced(model, find_blocks(model), plan_of(precision="bf16", micro_batch=2), None)
    assert found.before == {"table.weight", "positions.weight", "scale"}
    assert found.behind == {"norm.weight", "norm.bias", "lm_head.weight", "lm_head.bias"}
    assert (found.hidden_shape, found.hidden_dtype) == ((2, LENGTH, 32), torch.bfloat16)
    assert found.attention == (2 * 4,) * 4  # sequences x heads


def test_a_tied_table_is_in_the_first_stage_and_copied_in_the_last() -> None:
    found = cut(Own("tied"), plan_of(**PP))
    assert found.copies == {"lm_head.weight": "table.weight"}
    assert "lm_head.weight" in found.last - found.first


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("between", "between blocks 1 and 2 the model changes the hidden states"),
        ("of the embedding", "block 0 takes more than the hidden states"),
        ("twice", "block 1 is called where block 2 is expected"),
        ("to the end", "behind its blocks the model uses what was computed before"),
        ("shared block", "blocks 0 and 1 of Odd share a parameter"),
        ("head of a block", "norm.weight of Odd is a block's parameter, too"),
        ("fails", "Odd could not be called .*no such shape.* example="),
    ],
)
def test_a_model_that_stages_would_change_is_refused(kind: str, words: str) -> None:
    with pytest.raises(TrainerError, match=words):
        cut(Odd(kind), plan_of(**PP))


def test_a_balance_of_experts_over_all_blocks_is_refused() -> None:
    """Each stage has its own blocks' scores."""
    name, fields = MODELS["mixtral"]
    config = getattr(transformers, name)(**WIDTHS | fields, output_router_logits=True)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(TrainerError, match="behind its blocks the model uses what was computed"):
        cut(model, plan_of(**PP))


def test_a_stage_for_other_numbers_of_blocks_is_refused() -> None:
    model = Own()
    model.layers = model.layers[:3]
    with pytest.raises(TrainerError, match="cuts 4 blocks into stages, and 3 were found"):
        cut(model, plan_of(**PP))


def test_a_forward_that_was_wrapped_is_refused() -> None:
    model = Own()
    model.forward = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward)
    with pytest.raises(TrainerError, match="the forward of Own was wrapped"):
        cut(model, plan_of(**PP))


def test_an_example_is_what_a_model_is_called_with() -> None:
    class Two(Own):
        def forward(self, tokens: Tensor, more: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(tokens + more)

    tokens = torch.zeros(2, LENGTH, dtype=torch.int64)
    assert cut(Two(), plan_of(**PP), (tokens, tokens)).first
    with pytest.raises(TrainerError, match="missing 1 required positional argument: 'more'"):
        cut(Two(), plan_of(**PP))


class Fixed(Own):
    """Whose attention counts its heads by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(adjusts=False) for _ in range(4))


class Loose(Own):
    """With a parameter of each block itself."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.gain = nn.Parameter(torch.ones(32))


def without(name: str) -> dict[str, str]:
    return {pattern: style for pattern, style in TP_PLAN.items() if name not in pattern}


@pytest.mark.parametrize(
    ("make", "given", "words"),
    [
        (Own, {"layers.*.attn.wq": "colwise"}, "names no module of Own: .*layers.\\*.attention.wq"),
        (Own, TP_PLAN | {"layers.*.ff.w1": "moe_tp_experts"}, "given splits by moe_tp_experts"),
        (Own, TP_PLAN | {"layers.*.norm2": "colwise"}, "norm2 by colwise, and it is a LayerNorm"),
        (Own, without("attention"), "says nothing of layers.0.attention: .*sequence_parallel"),
        (Own, without("w1"), "does not say how layers.0.ff.w1 is split"),
        (Fixed, TP_PLAN, "attention 0 of Fixed computes 32 of 32 .* not 16: .*q.view"),
        (Loose, TP_PLAN, "layers.0.gain is a parameter of a module around others"),
        (lambda: Own("scaled"), TP_PLAN, "scale is a parameter of a module around others"),
        (Own, None, "Own has no tp_plan .*tp_plan=.*--tp 1"),
    ],
)
def test_a_plan_for_tensor_parallelism_that_cannot_be_followed_is_refused(
    make: Callable[[], nn.Module], given: dict[str, str] | None, words: str
) -> None:
    with torch.device("meta"):
        model = make()
    with pytest.raises(TrainerError, match=words):
        split_styles(model, find_blocks(model), plan_of(**TP2), given, None)


def test_widths_that_tp_does_not_divide_are_refused() -> None:
    model = Own("flat")
    model.layers[1].up = nn.Linear(32, 63, bias=False)
    with pytest.raises(TrainerError, match=r"tp 2 cannot split layers.1.up, of width 63"):
        planned_styles(model, 2, FLAT_PLAN)


@pytest.mark.parametrize("config", [transformers.LlamaConfig, transformers.Qwen3Config])
def test_the_plan_of_a_config_of_transformers_is_taken_as_it_is(config: Any) -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config(**WIDTHS))
    given = config.base_model_tp_plan
    styles = split_styles(model, find_blocks(model), plan_of(**TP2), given, None)
    assert styles["model.layers.2.mlp.down_proj"] == "rowwise"
    assert len(styles) == WIDTHS["num_hidden_layers"] * len(given)
    own = planned_styles(model, 2)
    assert styles.items() <= own.items()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.Sequential(nn.Linear(2, 2)), "Sequential names no head .*head=.*loss-chunks 1"),
        (lambda: nn.ModuleDict({"lm_head": nn.Embedding(2, 2)}), "must be an nn.Linear"),
    ],
)
def test_a_head_that_cannot_be_put_off_is_refused(make: Any, words: str) -> None:
    model = make()
    head = model["lm_head"] if isinstance(model, nn.ModuleDict) else None
    with pytest.raises(TrainerError, match=words):
        named_head(model, head)


@pytest.mark.gloo
def test_pieces_are_the_loss_and_another_loss_of_them_is_refused(alone: None) -> None:
    torch.manual_seed(0)
    model, plan = Own(), plan_of(loss_chunks=5, micro_batch=2)
    tokens = torch.randint(VOCAB, (2, LENGTH))
    targets = tokens.roll(-1, 1)
    targets[0, 5:] = -100
    logits = model(tokens)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten()).detach()
    assert torch.equal(token_loss(logits, targets), expected)
    made = parallelize(model, plan)
    with torch.no_grad():
        assert float(token_loss(made(tokens), targets)) == pytest.approx(float(expected), abs=1e-6)
    for changed in (lambda out: out[..., :8].square().mean(), lambda out: out.mul_(2).sum()):
        with pytest.raises(TrainerError, match=r"another loss was computed: .*token_loss"):
            changed(made(tokens)).backward()
    with pytest.raises(TrainerError, match="another loss was computed"):
        token_loss(made(tokens).div_(2), targets)
    assert forward_backward(made, plan, tokens, targets) == pytest.approx(float(expected), abs=1e-6)


@pytest.mark.gloo
def test_logits_that_are_changed_behind_the_head_are_refused_in_pieces(alone: None) -> None:
    torch.manual_seed(0)
    config = transformers.Gemma2Config(**WIDTHS, pad_token_id=None)
    model = parallelize(
        transformers.AutoModelForCausalLM.from_config(config), plan_of(loss_chunks=2)
    )
    tokens = torch.zeros(1, LENGTH, dtype=torch.int64)
    with pytest.raises(TrainerError, match="changes its logits behind the head"):
        model(input_ids=tokens, labels=tokens)


def wide() -> tuple[nn.Module, list[Tensor], dict[str, Any]]:
    with torch.device("meta"):
        model = Own()
        model.table, model.lm_head = nn.Embedding(4096, 32), nn.Linear(32, 4096, bias=False)
    return model, [torch.zeros(4, LENGTH, dtype=torch.int64)], {"tp_plan": TP_PLAN}


def of_no_token(output: Tensor) -> Tensor:
    return token_loss(output, torch.zeros(4, LENGTH, dtype=torch.int64))


def peak_bytes(**layout: Any) -> int:
    plan = plan_of(vocab=4096, micro_batch=4, **layout)
    last = (plan.layout.world - 1,)
    (rank,) = rehearse_model(wide, plan, loss=of_no_token, ranks=last)["ranks"]
    assert (rank["error"], rank["without_gradient"]) == (None, [])
    peak: int = rank["peak_bytes_of"]["step"]
    return peak


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", [TP2 | SHARD2, PP | SHARD2])
def test_pieces_take_less_memory_than_all_logits(layout: dict[str, Any]) -> None:
    """In fake tensors; more than once all logits in fp32."""
    whole, pieces = (peak_bytes(**layout, loss_chunks=chunks) for chunks in (1, 8))
    logits_bytes = 4 * LENGTH * 4096 * 4 // layout.get("tp", 1)
    assert whole - pieces > logits_bytes


@pytest.mark.parametrize("rank", [7])
def test_a_pipeline_of_a_model_of_ones_own_is_rehearsed(rank: int) -> None:
    plan = plan_of(**(MANY | TP2 | SHARD2 | {"schedule": "zbv"}))
    with torch.device("meta"):
        model = Own("tied")

    def build() -> tuple[nn.Module, list[Tensor], dict[str, Any]]:
        tokens = torch.zeros(1, LENGTH, dtype=torch.int64)  # of any number of rows
        return model, [tokens], {"tp_plan": TP_PLAN}

    (found,) = rehearse_model(build, plan, ranks=(rank,))["ranks"]
    assert (found["error"], found["without_gradient"]) == (None, [])
    assert {row["axis"] for row in found["collectives"]} >= {"dp_shard", "tp", "pp"}


@pytest.mark.gloo
def test_a_model_in_a_pipeline_is_not_called() -> None:
    from fsdpplan.trainer.rehearse.rank import fake_cluster

    plan = plan_of(**PP)
    with fake_cluster(plan, 0, cuda_like=False):
        model = parallelize(Own(), plan, numbers=False)
        with pytest.raises(TrainerError, match=r"not called by itself: .*forward_backward"):
            model(torch.zeros(1, LENGTH, dtype=torch.int64))
        with pytest.raises(TrainerError, match="has 3 rows, and a step of the plan has 8"):
            forward_backward(model, plan, torch.zeros(3, LENGTH, dtype=torch.int64))
        with pytest.raises(TrainerError, match=r"shape \[2, 9, 32\] came out of stage 0"):
            forward_backward(model, plan, torch.zeros(8, 9, dtype=torch.int64))
