"""Published weights in and out: transformers' own numbers before, and after."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdpplan.files.huggingface import config
from fsdpplan.trainer.config import DropoutConfig, parse_plan
from fsdpplan.trainer.errors import TrainerError
from fsdpplan.trainer.export import Wanted, export_newest
from fsdpplan.trainer.huggingface import families
from fsdpplan.trainer.huggingface.export import export, exported, require_new
from fsdpplan.trainer.huggingface.families import FAMILIES, config_of, family_of
from fsdpplan.trainer.huggingface.load import load_published, require_loadable
from fsdpplan.trainer.model.decoder import Decoder
from fsdpplan.trainer.parallel.distributed import start
from tests.trainer import plans
from tests.trainer.huggingface_layouts import LAYOUTS, model_of, train

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", autouse=True)
def _group_is_left() -> Iterator[None]:
    """Models are made in this process, whose process group no other test may find."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


VOCAB = 61
WIDTHS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 20}
LATENT = {
    "head_dim": 6,  # as transformers calls the part that is turned
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 10,
    "v_head_dim": 14,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", WIDTHS),
    "llama, tied": ("llama", WIDTHS | {"tie_word_embeddings": True}),
    "llama, biases": ("llama", WIDTHS | {"attention_bias": True, "mlp_bias": True}),
    "llama 3.1": ("llama", WIDTHS | {"rope_parameters": LLAMA3}),
    "llama, yarn": ("llama", WIDTHS | {"rope_parameters": YARN}),
    "llama, yarn between pairs": (
        "llama",
        WIDTHS | {"rope_parameters": YARN | {"truncate": False}},
    ),
    "llama, linear": (
        "llama",
        WIDTHS | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "llama, dynamic": (
        "llama",
        WIDTHS
        | {"max_position_embeddings": 10}
        | {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "mistral": ("mistral", WIDTHS | {"sliding_window": 7}),
    "qwen2": ("qwen2", WIDTHS),
    "qwen3": ("qwen3", WIDTHS),
    "phi3": ("phi3", WIDTHS | {"original_max_position_embeddings": 64}),
    "mixtral": ("mixtral", WIDTHS | {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "qwen2_moe",
        WIDTHS | ROUTED | {"num_experts": 6, "shared_expert_intermediate_size": 28},
    ),
    "qwen3_moe": (
        "qwen3_moe",
        WIDTHS | ROUTED | {"num_experts": 6, "norm_topk_prob": True, "mlp_only_layers": [0]},
    ),
    "deepseek_v2": (
        "deepseek_v2",
        WIDTHS | ROUTED | LATENT | {"q_lora_rank": None, "topk_method": "greedy"},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        WIDTHS | ROUTED | LATENT | {"q_lora_rank": 20, "n_group": 3, "topk_group": 2},
    ),
    "deepseek_v3, yarn": (
        "deepseek_v3",
        WIDTHS
        | ROUTED
        | LATENT
        | {"q_lora_rank": 20, "n_group": 3, "topk_group": 2}
        | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "gpt2": ("gpt2", GPT2),
    "bloom": ("bloom", {"vocab_size": VOCAB, "hidden_size": 48, "n_layer": 3, "n_head": 4}),
    "starcoder2": (
        "starcoder2",
        WIDTHS
        | {"sliding_window": None, "attention_dropout": 0.0}
        | {"embedding_dropout": 0.0, "residual_dropout": 0.0},
    ),
}
"""A model of each family, and what of a config changes what it computes."""


def published(folder: Path, name: str, **save: Any) -> Any:
    """transformers' model of a case, its weights drawn, and saved into `folder`."""
    family, values = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shape = transformers.AutoConfig.for_model(family, **values)
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(shape).eval().float()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.2)
            for key, buffer in model.named_buffers():
                if key.endswith("e_score_correction_bias"):
                    buffer.normal_(std=0.2)
        model.save_pretrained(folder, **save)
    return model


def tokens() -> torch.Tensor:
    return torch.randint(VOCAB, (2, 24), generator=torch.Generator().manual_seed(1))


def plan_of(folder: Path, **layout: Any) -> Any:
    return parse_plan(plans.plan_text(model=model_of(folder), **layout))


@pytest.mark.parametrize("name", CASES)
def test_a_model_comes_in_and_goes_out_as_it_was(name: str, tmp_path: Path) -> None:
    theirs = published(tmp_path / "in", name)
    with torch.no_grad():
        expected = theirs(tokens()).logits
    plan = plan_of(tmp_path / "in")
    ours = Decoder(plan.model)
    load_published(ours, plan, tmp_path / "in")
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens()), expected, rtol=2e-4, atol=2e-4)
    start(plan)
    what = exported(plan.model, "fp32", tmp_path / "in", seq_len=24)
    export(ours, plan, tmp_path / "out", what)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert torch.equal(again(tokens()).logits, expected)


@pytest.mark.parametrize("name", CASES)
def test_a_model_that_was_drawn_here_is_published_under_a_family_that_computes_it(
    name: str, tmp_path: Path
) -> None:
    published(tmp_path / "in", name)
    plan = plan_of(tmp_path / "in")
    ours = Decoder(plan.model)
    load_published(ours, plan, tmp_path / "in")
    start(plan)
    export(
        ours,
        plan,
        tmp_path / "out",
        exported(plan.model, "fp32", None, seq_len=24),
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        found = theirs(tokens()).logits
        torch.testing.assert_close(found, ours(tokens()), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_planner_and_trainer_read_dropout_from_the_same_keys(family: str) -> None:
    read = config.DROPOUTS.get(family, {"attention": "attention_dropout"})
    written = {place: key for key, place in families.dropout_keys(family).items() if place}
    assert written == read
    assert set(written.values()) <= set(families.DROPOUTS)


def test_a_plan_that_says_what_it_drops_takes_a_config_that_drops(tmp_path: Path) -> None:
    published(tmp_path, "llama")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attention_dropout": 0.1}))
    for dropout in ({}, {"attention": 0.1}):
        text = plans.plan_text(model=model_of(tmp_path), training={"dropout": dropout})
        assert require_loadable(parse_plan(text), tmp_path) == "llama"
    written = config_of("llama", plan_of(tmp_path).model, DropoutConfig(attention=0.1))
    assert written["attention_dropout"] == 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_tried(family: str) -> None:
    assert family in {kind for kind, _ in CASES.values()}


def test_files_of_a_few_tensors_each_are_read_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsdpplan.trainer.huggingface import export as written

    monkeypatch.setattr(written, "MOST_FILE_BYTES", 20_000)
    theirs = published(tmp_path / "in", "llama", max_shard_size="20KB")
    plan = plan_of(tmp_path / "in")
    ours = Decoder(plan.model)
    load_published(ours, plan, tmp_path / "in")
    start(plan)
    export(
        ours,
        plan,
        tmp_path / "out",
        exported(plan.model, "fp32", None, seq_len=24),
    )
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert torch.equal(again(tokens()).logits, theirs(tokens()).logits)


CHANGES = {
    "another base": ({"rope_theta": 5e5}, "rope_theta"),
    "scaled positions": ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "positions"),
    "dropout": ({"attention_dropout": 0.1}, "attention_dropout"),
    "another epsilon": ({"rms_norm_eps": 1e-3}, "rms_norm_eps"),
    "another function": ({"hidden_act": "gelu"}, "hidden_act"),
    "a narrow window": ({"model_type": "mistral", "sliding_window": 8}, "sliding_window"),
    "heads turned in part": ({"partial_rotary_factor": 0.5}, "part of each head"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantised"),
    "a family that is near": ({"model_type": "gemma"}, "gemma"),
    "heads": ({"num_key_value_heads": 4}, "num_key_value_heads"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_a_model_is_no_other_plans(name: str, tmp_path: Path) -> None:
    published(tmp_path, "llama")
    plan = plan_of(tmp_path)
    changes, word = CHANGES[name]
    path = tmp_path / "config.json"
    changed = json.loads(path.read_text()) | changes
    changed.pop("rope_parameters")
    path.write_text(json.dumps({"rope_theta": 10000.0} | changed))
    with pytest.raises(TrainerError, match=word):
        require_loadable(plan, tmp_path)


def test_weights_that_are_missing_or_many_are_told_before_anything_is_written(
    tmp_path: Path,
) -> None:
    published(tmp_path / "whole", "llama")
    plan = plan_of(tmp_path / "whole")
    from safetensors.torch import load_file, save_file

    weights = load_file(tmp_path / "whole" / "model.safetensors")
    ours = Decoder(plan.model)
    before = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    for change, word in (({}, "no weight"), ({"extra": torch.zeros(2)}, "'extra'")):
        folder = tmp_path / word.strip("'")
        folder.mkdir()
        (folder / "config.json").write_text((tmp_path / "whole" / "config.json").read_text())
        kept = {**weights, **change}
        if not change:
            kept.pop("model.layers.1.mlp.up_proj.weight")
        save_file(kept, folder / "model.safetensors")
        with pytest.raises(TrainerError, match=word):
            load_published(ours, plan, folder)
    assert all(torch.equal(tensor, before[name]) for name, tensor in ours.state_dict().items())


def test_a_folder_that_holds_something_is_not_written_into(tmp_path: Path) -> None:
    published(tmp_path / "in", "llama")
    with pytest.raises(TrainerError, match="not empty"):
        require_new(tmp_path / "in", "--export-hf")


def test_a_config_of_another_model_does_not_go_along(tmp_path: Path) -> None:
    published(tmp_path / "in", "llama")
    plan = parse_plan(plans.plan_text(model=model_of(tmp_path / "in") | {"rope_theta": 5e5}))
    with pytest.raises(TrainerError, match="rope_theta"):
        exported(plan.model, "fp32", tmp_path / "in", seq_len=24)


def test_a_model_that_no_family_computes_is_refused_before_it_is_trained(tmp_path: Path) -> None:
    plan = parse_plan(plans.plan_text(model={"post_norms": True}))
    assert family_of(plan.model) is None
    with pytest.raises(TrainerError, match="leave --export-hf out"):
        exported(plan.model, "fp32", None, seq_len=24)


def test_each_familys_config_is_its_own_model(tmp_path: Path) -> None:
    for name in CASES:
        folder = tmp_path / name
        published(folder, name)
        model = plan_of(folder).model
        family = CASES[name][0]
        written = config_of(family, model)
        (folder / "config.json").write_text(json.dumps(written))
        assert plan_of(folder).model == model, name


PAIRS = [
    (name, layout)
    for name in CASES
    for layout in LAYOUTS
    if layout != "ep 2" or CASES[name][0] in ("mixtral", "qwen3_moe", "deepseek_v3")
]


@pytest.mark.gloo
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "layout"), PAIRS)
def test_every_layout_trains_published_weights_as_one_process_does(
    name: str, layout: str, tmp_path: Path
) -> None:
    """From the first loss to the weights that are published after two steps."""
    published(tmp_path / "in", name)
    model = model_of(tmp_path / "in")
    alone = train(tmp_path / "one", model, tmp_path / "in", {}, steps=2)
    found = train(tmp_path / "many", model, tmp_path / "in", LAYOUTS[layout], steps=2)
    assert found == pytest.approx(alone, rel=1e-4)
    one, many = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / each / "out").eval()
        for each in ("one", "many")
    )
    with torch.no_grad():
        torch.testing.assert_close(
            many(tokens()).logits, one(tokens()).logits, rtol=1e-3, atol=1e-3
        )


@pytest.mark.gloo
@pytest.mark.parametrize("name", ["llama, tied", "deepseek_v3"])
def test_a_checkpoint_is_published_as_its_run_would_have(name: str, tmp_path: Path) -> None:
    """Written by a sharded run, read by one process, whatever its layout was."""
    published(tmp_path / "in", name)
    model = model_of(tmp_path / "in")
    options = ["--checkpoint-dir", str(tmp_path / "ckpt"), "--seed", "0"]
    train(tmp_path, model, tmp_path / "in", LAYOUTS["fsdp 2, tp 2"], options=options)
    said = export_newest(tmp_path / "ckpt", Wanted(out=tmp_path / "later", like=tmp_path / "in"))
    assert "after step 1, from step-00000001" in said
    one, other = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / each).eval()
        for each in ("out", "later")
    )
    with torch.no_grad():
        assert torch.equal(one(tokens()).logits, other(tokens()).logits)


def test_a_folder_without_checkpoints_is_told(tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match="has no checkpoint"):
        export_newest(tmp_path, Wanted(out=tmp_path / "out"))
