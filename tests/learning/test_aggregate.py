"""Aggregation: every named one by value, against the slow reference, and independent of how a step is divided."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from renma.errors import RecipeError
from renma.learning.aggregate import weights
from renma.learning.units import units
from tests.learning import reference
from tests.learning.batches import Batch, batches

AGGREGATES = ("token_mean", "sequence_mean", "step_mean", "constant")


@pytest.mark.parametrize("aggregate", AGGREGATES)
@settings(max_examples=40, deadline=None)
@given(batch=batches(), data=st.data())
def test_the_sum_is_that_of_the_slow_reference(aggregate: str, batch: Batch, data: st.DataObject) -> None:
    tokens = batch.tokens
    n = len(tokens)
    keep = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    trajectory, step = np.array([t.trajectory for t in tokens]), np.array([t.step for t in tokens])
    losses = batch.logp.astype(np.float64)
    wanted = reference.aggregate(aggregate, losses.tolist(), tokens, keep.tolist(), 7.0)
    ours = weights(aggregate, trajectory, step, constant_length=7.0, keep=keep)
    assert float(losses @ ours) == pytest.approx(wanted, abs=1e-9)
    assert not ours[~keep].any()
    order = data.draw(st.permutations(range(n)))
    moved = weights(aggregate, trajectory[order], step[order], constant_length=7.0, keep=keep[order])
    np.testing.assert_allclose(moved, ours[order], rtol=1e-12)


def test_nothing_kept_weighs_nothing() -> None:
    for aggregate in AGGREGATES:
        assert weights(aggregate, np.zeros(3), np.zeros(3), keep=np.zeros(3, np.bool_)).tolist() == [0, 0, 0]


def test_units_are_the_same_wherever_their_tokens_stand() -> None:
    trajectory, step = np.array([7, 7, 3, 3, 7]), np.array([0, 1, 0, 0, 1])
    assert units("sequence", trajectory, step)[0].tolist() == [1, 1, 0, 0, 1]
    unit, count = units("step", trajectory, step)
    assert count == 3 and unit.tolist() == [1, 2, 0, 0, 2]
    assert units("token", trajectory, step)[1] == 5
    assert units("sequence", trajectory[:0], step[:0])[1] == 0


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
