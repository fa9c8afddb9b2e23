"""Parameter groups: what they say, whom they get, and what of it is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.emit.trainer_program import Trainer
from fsdpplan.errors import SpecError
from fsdpplan.trainer.config import parse_plan
from fsdpplan.trainer.errors import TrainerError
from fsdpplan.trainer.groups import ParameterGroup, group_of, parse_group, require_all_used
from fsdpplan.trainer.model.decoder import Decoder, trained_names
from fsdpplan.trainer.optimizer import Recipe, make_optimizer, set_learning_rate
from fsdpplan.trainer.options import parse_options
from tests.trainer import plans

RECIPE = Recipe(steps=3, learning_rate=1e-2, warmup_steps=0, weight_decay=0.1, clip_norm=1.0)
CONFIG = parse_plan(plans.plan_text()).model
NAMES = trained_names(CONFIG)


def settings(recipe: Recipe) -> dict[str, tuple[float, float]]:
    """Name of each parameter -> its learning rate and weight decay."""
    model = Decoder(CONFIG)
    groups = make_optimizer(model, recipe).param_groups
    found = {id(p): (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]}
    return {name: found[id(parameter)] for name, parameter in model.named_parameters()}


def test_a_group_is_read_and_shown() -> None:
    group = parse_group("layers.*.wq.*:lr=0.5,weight_decay=0")
    assert group == ParameterGroup(pattern="layers.*.wq.*", lr=0.5, weight_decay=0)
    assert parse_group(str(group)) == group
    assert parse_group("*:weight_decay=0.2").lr == 1


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_first_group_that_matches_counts(optimizer: str) -> None:
    said = ("tok_embeddings*:lr=0.1", "*norm*:weight_decay=0.3", "*:lr=2,weight_decay=0.2")
    recipe = replace(RECIPE, optimizer=optimizer, groups=tuple(map(parse_group, said)))
    found = settings(recipe)
    assert found["tok_embeddings.weight"] == pytest.approx((1e-3, 0.1))
    assert found["norm.weight"] == pytest.approx((1e-2, 0.3))
    assert found["layers.0.attention_norm.weight"] == pytest.approx((1e-2, 0.3))
    assert found["output.weight"] == pytest.approx((2e-2, 0.2))
    assert found["layers.0.attention.wq.weight"] == pytest.approx((2e-2, 0.2))


def test_without_groups_matrices_decay() -> None:
    for name, (rate, decay) in settings(RECIPE).items():
        assert (rate, decay) == (1e-2, 0.0 if "norm" in name else 0.1), name


def test_rates_of_groups_follow_the_schedule() -> None:
    recipe = replace(
        RECIPE,
        optimizer="muon",
        muon_learning_rate=5e-2,
        muon_weight_decay=0.01,
        groups=(parse_group("layers.1.*:lr=0.5"), parse_group("output*:lr=0")),
    )
    model = Decoder(CONFIG)
    optimizer = make_optimizer(model, recipe)
    set_learning_rate(optimizer, 1e-3)
    found = {id(p): g for g in optimizer.param_groups for p in g["params"]}
    by_name = {name: found[id(parameter)] for name, parameter in model.named_parameters()}
    assert by_name["layers.0.attention.wq.weight"]["lr"] == pytest.approx(5e-3)
    assert by_name["layers.0.attention.wq.weight"]["weight_decay"] == 0.01
    assert by_name["layers.1.attention.wq.weight"]["lr"] == pytest.approx(2.5e-3)
    assert by_name["layers.1.ffn_norm.weight"]["lr"] == pytest.approx(5e-4)
    assert by_name["tok_embeddings.weight"]["lr"] == pytest.approx(1e-3)
    assert by_name["output.weight"]["lr"] == 0


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_rate_of_nought_keeps_parameters(optimizer: str) -> None:
    model = Decoder(CONFIG)
    groups = (parse_group("layers.0.*:lr=0"),)
    chosen = make_optimizer(model, replace(RECIPE, optimizer=optimizer, groups=groups))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    chosen.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == name.startswith("layers.0."), name


def test_a_copy_goes_by_the_name_of_what_it_is_a_copy_of() -> None:
    """The head of a pipeline's last stage, where it is the embedding, too."""
    head = Decoder(CONFIG, blocks=(), has_embedding=False)
    groups = (parse_group("tok_embeddings*:lr=0.1"),)
    recipe = replace(RECIPE, groups=groups)
    copied = make_optimizer(head, recipe, {"output.weight": "tok_embeddings.weight"})
    rates = {p.ndim: group["lr"] for group in copied.param_groups for p in group["params"]}
    assert rates == {1: 1e-2, 2: pytest.approx(1e-3)}


def test_patterns_that_do_nothing_are_refused() -> None:
    with pytest.raises(TrainerError, match=r"matches no parameter; .*layers\.\*\.attention\.wq"):
        require_all_used([parse_group("embed*:lr=0.1")], NAMES)
    after = [parse_group("*:lr=0.1"), parse_group("norm*:lr=0.5")]
    with pytest.raises(TrainerError, match="groups before it have all that it matches"):
        require_all_used(after, NAMES)
    require_all_used(after[::-1], NAMES)


@given(
    st.sampled_from(["", "x", "norm*", " x", "a:b", "[a]*"]),
    st.lists(
        st.tuples(
            st.sampled_from(["lr", "weight_decay", "frozen", ""]),
            st.sampled_from(["0", "0.5", "-1", "nan", "inf", "x", "", "1e-3"]),
        ),
        max_size=3,
    ),
)
def test_the_planner_takes_what_the_trainer_takes(
    pattern: str, said: list[tuple[str, str]]
) -> None:
    text = f"{pattern}:" + ",".join(f"{name}={value}" for name, value in said)
    try:
        parse_group(text)
    except ValueError:
        with pytest.raises(SpecError, match="param_group"):
            Trainer(param_group=(text,))
        return
    words = Trainer(param_group=(text, "*:lr=1")).words()
    assert parse_options(words).param_group == (parse_group(text), parse_group("*:lr=1"))


@given(st.sampled_from(NAMES))
def test_names_are_those_of_parameters(name: str) -> None:
    group = parse_group(f"{name}:lr=2")
    assert group_of(name, [group]) is group
    assert [other for other in NAMES if group_of(other, [group])] == [name]


@pytest.mark.parametrize(
    ("words", "optimizer", "said"),
    [
        ("--muon-momentum 0.9", "adamw", "is of Muon, and the plan's optimizer is adamw"),
        ("--adamw loop", "adamw_8bit", "a kernel of its own"),
        ("--expert-bias-rate 0", "adamw", "the plan's model has none"),
        ("--param-group foo:lr=1", "adamw", "matches no parameter"),
    ],
)
def test_options_without_a_meaning_for_the_plan_are_refused(
    words: str, optimizer: str, said: str
) -> None:
    plan = parse_plan(plans.plan_text(training={"optimizer": optimizer}))
    with pytest.raises(TrainerError, match=said):
        parse_options(words.split()).recipe(plan)
