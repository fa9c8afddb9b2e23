"""Mixtures of every family: balanced as transformers does, and exported as they were trained."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdpplan.spec.trainer_options import AUXILIARY_COEFFICIENT, BALANCE_SPEED
from fsdpplan.trainer.config import parse_plan
from fsdpplan.trainer.errors import TrainerError
from fsdpplan.trainer.export import Wanted, export_newest
from fsdpplan.trainer.huggingface.families import FAMILIES
from fsdpplan.trainer.huggingface.load import load_published
from fsdpplan.trainer.huggingface.names import PLAIN, published_tensors
from fsdpplan.trainer.model.balance import Balance
from fsdpplan.trainer.optimizer import Recipe, make_optimizer, set_learning_rate
from fsdpplan.trainer.options import parse_options
from fsdpplan.trainer.parallel.assemble import Assembled, assemble
from fsdpplan.trainer.step import train_step
from fsdpplan.trainer.text.packing import MicroBatch
from tests.trainer import jobs, plans
from tests.trainer.huggingface.test_weights import CASES, VOCAB, published, tokens
from tests.trainer.huggingface_layouts import model_of
from tests.trainer.text.test_data import token_file

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

CPU = torch.device("cpu")
COEFFICIENT = 0.3
MIXTURES = {
    family: name
    for name, (family, values) in CASES.items()
    if {"num_local_experts", "num_experts", "n_routed_experts"} & set(values)
}
"""By family, a case of each that has experts."""
AUXILIARY = [family for family in MIXTURES if family not in ("deepseek_v2", "deepseek_v3")]
"""Those whose modeling module adds a loss."""


@pytest.fixture(scope="module", autouse=True)
def _group_is_left() -> Iterator[None]:
    """Models are made in this process, whose process group no other test may find."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_every_family_with_experts_is_here() -> None:
    assert set(MIXTURES) == {name for name in FAMILIES if "mixtral" in name or "moe" in name} | {
        "deepseek_v2",
        "deepseek_v3",
    }


def assembled_from(folder: Path, **layout: Any) -> tuple[Any, Assembled]:
    training = {"seq_len": tokens().shape[1] - 1, "global_batch": len(tokens())}
    plan = parse_plan(
        plans.plan_text(model=model_of(folder), training=training, sharding="ddp", **layout)
    )
    return plan, assemble(plan, CPU, seed=0, fill=lambda model: load_published(model, plan, folder))


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("masks", [False, True], ids=["whole", "filled up"])
@pytest.mark.parametrize("family", AUXILIARY)
def test_the_auxiliary_loss_and_its_gradient_are_those_of_transformers(
    family: str, masks: bool, micro_batches: int, tmp_path: Path
) -> None:
    """In every step: the second one has other tokens. Micro-batches of the same rows choose alike,
    and what each is told is what the whole step has chosen."""
    theirs = published(tmp_path, MIXTURES[family])
    theirs.router_aux_loss_coef = COEFFICIENT
    first = tokens()
    layout = {"num_microbatches": micro_batches, "gradient_sync": "last"}
    plan, ours = assembled_from(tmp_path, micro_batch=len(first) // micro_batches, **layout)
    recipe = Recipe(
        steps=1, learning_rate=1e-3, warmup_steps=0, weight_decay=0.0, clip_norm=math.inf
    )
    optimizer = make_optimizer(ours.model, recipe)
    set_learning_rate(optimizer, 0.0)  # so that both keep their weights
    kept: dict[str, torch.Tensor] = {}
    optimizer.register_step_pre_hook(lambda *_: kept.update(gradients_of(ours.model)))
    for rows in (first, first.flip(0, 1)):
        part = rows[: len(rows) // micro_batches]
        inputs, targets = part[:, :-1], part[:, 1:]
        real = torch.ones_like(inputs, dtype=torch.bool)
        if masks:
            real[0, 9:] = False
        counted = targets.where(real, -100)
        theirs.zero_grad()
        found = theirs(inputs, attention_mask=real.long(), output_router_logits=True)
        logits = found.logits.flatten(0, 1)
        entropy = torch.nn.functional.cross_entropy(logits, counted.flatten())
        (entropy + COEFFICIENT * found.aux_loss).backward()

        masked = micro_batches * (counted != -100).sum()[None] if masks else None
        batch = MicroBatch(inputs, counted, masked=masked, real=real if masks else None)
        batches = [batch] * micro_batches
        balance = Balance(auxiliary=COEFFICIENT)
        output = train_step(ours, optimizer, batches, plan, clip_norm=math.inf, balance=balance)
        assert output.balanced is not None
        assert output.balanced.auxiliary_loss is not None
        value = output.balanced.auxiliary_loss.item()
        assert value == pytest.approx(found.aux_loss.item(), rel=1e-6)
        assert output.loss.item() == pytest.approx(entropy.item(), rel=1e-5)
        wanted = gradients_of(theirs)
        compared = set()
        for each in published_tensors(family, plan.model):
            name = each.name.replace("block_sparse_moe", "mlp")  # as files have it, and modules
            if name in wanted and each.form is PLAIN and each.expert is None:
                error = (kept[each.ours[0]] - wanted[name]).norm() / wanted[name].norm()
                assert error < 1e-5, (name, float(error))
                compared.add(name.rsplit(".", 2)[-2])
        assert {"gate", "embed_tokens", "input_layernorm", "lm_head"} <= compared


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Of all parameters, by their names without a wrapper's."""
    return {
        name.removeprefix("module."): parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


STEPS, WINDOWS, LENGTH = 40, 32, 24


def held_out(folder: Path) -> tuple[Path, torch.Tensor]:
    """A token file, and its windows as a run is judged by them."""
    drawn = torch.randint(
        VOCAB, (WINDOWS * LENGTH + 1,), generator=torch.Generator().manual_seed(3)
    )
    return token_file(folder, drawn.tolist(), vocab=VOCAB), drawn.unfold(0, LENGTH + 1, LENGTH)


def trained(folder: Path, *words: str, code: int = 0, **model: Any) -> str:
    return jobs.train(
        folder,
        2,
        *words,
        "--steps",
        str(STEPS),
        "--no-numbers",
        exit_code=code,
        dp_shard=2,
        **model,
    )


@pytest.mark.gloo
@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", MIXTURES)
def test_a_mixture_trained_with_its_defaults_is_exported_as_it_was(
    family: str, tmp_path: Path
) -> None:
    """From published weights and from none: the loss of what is exported is that of the run."""
    published(tmp_path / "in", MIXTURES[family])
    data, windows = held_out(tmp_path)
    model = model_of(tmp_path / "in")
    for number, begin in enumerate(((), ("--init-from", str(tmp_path / "in")))):
        folder, out = tmp_path / f"run {number}", tmp_path / f"out {number}"
        words = ("--eval-data", str(data), "--export-hf", str(out), *begin)
        trained(folder, *words, model=model)
        (judged,) = jobs.lines(folder, "eval")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(out).eval().float()
        with torch.no_grad():
            logits = theirs(windows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).double(), windows[:, 1:].flatten()
        )
        assert judged["loss"] == pytest.approx(loss.item(), abs=1e-5)
        lines = jobs.lines(folder, "step")
        presses = family != "deepseek_v3"
        assert all((line["router_aux_loss"] is not None) == presses for line in lines)


@pytest.mark.gloo
def test_only_biases_that_would_be_dropped_are_refused_and_there_is_a_way_out(
    tmp_path: Path,
) -> None:
    published(tmp_path / "in", MIXTURES["mixtral"])
    model = model_of(tmp_path / "in")
    biased, saved = ("--expert-bias-rate", "0.001"), ("--checkpoint-dir", str(tmp_path / "saved"))
    exported = ("--export-hf", str(tmp_path / "out"))
    said = trained(tmp_path / "asked", *biased, *exported, code=2, model=model)
    assert "leave --expert-bias-rate out" in said
    trained(tmp_path / "run", *biased, *saved, model=model)
    assert {line["router_aux_loss"] for line in jobs.lines(tmp_path / "run", "step")} == {None}
    more = ("--steps", str(STEPS + 1), "--lr-schedule", "constant", "--allow-changes")
    said = trained(tmp_path / "more", *saved, *exported, *more, code=2, model=model)
    assert "--drop-expert-bias" in said
    with pytest.raises(TrainerError, match="--drop-expert-bias"):
        export_newest(tmp_path / "saved", Wanted(out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    export_newest(tmp_path / "saved", Wanted(out=tmp_path / "out", drops_biases=True))
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    words = ("--init-from", str(tmp_path / "out"), "--export-hf", str(tmp_path / "again"))
    trained(tmp_path / "healed", *words, model=model)


@pytest.mark.parametrize(
    ("words", "planned", "published_as", "wanted"),
    [
        ("", None, None, (0.0, AUXILIARY_COEFFICIENT)),
        ("", 0.02, None, (0.0, 0.02)),
        ("", 0.02, 0.05, (0.0, 0.05)),
        ("--router-aux-loss-coef 0.1", 0.02, 0.05, (0.0, 0.1)),
        ("--expert-bias-rate 0", None, None, (0.0, AUXILIARY_COEFFICIENT)),
        ("--expert-bias-rate 0.01", 0.02, None, (0.01, 0.0)),
        ("--expert-bias-rate 0.01 --router-aux-loss-coef 0.1", None, None, (0.01, 0.1)),
        ("--router-aux-loss-coef 0", 0.02, 0.05, (0.0, 0.0)),
    ],
)
def test_the_coefficient_is_that_of_the_config_unless_told(
    words: str,
    planned: float | None,
    published_as: float | None,
    wanted: tuple[float, float],
    tmp_path: Path,
) -> None:
    given = words.split()
    if published_as is not None:
        (tmp_path / "config.json").write_text(json.dumps({"router_aux_loss_coef": published_as}))
        given += ["--init-from", str(tmp_path)]
    router = {} if planned is None else {"aux_loss_coef": planned}
    experts = {"experts": 4, "active": 2, "hidden": 16, "router": router}
    plan = parse_plan(plans.plan_text(model={"experts": experts}))
    balance = parse_options(given).recipe(plan).balance
    assert (balance.bias_rate, balance.auxiliary) == wanted


def test_sigmoids_are_balanced_by_biases_and_take_no_auxiliary_loss() -> None:
    experts = {"experts": 4, "active": 2, "hidden": 16, "router": {"scores": "sigmoid"}}
    plan = parse_plan(plans.plan_text(model={"experts": experts}))
    assert parse_options([]).recipe(plan).balance == Balance(bias_rate=BALANCE_SPEED)
    with pytest.raises(TrainerError, match="leave it out"):
        parse_options(["--router-aux-loss-coef", "0.1"]).recipe(plan)
