"""Rules of the field: each fires where its number crosses its limit, states the estimate's own
number, and claims no gain that a plan without the broken rule does not show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from math import ceil
from typing import Any, get_type_hints

import pytest

from fsdpplan.cost.estimate import estimate
from fsdpplan.cost.memory.peak import available_bytes
from fsdpplan.files.catalogue import load_model
from fsdpplan.files.clusters import load_cluster
from fsdpplan.search.advice import neighbours
from fsdpplan.search.advice.alternatives import INNER_STEPS, apart_of
from fsdpplan.search.advice.field_rules import (
    MOST_SHOWN,
    RULES,
    broken_rules,
    hiding_tokens,
    shown,
)
from fsdpplan.search.advice.neighbours import typed_change
from fsdpplan.search.defaults import named_layout
from fsdpplan.search.pins import Pins, pin_flag
from fsdpplan.search.rules.legality import legal_layout_problem
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import BrokenRule, Case, Estimate
from fsdpplan.spec.training import Training
from tests.search.advice.field_cases import SITUATIONS, TABLE, situation

LIMITS = {rule.name: rule.limit for rule in RULES}
EASE = 1e-6


def of(name: str, rule: str) -> BrokenRule:
    return next(one for one in situation(name)[2] if one.rule == rule)


def names(broken: tuple[BrokenRule, ...]) -> set[str]:
    return {one.rule for one in broken}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", SITUATIONS)
def test_a_situation_breaks_what_was_written_down_for_it(name: str) -> None:
    row = SITUATIONS[name]
    assert names(situation(name)[2]) == set(row["breaks"]), row["why"]


def test_the_table_names_every_rule_and_each_at_least_once() -> None:
    told = {rule for row in SITUATIONS.values() for rule in row["breaks"]}
    assert told == LIMITS.keys()
    assert len(SITUATIONS) >= 20
    assert {rule for row in TABLE["recipes"] for rule in row["breaks"]} <= LIMITS.keys()


# both sides of each limit

PLAIN = "8B on one node"
PIPELINE = "eight stages with 64 micro-batches"


def with_share(name: str, part: str, share: float) -> tuple[Case, Estimate]:
    """A situation in which `part` takes that share of the step; what computes stays."""
    case, priced, _ = situation(name)
    rest = priced.time.total_seconds - getattr(priced.time, part)
    time = replace(priced.time, **{part: rest * share / (1 - share)})
    return case, replace(priced, time=time)


@pytest.mark.parametrize("offset", [-0.29, -0.01, -EASE, EASE, 0.01, 0.3, 0.69])
def test_exposed_communication_is_broken_past_30_percent_and_only_there(offset: float) -> None:
    share = 0.3 + offset
    found = broken_rules(*with_share(PLAIN, "exposed_communication_seconds", share))
    assert ("exposed-communication" in names(found)) is (offset > 0)
    for one in found:
        if one.rule == "exposed-communication":
            assert one.number == pytest.approx(share)


@pytest.mark.parametrize("offset", [-0.19, -0.01, -EASE, EASE, 0.01, 0.5])
def test_the_bubble_is_broken_past_20_percent_and_only_there(offset: float) -> None:
    found = broken_rules(*with_share(PIPELINE, "bubble_seconds", 0.2 + offset))
    assert ("pipeline-bubble" in names(found)) is (offset > 0)


@pytest.mark.parametrize("number", [8, 16, 24, 31, 32, 33, 64])
@pytest.mark.parametrize("share", [0.05, 0.1 - EASE, 0.1 + EASE, 0.19])
def test_few_micro_batches_need_both_numbers(number: int, share: float) -> None:
    case, priced = with_share(PIPELINE, "bubble_seconds", share)
    layout = replace(case.layout, num_microbatches=number)
    training = replace(case.training, global_batch=layout.global_batch)
    found = broken_rules(replace(case, layout=layout, training=training), priced)
    assert ("few-micro-batches" in names(found)) is (number < 32 and share > 0.1)


@pytest.mark.parametrize("used", [0.5, 0.92 - EASE, 0.92 + EASE, 1.1])
def test_head_room_is_broken_past_92_percent_and_only_there(used: float) -> None:
    case, priced, _ = situation(PLAIN)
    device = replace(case.cluster.device, memory_bytes=int(priced.memory.peak_device_bytes / used))
    full = replace(case, cluster=replace(case.cluster, device=device))
    found = broken_rules(full, priced)
    assert ("head-room" in names(found)) is (used > 0.92)


@pytest.mark.parametrize(("steps", "is_long"), [(1, False), (999, False), (1000, True)])
def test_a_run_is_long_from_a_thousand_steps_on(steps: int, is_long: bool) -> None:
    case, priced, _ = situation(PLAIN)
    tokens = steps * case.training.tokens_per_step
    training = replace(case.training, reduce_dtype="bf16", tokens=tokens)
    found = broken_rules(replace(case, training=training), priced)
    assert ("bf16-reduction" in names(found)) is is_long
    whole = replace(case, training=replace(training, reduce_dtype="fp32"))
    assert "bf16-reduction" not in names(broken_rules(whole, priced))


@pytest.mark.parametrize(("batch", "is_large"), [(16384, False), (16385, True)])
def test_a_batch_is_large_past_2_to_the_26_tokens(batch: int, is_large: bool) -> None:
    case, priced, _ = situation(PLAIN)
    training = replace(case.training, global_batch=batch)
    found = broken_rules(replace(case, training=training), priced)
    assert ("large-batch" in names(found)) is is_large


def test_a_batch_is_small_below_the_tokens_that_hide_gathers_and_only_there() -> None:
    case, priced = with_share("a batch of 16 on 64 GPUs", "exposed_communication_seconds", 0.2)
    least = hiding_tokens(case)
    assert least == pytest.approx(989.4e12 / 400e9, rel=0.01)  # the situations' 2,500
    edge = ceil(least * case.cluster.gpus / case.training.seq_len)
    for batch in (edge - 1, edge):
        training = replace(case.training, global_batch=batch)
        found = broken_rules(replace(case, training=training), priced)
        assert ("small-batch" in names(found)) is (batch < edge)
    idle = with_share("a batch of 16 on 64 GPUs", "exposed_communication_seconds", 0.1 - EASE)
    assert "small-batch" not in names(broken_rules(*idle))


def islands_of(gpus: int, island: int, ranks: int, stride: int) -> int:
    """Most islands that a group of every `stride`-th rank touches, by listing all groups."""
    block = ranks * stride
    return max(
        len({rank // island for rank in range(first + begin, first + block, stride)})
        for first in range(0, gpus, block)
        for begin in range(stride)
    )


def spreads(gpus: int) -> Iterator[Layout]:
    """Ways to split 48 GPUs by tensors, shards and copies."""
    for tp in (1, 2, 3, 4, 6, 12, 16):
        for shard in (1, 2, 3, 4, 6, 8, 12, 16, 24, 48):
            if gpus % (tp * shard) == 0:
                copies = gpus // (tp * shard)
                sharding = "fsdp" if shard > 1 else "ddp"
                yield Layout(tp=tp, dp_shard=shard, dp_replicate=copies, sharding=sharding)


def test_groups_are_found_to_leave_islands_as_listing_their_ranks_does() -> None:
    """Over 48 GPUs on nodes of 8, whatever else the layout is."""
    case, priced, _ = situation("8B on one node")
    cluster = load_cluster("dgx-h100", gpus=48).cluster
    waiting = replace(priced.communication[0], level="infiniband", axis="dp_shard")
    seconds = 0.06 * priced.time.total_seconds
    priced = replace(priced, communication=(replace(waiting, exposed_seconds=seconds),))
    for layout in spreads(48):
        found = {
            one.rule: one
            for one in broken_rules(replace(case, cluster=cluster, layout=layout), priced)
        }
        for rule, ranks, stride in (
            ("tensor-parallel-across", layout.tp, 1),
            ("shards-across-islands", layout.shard_ranks, layout.tp),
        ):
            islands = islands_of(48, 8, ranks, stride)
            assert (rule in found) is (islands > 1), (rule, layout)
            assert islands == 1 or found[rule].number == islands
        span = layout.shard_ranks * layout.tp
        is_even = 8 % span == 0 or span % 8 == 0 or layout.shard_ranks == 1
        assert ("uneven-shard-group" in found) is not is_even, layout


# what is stated, and what is claimed


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", SITUATIONS)
def test_the_numbers_are_the_estimates_own(name: str) -> None:
    case, priced, broken = situation(name)
    total = priced.time.total_seconds
    own: dict[str, Any] = {
        "exposed-communication": priced.time.exposed_communication_seconds / total,
        "pipeline-bubble": priced.time.bubble_seconds / total,
        "few-micro-batches": case.layout.num_microbatches / case.layout.pp,
        "head-room": priced.memory.peak_device_bytes / case.cluster.device.memory_bytes,
        "bf16-reduction": case.training.steps,
        "small-batch": case.training.tokens_per_step / case.cluster.gpus,
        "large-batch": case.training.tokens_per_step,
    }
    for one in broken:
        if one.rule in own:
            assert one.number == pytest.approx(own[one.rule]), one
    shares = [one.number for one in broken if one.rule in ("exposed-communication", "head-room")]
    for share in shares:
        assert any(f"{100 * share:.1f} %" in one.says for one in broken)


def followed(case: Case, change: str) -> Case:
    """The case that `change`, typed beside the options that name `case`, names."""
    layout = {field.name: getattr(case.layout, field.name) for field in fields(Pins)}
    layout["stage_blocks"] = None
    flags = {pin_flag(name): name for name in layout}
    kinds = get_type_hints(Layout)
    training, model, words = case.training, case.model, change.split()
    while words:
        flag = words.pop(0)
        if flag.startswith("--no-"):
            layout[flags[flag.replace("--no-", "--", 1)]] = False
            continue
        name, word = flags.get(flag, flag[2:].replace("-", "_")), words.pop(0)
        value: Any = int(word.removesuffix("B")) if word.removesuffix("B").isdigit() else word
        if name == "vocab_multiple":
            model = replace(model, vocab_multiple=value)
        elif name in layout:
            assert name in kinds
            layout[name] = value
        else:
            training = replace(training, **{name: value})
    found = named_layout(Pins(**layout), cluster=case.cluster, training=training, model=model)
    return Case(model=model, cluster=case.cluster, training=training, layout=found.layout)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", [row["name"] for row in SITUATIONS.values() if row["breaks"]])
def test_advice_that_is_followed_brings_what_was_said(name: str) -> None:
    case, priced, broken = situation(name)
    for one in broken:
        if not one.change:
            continue
        then = followed(case, one.change)
        assert legal_layout_problem(then) is None
        after = estimate(then)
        same_tokens = case.training.tokens_per_step / then.training.tokens_per_step
        gain = priced.step_seconds.expected - after.step_seconds.expected * same_tokens
        saved = priced.memory.peak_device_bytes - after.memory.peak_device_bytes
        if one.gain_seconds:
            assert gain == pytest.approx(one.gain_seconds, rel=1e-6), one
            most = available_bytes(cluster=then.cluster, training=then.training)
            most = max(most, priced.memory.peak_device_bytes)
            assert after.memory.peak_device_bytes <= most
        if one.gain_bytes:
            assert saved == one.gain_bytes
            assert "head-room" not in names(broken_rules(then, after))
        assert one.gain_seconds or one.gain_bytes or one.rule == "bf16-reduction"


def test_what_has_no_remedy_costs_what_is_past_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 % of a step waits: had it kept to 30 %, the step would be a seventh shorter."""
    monkeypatch.setattr(neighbours, "best", lambda *_: None)
    case, priced = with_share("one GPU", "exposed_communication_seconds", 0.4)
    (one,) = (each for each in broken_rules(case, priced) if each.rule == "exposed-communication")
    rest = 0.6 * priced.time.total_seconds
    assert one.cost_fraction == pytest.approx(1 - rest / 0.7 / priced.time.total_seconds)
    assert (one.change, one.gain_seconds) == ("", 0)
    assert "no faster layout was found beside this one. Not tried: another precision" in one.advice


def test_what_moves_no_gradients_is_not_told_to_reduce_them_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(neighbours, "best", lambda *_: None)
    case, priced = with_share("one GPU", "exposed_communication_seconds", 0.4)
    row = replace(estimate(situation(SLOW)[0]).communication[0], exposed_seconds=1e9)
    for axis, told in (("tp", False), ("dp_shard", True), ("dp_replicate*dp_shard", True)):
        most = replace(priced, communication=(replace(row, axis=axis),))
        (one,) = (o for o in broken_rules(case, most) if o.rule == "exposed-communication")
        assert ("reduce gradients less often" in one.advice) is told


# links that are too slow

SLOW = "8B over 1 Gb/s for each GPU"


def test_slow_links_are_priced_by_what_one_domain_does_alone() -> None:
    case, priced, _ = situation(SLOW)
    one, apart = of(SLOW, "slow-links"), apart_of(case)
    assert apart is not None
    assert (apart.domains, apart.batch) == (4, 64)
    hidden = apart.hiding_steps * apart.step_seconds
    assert hidden - apart.step_seconds < apart.exchange_seconds <= hidden
    assert f"{apart.hiding_steps} inner steps" in one.advice
    assert "One node alone (--gpus 8 --global-batch 64) trains" in one.advice
    # as many tokens by four nodes apart, an average every 500 steps
    apart_seconds = apart.step_seconds + apart.exchange_seconds / INNER_STEPS
    assert one.gain_seconds <= priced.step_seconds.expected - apart_seconds + 1e-9
    assert one.cost_fraction > 0.5


def test_the_layout_is_to_blame_where_another_one_does_on_the_same_links() -> None:
    """More than 20 % waits, and nodes apart are twice as fast; but so are all of them together."""
    assert "slow-links" not in names(situation("matrices split over two nodes")[2])


def test_a_fast_network_breaks_nothing() -> None:
    case = Case(
        model=load_model("llama-3.1-8b"),
        cluster=load_cluster("dgx-h100", gpus=32).cluster,
        training=Training(seq_len=4096, global_batch=256),
        layout=Layout(dp_shard=32, num_microbatches=8),
    )
    assert broken_rules(case, estimate(case)) == ()


# order, and what a screen has room for


def test_what_puts_the_run_at_risk_comes_first_and_then_the_dearest() -> None:
    for name in ("small buckets over Ethernet", "8B on half a node, nothing recomputed"):
        broken = situation(name)[2]
        keys = [(not one.risks_run, -one.cost_fraction) for one in broken]
        assert keys == sorted(keys)


def test_a_screen_has_three_at_most_and_each_remedy_once() -> None:
    broken = situation("small buckets over Ethernet")[2]
    first = shown(broken)
    assert len(first) <= MOST_SHOWN
    assert set(first) <= set(broken)
    changes = [one.change for one in first if one.change]
    assert len(changes) == len(set(changes))
    many = tuple(replace(broken[0], rule=str(n), change=str(n)) for n in range(5))
    assert shown(many) == many[:3]


def test_a_change_names_what_is_different_and_nothing_else() -> None:
    case, _, _ = situation(PLAIN)
    assert typed_change(case, case) == ""
    training = replace(case.training, global_batch=8, reduce_dtype="bf16")
    layout = replace(case.layout, micro_batch=2)
    other = replace(case, training=training, layout=layout)
    assert typed_change(case, other) == "--micro-batch 2 --global-batch 8 --reduce-dtype bf16"


def test_a_neighbour_may_break_what_a_published_layout_breaks_and_nothing_else() -> None:
    # its own breach is judged before the pipeline's, and hid that 256 stages are too many
    layout = Layout(
        pp=16,
        virtual_stages=8,
        schedule="interleaved_1f1b",
        tp=8,
        dp_shard=16,
        num_microbatches=16,
        loss_parallel=True,
    )
    case = Case(
        model=load_model("llama-3.1-405b"),
        cluster=load_cluster("dgx-h100", gpus=2048).cluster,
        training=Training(seq_len=8192, global_batch=256),
        layout=layout,
    )
    assert legal_layout_problem(case) is not None
    predicted = estimate(case)
    assert neighbours.best(case, predicted, neighbours.interleaved(case)) is None
    for own in neighbours.interleaved(case):
        assert own is not None
        assert legal_layout_problem(own) == legal_layout_problem(case)
