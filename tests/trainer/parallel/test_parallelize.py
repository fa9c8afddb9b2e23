"""`parallelize` on models that are not ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fsdpplan.trainer import TrainerError, load_plan, parallelize
from fsdpplan.trainer.config import parse_plan
from fsdpplan.trainer.parallel.data_parallel import Ends, apply_fsdp, require_values
from fsdpplan.trainer.parallel.mesh import build_meshes
from fsdpplan.trainer.parallel.parallelize import find_blocks
from fsdpplan.trainer.rehearse.fake_world import fake_world
from fsdpplan.trainer.user.model import found_ends
from tests.trainer import plans


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=61,
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=32, n_layer=3, n_head=4, vocab_size=61, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return transformers.GPT2LMHeadModel(config)


class Experts(nn.Module):
    """A block that is a list of modules itself."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.stack([expert(x) for expert in self.experts]).sum(0)


class Mixture(nn.Module):
    """Blocks in a dict, a smaller list before them, and a list of two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
        self.blocks = nn.ModuleDict({str(i): Experts() for i in range(3)})
        self.mixed = nn.ModuleList([nn.Linear(400, 400), nn.Identity()])


def test_the_largest_repeated_list_is_found() -> None:
    model = Mixture()
    assert find_blocks(model) == list(model.blocks.values())


@pytest.mark.parametrize("make", [llama, gpt2])
def test_the_blocks_of_hugging_face_models_are_found(make: Any) -> None:
    blocks = find_blocks(make())
    assert len(blocks) == 3
    assert type(blocks[0]).__name__ in ("LlamaDecoderLayer", "GPT2Block")


def test_a_model_without_repeated_blocks_is_told_what_to_give() -> None:
    with pytest.raises(TrainerError, match="blocks="):
        find_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))


@pytest.mark.gloo
@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("sharding", ["fsdp", "ddp"])
@pytest.mark.parametrize("checkpointing", ["none", "op", "full"])
def test_two_lines_leave_a_hugging_face_model_as_it_computes(
    alone: None, make: Any, sharding: str, checkpointing: str
) -> None:
    tokens = torch.arange(16).reshape(2, 8)
    plain = make()
    expected = plain(input_ids=tokens, labels=tokens).loss
    expected.backward()

    plan = load_plan(
        plans.plan_text(sharding=sharding, activation_checkpointing=checkpointing, wrap_blocks=2)
    )
    model = parallelize(make(), plan)

    # alone there is nothing to reduce, and no DDP
    assert type(model) is type(plain) or (sharding == "fsdp" and isinstance(model, FSDPModule))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    names = [name for name, _ in model.named_parameters()]
    assert names == [name for name, _ in plain.named_parameters()]
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        gradient: Any = parameter.grad
        whole = gradient.full_tensor() if sharding == "fsdp" else gradient
        torch.testing.assert_close(whole, other.grad, atol=1e-6, rtol=1e-5)


@pytest.mark.gloo
@pytest.mark.parametrize("sharding", ["fsdp", "ddp"])
def test_the_first_blocks_recompute_and_the_others_do_not(alone: None, sharding: str) -> None:
    forwards: list[int] = []
    model = llama()
    for index, block in enumerate(find_blocks(model)):
        block.input_layernorm.register_forward_hook(lambda *_, index=index: forwards.append(index))
    blocks = len(find_blocks(model))
    text = plans.plan_text(sharding=sharding, activation_checkpointing="full", checkpoint_blocks=1)
    called = parallelize(model, load_plan(text))
    tokens = torch.arange(16).reshape(2, 8)
    called(input_ids=tokens, labels=tokens).loss.backward()
    assert blocks > 1
    assert forwards == [*range(blocks), 0]


def test_more_blocks_to_recompute_than_there_are_is_refused(alone: None) -> None:
    text = plans.plan_text(activation_checkpointing="full", checkpoint_blocks=99)
    with pytest.raises(TrainerError, match="recomputes 99 blocks, the model has"):
        parallelize(llama(), load_plan(text))


def test_ddp_of_a_model_without_values_is_refused() -> None:
    with torch.device("meta"):
        model = llama()
    with pytest.raises(TrainerError, match="materialise"):
        require_values(model)


def test_a_cuda_plan_where_there_is_no_gpu_is_refused(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = plans.plan_text().replace('"kind": "cpu"', '"kind": "cuda"')
    with pytest.raises(TrainerError, match="--smoke"):
        parallelize(llama(), load_plan(text))


@pytest.mark.parametrize("blocks", [1, 3])
def test_resharding_to_fewer_ranks_makes_the_same_groups_for_all_blocks(blocks: int) -> None:
    plan = parse_plan(plans.plan_text(dp_shard=4, reshard_after_forward=2))
    with torch.device("meta"):
        model = nn.Sequential(nn.ModuleList(nn.Linear(8, 8) for _ in range(blocks)))
    with fake_world(plan.layout.world):
        meshes = build_meshes(plan.layout, "cpu")
        before = int(dist.new_group().group_name)
        apply_fsdp(model, list(model[0]), plan, meshes)
        assert int(dist.new_group().group_name) == before + 1


def names_of(model: nn.Module, modules: Any) -> list[str]:
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(module)] for module in modules]


def test_embedding_and_head_of_hugging_face_models_are_units() -> None:
    model = llama()
    ends = found_ends(model, find_blocks(model))
    assert names_of(model, ends.tables) == ["model.embed_tokens"]
    assert names_of(model, ends.head) == ["model.norm", "lm_head"]


def test_a_tied_table_stays_in_the_root() -> None:
    model = gpt2()
    assert found_ends(model, find_blocks(model)) == Ends()


class Words(nn.Module):
    """A decoder whose head is called."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(61, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))
        self.head = nn.Linear(8, 61, bias=False)

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.hidden(tokens))  # type: ignore[no-any-return]


class Fused(Words):
    """One whose loss reads the head's weight, as fused ones do."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.hidden(tokens) @ self.head.weight.T


@pytest.mark.gloo
@pytest.mark.parametrize(("kind", "units"), [(Words, 6), (Fused, 4)])
def test_a_head_whose_weight_is_read_stays_in_the_root(alone: None, kind: Any, units: int) -> None:
    torch.manual_seed(0)
    plain = kind()
    tokens = torch.arange(16).reshape(2, 8)
    expected = plain(tokens)
    model = parallelize(plain, load_plan(plans.plan_text()))
    assert sum(isinstance(module, FSDPModule) for module in model.modules()) == units
    torch.testing.assert_close(model(tokens), expected)
    model(tokens).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.gloo
def test_the_root_has_both_ends_where_that_is_wanted(alone: None) -> None:
    model = parallelize(Words(), load_plan(plans.plan_text()), ends=False)
    assert sum(isinstance(module, FSDPModule) for module in model.modules()) == 4
