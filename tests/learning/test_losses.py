"""Policy losses, by value and against the slow reference."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from renma.errors import RecipeError, RunError
from renma.learning import LOSSES
from renma.learning.losses import (
    LossInput,
    PolicyLoss,
    StepTokens,
    Traits,
    cispo,
    decoupled,
    dpo,
    gspo,
    hybrid,
    ppo_clip,
    reinforce,
    sequence_ratio,
    sft,
    step_ratio,
    traits,
    weighed,
)
from renma.learning.objective import Objective
from renma.learning.rows import rows_of
from tests.learning import reference
from tests.learning.batches import Batch, batches, ours
from tests.learning.tiny import make_trajectory


def given_tokens(logp: Any, old: Any = None, behaviour: Any = None, advantage: Any = 1.0) -> LossInput:
    values = torch.as_tensor(logp, dtype=torch.float64) if not isinstance(logp, Tensor) else logp
    base = values.detach()

    def filled(other: Any) -> Tensor:
        return base.clone() if other is None else torch.as_tensor(other, dtype=base.dtype).expand_as(base).clone()

    index = torch.zeros(len(base), dtype=torch.long)
    return LossInput(values, filled(old), filled(behaviour), filled(advantage), None, index, index, index)


def gradient(loss: PolicyLoss, **given: Any) -> list[float]:
    logp = torch.tensor(given.pop("logp"), dtype=torch.float64, requires_grad=True)
    value, _ = loss(given_tokens(logp, **given))
    [result] = torch.autograd.grad(value.sum(), logp)
    return [float(g) for g in result]


CASES: list[tuple[str, dict[str, Any]]] = [
    ("reinforce", {}),
    ("reinforce", {"importance": True}),
    ("reinforce", {"importance": True, "cap": 1.5}),
    ("ppo_clip", {}),
    ("ppo_clip", {"low": 0.8, "high": 1.28}),  # dapo
    ("ppo_clip", {"dual": 3.0}),
    ("decoupled", {"cap": 1.3}),
    ("decoupled", {}),
    ("cispo", {}),
    ("cispo", {"low": 0.5, "high": 1.1}),
    ("gspo", {}),
    ("gspo", {"low": 0.8, "high": 1.2}),
    ("step_ratio", {}),
    ("step_ratio", {"low": 0.8, "high": 1.2}),
    ("sft", {}),
    ("hybrid", {"imitation": 0.3}),
]
AGGREGATES = ("token_mean", "sequence_mean", "step_mean", "constant")


@pytest.mark.parametrize(("name", "options"), CASES)
@settings(max_examples=12, deadline=None)
@given(batch=batches(), data=st.data())
def test_value_and_gradient_are_those_of_the_slow_reference(
    name: str, options: dict[str, Any], batch: Batch, data: st.DataObject
) -> None:
    objective = Objective(
        LOSSES[name](**options),
        aggregate=data.draw(st.sampled_from(AGGREGATES)),
        constant_length=7.0,
        kl=data.draw(st.sampled_from([0.0, 0.3])),
        kl_form=data.draw(st.sampled_from(["k2", "k3_ratio"])),
    )
    tokens, held = batch.tokens, batch.logp.tolist()

    def wanted(logp: list[float]) -> float:
        losses = reference.LOSSES[name](logp, held, tokens, **options)
        if objective.kl:
            penalty = reference.kl_terms(objective.kl_form, logp, tokens)
            losses = [value + objective.kl * p for value, p in zip(losses, penalty, strict=True)]
        return reference.aggregate(objective.aggregate, losses, tokens, [True] * len(tokens), 7.0)

    value, gradient, _ = ours(objective, batch)
    assert value == pytest.approx(wanted(held), rel=1e-6, abs=1e-6)
    direction = np.random.default_rng(0).normal(size=len(held))
    rise = reference.slope(wanted, held, direction.tolist())
    assume(not np.isnan(rise))
    assert float(gradient @ direction) == pytest.approx(rise, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(("name", "options"), CASES)
@settings(max_examples=8, deadline=None)
@given(batch=batches(), data=st.data())
def test_packs_and_the_order_of_rows_change_nothing(
    name: str, options: dict[str, Any], batch: Batch, data: st.DataObject
) -> None:
    objective = Objective(LOSSES[name](**options), aggregate=data.draw(st.sampled_from(AGGREGATES)), kl=0.1)
    value, gradient, _ = ours(objective, batch)
    number = len(batch.rows)
    owner = data.draw(st.lists(st.integers(0, 2), min_size=number, max_size=number))
    packs = [[i for i in range(number) if owner[i] == pack] for pack in set(owner)]
    apart, gradient_apart, _ = ours(objective, batch, packs)  # a trajectory's rows may be in several
    assert apart == pytest.approx(value, abs=1e-6)
    np.testing.assert_allclose(gradient_apart, gradient, atol=1e-6)
    order = data.draw(st.permutations(range(number)))
    moved, gradient_moved, _ = ours(objective, batch.permuted(order))
    assert moved == pytest.approx(value, abs=1e-9)
    back = np.concatenate([batch.split(gradient)[i] for i in order])
    np.testing.assert_allclose(gradient_moved, back, atol=1e-9)


@settings(max_examples=20, deadline=None)
@given(batch=batches(), level=st.sampled_from(["sequence", "step"]))
def test_a_sequence_ratio_has_the_gradient_of_its_own_definition(batch: Batch, level: str) -> None:
    # One advantage a unit: the mean over units of max(-A s, -A clip(s)), s differentiated through every token.
    rows = [dataclasses.replace(row, advantages=np.where(row.trained, 1.5, 0).astype(np.float32)) for row in batch.rows]
    batch = dataclasses.replace(batch, rows=rows)
    tokens, held = batch.tokens, batch.logp.tolist()
    firsts = {min(reference.same(tokens, level, i)): reference.same(tokens, level, i) for i in range(len(tokens))}

    def wanted(logp: list[float]) -> float:
        ratios = [np.exp(np.mean([logp[j] - tokens[j].old for j in unit])) for unit in firsts.values()]
        return float(np.mean([reference.ppo_term(1.5, s, 0.8, 1.2) for s in ratios]))

    aggregate = "sequence_mean" if level == "sequence" else "step_mean"
    value, gradient, _ = ours(Objective(sequence_ratio(level, 0.8, 1.2), aggregate), batch)  # type: ignore[arg-type]
    direction = np.random.default_rng(0).normal(size=len(held))
    rise = reference.slope(wanted, held, direction.tolist())
    assume(not np.isnan(rise))
    assert value == pytest.approx(wanted(held), abs=1e-6)
    assert float(gradient @ direction) == pytest.approx(rise, rel=1e-5, abs=1e-6)


@settings(max_examples=30, deadline=None)
@given(batch=batches(pairs=True), beta=st.sampled_from([0.1, 1.0]), data=st.data())
def test_dpo_has_the_gradient_of_the_mean_over_pairs(batch: Batch, beta: float, data: st.DataObject) -> None:
    tokens, held = batch.tokens, batch.logp.tolist()
    number = len(batch.rows)
    owner = data.draw(st.lists(st.integers(0, 2), min_size=number, max_size=number))
    packs = [[i for i in range(number) if owner[i] == pack] for pack in set(owner)]
    _, gradient, summary = ours(Objective(dpo(beta), "constant", constant_length=0.5), batch, packs)
    wanted, margins = reference.dpo(held, tokens, beta)
    direction = np.random.default_rng(0).normal(size=len(held))
    rise = reference.slope(lambda logp: reference.dpo(logp, tokens, beta)[0], held, direction.tolist())
    assert float(gradient @ direction) == pytest.approx(rise, rel=1e-5, abs=1e-6)
    assert summary["pairs"] == len(margins)
    if margins:
        assert summary["preference_loss"] == pytest.approx(wanted, abs=1e-6)
        assert summary["pair_margin"] == pytest.approx(beta * np.mean(margins), abs=1e-6)
        assert summary["pair_accuracy"] == np.mean([m > 0 for m in margins])


def pair_step(advantage: Any, group: Any, trajectory: Any, logp: Any = -1.0) -> StepTokens:
    n = len(advantage)
    values = np.broadcast_to(np.asarray(logp, np.float64), n)
    return StepTokens(values, values, values, np.full(n, -1.0), np.asarray(advantage, np.float32),
                      np.asarray(trajectory), np.zeros(n, np.int64), np.asarray(group))  # fmt: skip


def test_dpo_compares_chosen_with_rejected_and_leaves_the_rest_out() -> None:
    prepare, summary = traits(dpo(0.5)).prepare, traits(dpo(0.5)).summary
    assert prepare is not None and summary is not None
    # Group 0: chosen -0.5 -0.8 against -1 each, rejected -2 against -1; a third member without advantage. Group 1 has
    # no rejected one.
    step = pair_step([1, 1, -1, 0, 1], [0, 0, 0, 0, 1], [0, 0, 1, 2, 3], [-0.5, -0.8, -2.0, -9.0, -1.0])
    margin = prepare(step)
    assert margin == pytest.approx([1.7, 1.7, 1.7, np.nan, np.nan], nan_ok=True)
    numbers = summary(step, margin)
    assert numbers["preference_loss"] == pytest.approx(np.log1p(np.exp(-0.85)))
    assert (numbers["pairs"], numbers["pair_accuracy"]) == (1, 1)
    tie = pair_step([1, -1], [0, 0], [0, 1])
    assert summary(tie, prepare(tie))["pair_accuracy"] == 0.5
    assert summary(step, np.full(5, np.nan)) == {"pairs": 0}


@pytest.mark.parametrize(
    ("advantage", "group", "trajectory", "message"),
    [
        ([1, 1, -1], [0, 0, 0], [0, 1, 2], "one pair a group"),
        ([1, -1, -1], [0, 0, 0], [0, 1, 2], "one pair a group"),
        ([1, -1], [0, 0], [0, 0], "both signs"),
        ([1, -1], [-1, -1], [0, 1], "in none"),
    ],
)
def test_what_is_not_one_pair_a_group_is_refused(advantage: Any, group: Any, trajectory: Any, message: str) -> None:
    prepare = traits(dpo()).prepare
    assert prepare is not None
    with pytest.raises(RunError, match=message):
        prepare(pair_step(advantage, group, trajectory))


def test_a_loss_that_needs_the_whole_step_says_so() -> None:
    with pytest.raises(RunError, match="whole optimiser step"):
        dpo()(given_tokens([-1.0]))
    with pytest.raises(RecipeError, match="beta"):
        dpo(0.0)


def test_cispo_keeps_the_gradient_of_tokens_whose_weight_is_clipped() -> None:
    logp = [float(np.log(r)) for r in (0.5, 1.0, 9.0)]
    assert gradient(cispo(), logp=logp, old=0.0, advantage=2.0) == pytest.approx([-1, -2, -8])
    _, statistics = cispo()(given_tokens(logp, old=0.0, advantage=2.0))
    assert statistics["clip_share"].tolist() == [0, 0, 1]


def test_decoupled_weighs_by_what_lies_between_sampler_and_update() -> None:
    token = {"logp": [-1.0], "old": -1.0, "behaviour": -1.5, "advantage": 2.0}
    assert gradient(decoupled(), **token) == pytest.approx([-2 * np.exp(0.5)])
    assert gradient(decoupled(cap=1.1), **token) == pytest.approx([-2.2])
    far = token | {"logp": [-0.5]}  # r = e^0.5 is over the bound
    assert gradient(decoupled(), **far) == [0]


def test_case_6_3_a_sampled_eos_has_its_own_logprob_and_ratio_one() -> None:
    # EOS sampled with p .01 under an unchanged policy; a log-probability of 0 for it would make the ratio .01.
    logp = [-0.4, -0.3, float(np.log(0.01))]
    for loss in (gspo(), step_ratio(), ppo_clip()):
        _, statistics = loss(given_tokens(logp))
        assert statistics["ratio_mean"].tolist() == pytest.approx([1.0] * 3)
    x = given_tokens(logp, old=[-0.4, -0.3, 0.0])
    assert float(gspo()(x)[1]["ratio_mean"][0]) ** 3 == pytest.approx(0.01)


def test_case_6_3_an_added_eos_is_not_trained() -> None:
    # A stop string cut the action after [5, 6]; the EOS 2 that the template adds belongs to the next prompt.
    [row] = rows_of(make_trajectory([([1], [5, 6]), ([1, 5, 6, 2, 7], [8])]), 0)
    assert row.ids.tolist() == [1, 5, 6, 2, 7, 8] and row.trained.tolist() == [False, True, True, False, False, True]


def test_case_6_6_a_loss_a_sequence_times_weights_a_token_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"shape \(2,\) times weights of shape \(2, 3\)"):
        weighed(torch.ones(2), torch.ones(2, 3))
    with pytest.raises(ValueError, match="times weights"):
        weighed(torch.ones(3), torch.ones(2, 3))
    assert weighed(torch.ones(2), torch.full((2,), 0.5)).tolist() == [0.5, 0.5]


def test_hybrid_imitates_where_nothing_was_recorded() -> None:
    token = {"logp": [-1.0, -1.0], "old": [-1.0, np.nan], "behaviour": [-1.0, np.nan], "advantage": [2.0, 5.0]}
    assert gradient(hybrid(imitation=0.5), **token) == pytest.approx([-2, -0.5])
    assert gradient(sft(), **token) == [-1, -1]


def test_ppo_clip_stops_the_push_beyond_its_bounds() -> None:
    ratios = [0.5, 0.9, 1.1, 1.5]
    logp = [float(np.log(r)) for r in ratios]
    assert gradient(ppo_clip(), logp=logp, old=0.0, advantage=1.0) == pytest.approx([-0.5, -0.9, -1.1, 0])
    assert gradient(ppo_clip(), logp=logp, old=0.0, advantage=-1.0) == pytest.approx([0, 0.9, 1.1, 1.5])
    value, statistics = ppo_clip()(given_tokens(logp, old=0.0, advantage=1.0))
    assert value.tolist() == pytest.approx([-0.5, -0.9, -1.1, -1.2])
    assert statistics["clip_share"].tolist() == [0, 0, 0, 1]
    assert statistics["ratio_mean"].tolist() == pytest.approx(ratios)


def test_dual_clip_bounds_the_loss_of_a_bad_token() -> None:
    logp = [float(np.log(r)) for r in (2.0, 5.0)]
    assert gradient(ppo_clip(dual=3.0), logp=logp, old=0.0, advantage=-1.0) == pytest.approx([2, 0])
    assert gradient(ppo_clip(dual=3.0), logp=logp, old=0.0, advantage=1.0) == pytest.approx([0, 0])


def test_case_6_7_the_ratio_is_to_the_recorded_policy() -> None:
    # Sampled by version 3 at log-probability -2, trained at version 5 where it is -1: e > 1.2, so the clip acts.
    value, statistics = ppo_clip()(given_tokens([-1.0], old=-2.0, behaviour=-2.0))
    assert float(value) == pytest.approx(-1.2) and statistics["clip_share"].tolist() == [1]


def test_reinforce_with_importance_weighs_by_the_detached_ratio() -> None:
    token = {"logp": [-1.0], "behaviour": -1.5, "advantage": 2.0}
    assert gradient(reinforce(importance=True), **token) == pytest.approx([-2 * np.exp(0.5)])
    assert gradient(reinforce(importance=True, cap=1.1), **token) == pytest.approx([-2.2])
    assert gradient(reinforce(), **token) == [-2.0]


def test_zero_advantages_have_no_gradient_where_a_loss_says_so() -> None:
    marked = [reinforce(), reinforce(importance=True), ppo_clip(), ppo_clip(dual=3.0), decoupled(), cispo(), gspo()]
    for loss in (*marked, step_ratio()):
        assert traits(loss).scales_with_advantage
        assert gradient(loss, logp=[-1.0, -0.2], old=[-2.0, -0.1], behaviour=-1.0, advantage=0.0) == [0, 0]
    assert traits(dpo()).scales_with_advantage
    assert not traits(sft()).scales_with_advantage and not traits(hybrid()).scales_with_advantage


def test_a_loss_without_attributes_has_the_plain_ones() -> None:
    assert traits(lambda x: (-x.logp, {})) == Traits()


@pytest.mark.parametrize(
    ("low", "high", "dual"), [(1.1, 1.2, None), (0.8, 0.9, None), (-0.1, 1.2, None), (0.8, 1.2, 0.5)]
)
def test_bounds_that_are_not_on_the_ratio_are_refused(low: float, high: float, dual: float | None) -> None:
    with pytest.raises(RecipeError, match="ratio"):
        ppo_clip(low, high, dual)


def test_a_cap_without_importance_is_refused() -> None:
    with pytest.raises(RecipeError, match="importance"):
        reinforce(cap=2.0)


@pytest.mark.parametrize("loss", [decoupled, cispo, gspo, step_ratio, hybrid])
def test_every_clipping_loss_refuses_bounds_that_exclude_one(loss: Any) -> None:
    with pytest.raises(RecipeError, match="ratio"):
        loss(low=1.1)


def test_losses_are_found_by_name() -> None:
    names = ["cispo", "decoupled", "dpo", "gspo", "hybrid", "ppo_clip", "reinforce", "sft", "step_ratio"]
    assert list(LOSSES) == names
    assert all(callable(LOSSES[name]()) for name in names)
    value, _ = LOSSES["sft"]()(given_tokens([-2.0]))
    assert value.tolist() == [2.0]
