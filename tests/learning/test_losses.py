"""Policy losses, aggregation and importance weights, by value and by finite differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from renma.errors import RecipeError
from renma.learning import LOSSES
from renma.learning.aggregate import weights
from renma.learning.correction import sequence_weights, token_weights
from renma.learning.losses import LossInput, PolicyLoss, k2, k3, ppo_clip, reinforce, sft


def given_tokens(logp: Any, old: Any = None, behaviour: Any = None, advantage: Any = 1.0) -> LossInput:
    values = torch.as_tensor(logp, dtype=torch.float64) if not isinstance(logp, Tensor) else logp
    base = values.detach()

    def filled(other: Any) -> Tensor:
        return base.clone() if other is None else torch.as_tensor(other, dtype=base.dtype).expand_as(base).clone()

    index = torch.zeros(len(base), dtype=torch.long)
    return LossInput(values, filled(old), filled(behaviour), filled(advantage), None, index, index)


def gradient(loss: PolicyLoss, **given: Any) -> list[float]:
    logp = torch.tensor(given.pop("logp"), dtype=torch.float64, requires_grad=True)
    value, _ = loss(given_tokens(logp, **given))
    [result] = torch.autograd.grad(value.sum(), logp)
    return [float(g) for g in result]


@pytest.mark.parametrize(
    "loss",
    [reinforce(), reinforce(importance=True, cap=2.0), ppo_clip(), ppo_clip(dual=3.0), ppo_clip(correction=2.0), sft()],
)
def test_gradients_equal_finite_differences(loss: PolicyLoss) -> None:
    rng = np.random.default_rng(0)
    logp = torch.tensor(-rng.random(40) * 3, requires_grad=True)
    old = logp.detach() + torch.tensor(rng.normal(size=40) * 0.8)
    behaviour = old + torch.tensor(rng.normal(size=40) * 0.5)
    advantage = torch.tensor(rng.normal(size=40))
    held = logp.detach()

    def total(x: Tensor) -> Tensor:
        value, _ = loss(given_tokens(x, old=old, behaviour=behaviour, advantage=advantage))
        return value.sum()

    if loss.__qualname__.startswith("reinforce"):  # its weight is detached, which a difference quotient cannot see
        value, _ = loss(given_tokens(logp, old=old, behaviour=behaviour, advantage=advantage))
        [got] = torch.autograd.grad(value.sum(), logp)
        torch.testing.assert_close(got, value.detach() / held)
    else:
        assert torch.autograd.gradcheck(total, (logp,))


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
    for loss in (reinforce(), reinforce(importance=True), ppo_clip(), ppo_clip(dual=3.0, correction=2.0)):
        assert loss.scales_with_advantage  # type: ignore[attr-defined]
        assert gradient(loss, logp=[-1.0, -0.2], old=[-2.0, -0.1], behaviour=-1.0, advantage=0.0) == [0, 0]
    assert not hasattr(sft(), "scales_with_advantage")


def test_case_6_5_importance_weights_are_truncated_and_detached() -> None:
    old = torch.tensor([-1, -0.5, -3], requires_grad=True)
    behaviour = torch.tensor([-1.1, -0.5, -6])
    weight = token_weights(old, behaviour, cap=2.0)
    assert weight.tolist() == pytest.approx([1.105, 1, 2], abs=1e-3) and not weight.requires_grad
    whole = sequence_weights(old, behaviour, torch.tensor([4, 4, 4]), cap=100.0)
    assert whole.tolist() == pytest.approx([22.2] * 3, abs=0.01)
    two = sequence_weights(old, behaviour, torch.tensor([4, 4, 7]), cap=2.0)
    assert two.tolist() == pytest.approx([1.105, 1.105, 2], abs=1e-3)


def test_case_2_13_of_the_kl_estimates_k2_has_the_gradient_in_the_loss() -> None:
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0, 0.4, -0.1], dtype=torch.float64).log_softmax(-1)

    def slope(kind: str) -> list[float]:
        logp = logits.log_softmax(-1)
        p = logp.exp()
        value = {
            "kl": (p * (logp - reference)).sum(),
            "k2": (p.detach() * k2(logp, reference)).sum(),
            "k3": (p.detach() * k3(logp, reference)).sum(),
        }[kind]
        return [float(g) for g in torch.autograd.grad(value, logits)[0]]

    assert slope("kl") == pytest.approx([0.0224, -0.1794, 0.1570], abs=1e-4)
    assert slope("k2") == pytest.approx(slope("kl"))
    assert slope("k3") == pytest.approx([0.0592, -0.2247, 0.1655], abs=1e-4)
    one = (torch.tensor([-1.0]), torch.tensor([-1.5]))
    assert float(k2(*one)) == pytest.approx(0.125) and float(k3(*one)) == pytest.approx(0.1065, abs=1e-4)


@pytest.mark.parametrize(
    ("low", "high", "dual"), [(1.1, 1.2, None), (0.8, 0.9, None), (-0.1, 1.2, None), (0.8, 1.2, 0.5)]
)
def test_bounds_that_are_not_on_the_ratio_are_refused(low: float, high: float, dual: float | None) -> None:
    with pytest.raises(RecipeError, match="ratio"):
        ppo_clip(low, high, dual)


def test_a_cap_without_importance_is_refused() -> None:
    with pytest.raises(RecipeError, match="importance"):
        reinforce(cap=2.0)


def test_losses_are_found_by_name() -> None:
    assert list(LOSSES) == ["ppo_clip", "reinforce", "sft"]
    value, _ = LOSSES["sft"]()(given_tokens([-2.0]))
    assert value.tolist() == [2.0]


# Aggregation


def test_case_2_11_three_aggregations() -> None:
    loss = np.array([1.0] * 2 + [-1.0] * 8)
    trajectory = np.array([0] * 2 + [1] * 8)
    step = np.zeros(10, np.int64)
    assert loss @ weights("sequence_mean", trajectory, step) == pytest.approx(0)
    assert loss @ weights("token_mean", trajectory, step) == pytest.approx(-0.6)
    assert loss @ weights("constant", trajectory, step, constant_length=10) == pytest.approx(-0.3)


def test_step_mean_weighs_every_step_alike() -> None:
    trajectory, step = np.array([0, 0, 0, 1, 1]), np.array([0, 0, 1, 0, 0])
    assert weights("step_mean", trajectory, step).tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 3, 1 / 6, 1 / 6])


def test_case_10_1_a_trajectory_of_several_rows_counts_once() -> None:
    # Rows of 1, 2 and 1 tokens of trajectory 0, one row of 4 tokens of trajectory 1.
    result = weights("sequence_mean", np.array([0, 0, 0, 0, 1, 1, 1, 1]), np.array([0, 1, 1, 2, 0, 0, 0, 0]))
    assert result[:4].sum() == pytest.approx(0.5) and result[4:].sum() == pytest.approx(0.5)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.floats(-5, 5)), min_size=1, max_size=30),
    st.sampled_from(["token_mean", "sequence_mean", "step_mean", "constant"]),
    st.data(),
)
def test_case_2_10_micro_batches_and_ranks_only_add_up(
    tokens: list[tuple[int, int, float]], aggregate: str, data: st.DataObject
) -> None:
    trajectory, step, loss = (np.array(column) for column in zip(*tokens, strict=True))
    whole = weights(aggregate, trajectory, step, constant_length=7.0)
    owner = np.array(data.draw(st.lists(st.integers(0, 3), min_size=len(tokens), max_size=len(tokens))))
    parts = [float(loss[owner == rank] @ whole[owner == rank]) for rank in range(4)]
    units: dict[tuple[int, ...], list[float]] = {}
    for i, k, value in tokens:
        key = {"token_mean": (), "sequence_mean": (i,), "step_mean": (i, k), "constant": (i,)}[aggregate]
        units.setdefault(key, []).append(value)
    if aggregate == "constant":
        wanted = float(np.mean([sum(values) for values in units.values()]) / 7)
    else:
        wanted = float(np.mean([np.mean(values) for values in units.values()]))
    assert sum(parts) == pytest.approx(wanted, abs=1e-9)


def test_case_2_10_the_token_mean_of_two_unequal_micro_batches() -> None:
    weight = weights("token_mean", np.array([0] * 2 + [1] * 8), np.zeros(10, np.int64))
    assert float(np.array([1.0, 1.0]) @ weight[:2] + np.zeros(8) @ weight[2:]) == pytest.approx(0.2)


def test_unknown_aggregates_and_lengths_are_refused() -> None:
    with pytest.raises(RecipeError, match="did you mean 'token_mean'"):
        weights("token_means", np.zeros(1), np.zeros(1))
    with pytest.raises(RecipeError, match="fixed length"):
        weights("constant", np.zeros(1), np.zeros(1), constant_length=0)
