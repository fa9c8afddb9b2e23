"""Adapters out: as PEFT's folder and merged, with the run's own logits; and back on from there."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdpplan.trainer.checkpoint.base import base_fingerprint
from fsdpplan.trainer.checkpoint.storage import read_index
from fsdpplan.trainer.config import PlanConfig, parse_plan
from fsdpplan.trainer.errors import TrainerError
from fsdpplan.trainer.export import Wanted, export_newest
from fsdpplan.trainer.huggingface.export import exported
from fsdpplan.trainer.huggingface.load import load_published
from fsdpplan.trainer.huggingface.peft import Beside, export_peft
from fsdpplan.trainer.model import nf4
from fsdpplan.trainer.model.weights import initialise_adapters
from fsdpplan.trainer.optimizer import make_optimizer
from fsdpplan.trainer.parallel.assemble import assemble
from fsdpplan.trainer.step import train_step
from fsdpplan.trainer.text.data import micro_batches, open_sequences
from tests.trainer import adapter_layouts, jobs, losses, plans
from tests.trainer.huggingface.test_weights import published, tokens
from tests.trainer.huggingface_layouts import model_of
from tests.trainer.text import chat_cases, chat_layouts

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("alone")]

FAMILIES = ("llama", "llama, biases", "qwen3", "phi3", "gpt2", "bloom", "starcoder2")
CPU = torch.device("cpu")


def adapted_plan(folder: Path, **adapters: Any) -> PlanConfig:
    chosen = adapter_layouts.ADAPTERS | adapters
    text = plans.plan_text(
        model=model_of(folder), training={"adapters": chosen}, sharding="ddp", micro_batch=2
    )
    return parse_plan(text)


def trained(plan: PlanConfig, folder: Path, steps: int = 2) -> nn.Module:
    """The decoder after some steps beside the base in `folder`."""

    def fill(model: nn.Module) -> None:
        load_published(model, plan, folder)
        initialise_adapters(model, seed=0)

    assembled = assemble(plan, CPU, seed=0, fill=fill)
    optimizer = make_optimizer(assembled.model, losses.RECIPE)
    sequences = open_sequences(plan, None, seed=0)
    for step in range(steps):
        batches = micro_batches(sequences, plan, first=2 * step, rank=0, device=CPU)
        train_step(assembled, optimizer, batches, plan, clip_norm=math.inf)
    return assembled.model


def beside_of(plan: PlanConfig, folder: Path) -> Beside:
    assert plan.training.adapters is not None
    what = exported(plan.model, "fp32", folder, seq_len=24)
    return Beside(model=plan.model, adapters=plan.training.adapters, what=what, like=folder)


def merged_by_hand(base: Path, adapter: Path, *, quantised: bool = False) -> Any:
    """transformers' model with B A added to its weights, which are in NF4 where `quantised`."""
    from safetensors.torch import load_file

    model = transformers.AutoModelForCausalLM.from_pretrained(base).eval().float()
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    root = math.sqrt(config["r"]) if config["use_rslora"] else config["r"]
    for name, down in tensors.items():
        if ".lora_A." not in name:
            continue
        up = tensors[name.replace(".lora_A.", ".lora_B.")]
        assert down.shape[0] == up.shape[1] == config["r"]
        path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        assert any(path.endswith(f".{each}") for each in config["target_modules"])
        weight = model.get_parameter(f"{path}.weight")
        added = up @ down * (config["lora_alpha"] / root)
        whole = weight.data.T if config["fan_in_fan_out"] else weight.data
        if quantised:
            whole = nf4.dequantise(nf4.quantise(whole), whole.shape, torch.float32)
        whole = whole + added
        weight.data = (whole.T if config["fan_in_fan_out"] else whole).contiguous()
    return model


@torch.no_grad()
def logits_of(model: Any) -> Tensor:
    found = model(tokens())
    logits: Tensor = found if isinstance(found, Tensor) else found.logits
    return logits


@pytest.mark.parametrize("name", FAMILIES)
def test_an_adapter_goes_out_as_it_was_trained(name: str, tmp_path: Path) -> None:
    published(tmp_path / "in", name)
    plan = adapted_plan(tmp_path / "in")
    ours = trained(plan, tmp_path / "in")
    export_peft(ours, plan, tmp_path / "out", beside_of(plan, tmp_path / "in"))
    found = logits_of(merged_by_hand(tmp_path / "in", tmp_path / "out"))
    torch.testing.assert_close(found, logits_of(ours), rtol=2e-4, atol=2e-4)
    base = logits_of(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "in").float())
    assert (found - base).abs().max() > 0.01


@pytest.mark.parametrize("name", FAMILIES)
def test_peft_itself_loads_it(name: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    published(tmp_path / "in", name)
    plan = adapted_plan(tmp_path / "in", targets=["q", "v", "o"], rslora=True)
    ours = trained(plan, tmp_path / "in")
    export_peft(ours, plan, tmp_path / "out", beside_of(plan, tmp_path / "in"))
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "in").float()
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "out").eval()
    torch.testing.assert_close(logits_of(theirs), logits_of(ours), rtol=2e-4, atol=2e-4)


def test_losses_and_gradients_are_those_of_pefts_own_model(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    published(tmp_path / "in", "llama")
    plan = adapted_plan(tmp_path / "in")
    ours = trained(plan, tmp_path / "in")
    export_peft(ours, plan, tmp_path / "out", beside_of(plan, tmp_path / "in"))
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "in").float()
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "out", is_trainable=True).eval()
    batch = tokens()
    found = nn.functional.cross_entropy(ours(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
    wanted = theirs(batch, labels=batch).loss
    found.backward()
    wanted.backward()
    assert found.item() == pytest.approx(wanted.item(), abs=1e-5)
    places = {"wq": "self_attn.q_proj", "wo": "self_attn.o_proj", "w2": "mlp.down_proj"}
    for own, name in places.items():
        part = "attention" if "attn" in name else "feed_forward"
        for which in ("lora_A", "lora_B"):
            mine = ours.get_parameter(f"layers.1.{part}.{own}.{which}").grad
            other = theirs.get_parameter(
                f"base_model.model.model.layers.1.{name}.{which}.default.weight"
            ).grad
            assert mine is not None
            scale = other.abs().max().clamp(min=1.0)
            assert (mine - other).abs().max() < 1e-5 * scale


def test_over_a_4_bit_base_logits_are_those_of_what_it_stands_for(tmp_path: Path) -> None:
    published(tmp_path / "in", "llama")
    plan = adapted_plan(tmp_path / "in", base="nf4")
    ours = trained(plan, tmp_path / "in")
    export_peft(ours, plan, tmp_path / "out", beside_of(plan, tmp_path / "in"))
    theirs = merged_by_hand(tmp_path / "in", tmp_path / "out", quantised=True)
    torch.testing.assert_close(logits_of(theirs), logits_of(ours), rtol=2e-4, atol=2e-4)


def test_one_bit_of_the_base_makes_it_another(tmp_path: Path) -> None:
    for name, base in (("llama", "bf16"), ("llama", "nf4")):
        folder = tmp_path / base
        published(folder, name)
        model = trained(adapted_plan(folder, base=base), folder, steps=0)
        before = base_fingerprint(model)
        frozen = [each for each in model.parameters() if not each.requires_grad]
        for parameter in (frozen[0], frozen[5], frozen[-1]):
            flat = parameter.data.view(torch.uint8).view(-1)
            flat[len(flat) // 2] ^= 1
            assert base_fingerprint(model) != before
            flat[len(flat) // 2] ^= 1
        assert base_fingerprint(model) == before
        trained_one = next(each for each in model.parameters() if each.requires_grad)
        trained_one.data += 1
        assert base_fingerprint(model) == before


MANY = [
    *chat_cases.CHATS,
    *(
        [chat_cases.turn("user", f"{n}?"), chat_cases.turn("assistant", f"{n * n}!")]
        for n in range(24)
    ),
]


@pytest.mark.gloo
@pytest.mark.parametrize("base", ["bf16", "nf4"])
def test_a_run_on_chats_is_resumed_elsewhere_and_goes_out(base: str, tmp_path: Path) -> None:
    """Two processes, masked prompts, packed: FSDP, then DDP from its checkpoint."""
    source = tmp_path / "in"
    shape = transformers.AutoConfig.for_model(
        "llama", vocab_size=320, hidden_size=48, intermediate_size=40, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=12, max_position_embeddings=96,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(shape).float().save_pretrained(source)
    tokenizer = chat_cases.make_tokenizer(tmp_path / "tokenizer", chat_cases.CHATML)
    data = chat_cases.write_chats(tmp_path / "chats.jsonl", MANY)
    adapters = adapter_layouts.ADAPTERS | {"base": base}
    training = chat_layouts.TRAINING | {"adapters": adapters}
    plan: dict[str, Any] = {"model": model_of(source), "training": training}
    words = ["--sft", "--data", str(data), "--tokenizer", str(tokenizer), "--pack"]
    words += ["--init-from", str(source), "--warmup-steps", "0", "--lr-schedule", "constant"]
    whole = tmp_path / "whole"
    jobs.train(whole, 2, *words, "--steps", "4", **plan, dp_shard=2)
    saved = ["--checkpoint-dir", str(tmp_path / "saved")]
    parts = tmp_path / "parts"
    jobs.train(parts, 2, *words, *saved, "--steps", "2", **plan, dp_shard=2)
    (checkpoint,) = (tmp_path / "saved").glob("step*")
    kept = [key for key in read_index(checkpoint).state_dict_metadata if key.startswith("model.")]
    assert len(kept) == 2 * 2 * 7
    assert all(key.endswith((".lora_A", ".lora_B")) for key in kept), "the base is not in it"
    out = ["--export-peft", str(tmp_path / "adapter")]
    ddp = {"sharding": "ddp", "dp_replicate": 2}
    jobs.train(parts, 2, *words, *saved, *out, "--steps", "4", **plan, **ddp)
    assert jobs.losses(parts) == pytest.approx(jobs.losses(whole), abs=1e-5)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 8, "LORA")
    assert config["base_model_name_or_path"] == str(source.resolve())
    # of the checkpoint the same
    wanted = Wanted(
        out=tmp_path / "merged", like=source, peft=tmp_path / "again", merges=True, as_trained=True
    )
    said = export_newest(tmp_path / "saved", wanted)
    assert "with its adapters merged" in said
    first, again = (
        (tmp_path / name / "adapter_model.safetensors").read_bytes()
        for name in ("adapter", "again")
    )
    assert first == again
    by_hand = merged_by_hand(source, tmp_path / "adapter", quantised=base == "nf4")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    batch = torch.randint(320, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found, expected = merged(batch).logits, by_hand(batch).logits
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)
    _refuse_others(tmp_path, words, saved, plan, source)


def _refuse_others(
    folder: Path, words: list[str], saved: list[str], plan: dict[str, Any], source: Path
) -> None:
    """Another rank, another base, none, and a base that has moved."""
    steps = ["--steps", "5"]
    adapters = plan["training"]["adapters"]
    for changed, word in (
        ({"rank": 5}, "rank 4 there, 5 in the plan"),
        ({"base": "bf16" if adapters["base"] == "nf4" else "nf4"}, "base"),
    ):
        training = plan["training"] | {"adapters": adapters | changed}
        other = plan | {"training": training}
        out = jobs.train(folder / "x", 2, *words, *saved, *steps, exit_code=2, **other, dp_shard=2)
        assert word in out
    moved = folder / "moved"
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 2] += 1.0
    model.save_pretrained(moved)
    there = [str(moved) if word == str(source) else word for word in words]
    out = jobs.train(folder / "x", 2, *there, *saved, *steps, exit_code=2, **plan, dp_shard=2)
    assert "adapters of another base" in out
    wanted = Wanted(out=folder / "never", like=moved, merges=True)
    with pytest.raises(TrainerError, match="is not the base"):
        export_newest(folder / "saved", wanted)
    for what, word in (
        (Wanted(out=folder / "never"), "holds adapters alone"),
        (Wanted(out=folder / "never", merges=True), "add --init-from"),
    ):
        with pytest.raises(TrainerError, match=word):
            export_newest(folder / "saved", what)
    assert not (folder / "never").exists()
