"""Each estimator against the slow reference, on random batches: equal to 1e-6."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from renma.credit import ESTIMATORS, Evidence, credit
from renma.credit.recursions import compress, discounted, gae, masked_gae, masked_returns
from renma.credit.whitening import task_normalised, whitened
from tests.credit import reference
from tests.credit.batches import Batch, batches

few = settings(max_examples=40, deadline=None)

CONFIGURATIONS: list[tuple[str, dict[str, Any]]] = [
    ("reinforce", {}),
    ("reinforce", {"baseline": "batch_mean"}),
    ("reinforce_pp", {}),
    ("reinforce_pp", {"gamma": 0.9}),
    ("reinforce_pp", {"baseline": "group_mean"}),
    ("remax", {}),
    ("rloo", {}),
    ("grpo", {}),
    ("grpo", {"std": False}),
    ("dr_grpo", {}),
    ("per_component", {"weights": {"correct": 2.0}}),
    ("per_component", {"std": False}),
    ("gigpo", {}),
    ("gigpo", {"omega": 0.5, "gamma": 0.8, "std": True}),
    ("turn_level", {}),
    ("turn_level", {"gamma": 0.5, "compare": "outcome", "outcome_weight": 0.5, "process_weight": 2.0, "std": False}),
    ("distillation", {}),
    ("distillation", {"coefficient": 0.5, "reward": 2.0}),
    ("pairs", {}),
    ("pairs", {"from_divergence": True}),
    ("best", {"threshold": 0.25}),
    ("best", {"threshold": -0.5, "per_group": 1}),
    ("ones", {}),
]
CRITICS: list[tuple[str, dict[str, Any]]] = [
    ("gae_token", {}),
    ("gae_token", {"gamma": 0.9, "lam": 0.8, "whiten": False}),
    ("gae_token", {"gamma": 1.0, "lam": 1.0, "whiten": False}),
    ("gae_step", {}),
    ("gae_step", {"gamma": 0.9, "lam": 0.5, "whiten": False}),
    ("gae_step", {"gamma": 0.0, "lam": 1.0, "whiten": False}),
]


def same(found: Any, expected: Any, of: Any = "") -> None:
    """Nested arrays against nested lists: the same shape, equal to 1e-6; nan where nan."""
    assert [[len(member) for member in group] for group in found] == [[len(m) for m in group] for group in expected]
    for group, others in zip(found, expected, strict=True):
        for member, other in zip(group, others, strict=True):
            assert member.dtype == np.float32
            np.testing.assert_allclose(member, other, rtol=1e-6, atol=1e-6, err_msg=str(of))


@few
@given(batch=batches())
def test_equal_to_the_reference(batch: Batch) -> None:
    for name, options in CONFIGURATIONS:
        found = credit(ESTIMATORS[name](**options), batch.groups, batch.evidence)
        expected = getattr(reference, name)(batch.groups, batch.evidence, **options)
        same(found.advantages, expected, (name, options))
        assert found.targets is None
        assert all(np.isfinite(value) for value in found.metrics.values())


@few
@given(batch=batches())
def test_critics_equal_to_the_reference(batch: Batch) -> None:
    for name, options in CRITICS:
        found = credit(ESTIMATORS[name](**options), batch.groups, batch.evidence)
        advantages, targets = getattr(reference, name)(batch.groups, batch.evidence, **options)
        same(found.advantages, advantages, (name, options))
        same(found.targets, targets, (name, options, "targets"))


@few
@given(batch=batches())
def test_task_normalisation_equal_to_the_reference(batch: Batch) -> None:
    for name in ("grpo", "gae_token", "pairs"):
        found = credit(ESTIMATORS[name](), batch.groups, batch.evidence).advantages
        same(task_normalised(found, batch.groups), reference.task_normalised(found, batch.groups), name)


def test_every_estimator_is_compared() -> None:
    assert {name for name, _ in CONFIGURATIONS + CRITICS} == set(ESTIMATORS)


# -- the functions on raw arrays -------------------------------------------------------------------------------------

numbers = st.floats(-100, 100, width=32)
shares = st.floats(0, 1)


@few
@given(st.lists(st.lists(numbers, max_size=9), max_size=5), shares)
def test_many_sequences_are_discounted_as_one_by_one(rows: list[list[float]], factor: float) -> None:
    together = discounted([v for row in rows for v in row], factor, [len(row) for row in rows])
    expected = [v for row in rows for v in reference.to_go(row, factor)]
    np.testing.assert_allclose(together, expected, rtol=1e-9, atol=1e-9)


@few
@given(st.lists(st.tuples(st.lists(st.tuples(numbers, numbers), max_size=6), numbers), max_size=5), shares, shares)
def test_many_sequences_have_the_advantages_of_one_by_one(
    rows: list[tuple[list[tuple[float, float]], float]], gamma: float, lam: float
) -> None:
    rewards = [r for row, _ in rows for r, _ in row]
    values = [v for row, _ in rows for _, v in row]
    found = gae(rewards, values, [final for _, final in rows], gamma, lam, [len(row) for row, _ in rows])
    expected = [
        a for row, final in rows if row for a in reference.gae(*map(list, zip(*row, strict=True)), final, gamma, lam)
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


@few
@given(st.lists(st.tuples(numbers, st.booleans()), min_size=1, max_size=12))
def test_compressing_loses_no_reward(places: list[tuple[float, bool]]) -> None:
    rewards, mask = [list(column) for column in zip(*places, strict=True)]
    if not any(mask):
        if any(rewards):
            with pytest.raises(ValueError, match="without a sampled token"):
                compress(rewards, mask)
        return
    sampled = [i for i, chosen in enumerate(mask) if chosen]
    expected = [0.0] * len(sampled)
    for i, reward in enumerate(rewards):
        expected[max(0, sum(place <= i for place in sampled) - 1)] += reward
    np.testing.assert_allclose(compress(rewards, mask), expected, atol=1e-9)


@few
@given(st.lists(st.tuples(numbers, numbers, numbers, st.booleans()), min_size=1, max_size=12), shares, shares)
def test_values_at_masked_places_play_no_part(
    places: list[tuple[float, float, float, bool]], gamma: float, lam: float
) -> None:
    rewards, values, others, mask = [list(column) for column in zip(*places, strict=True)]
    if not any(mask):
        return
    changed = [value if chosen else 1000 + other for value, other, chosen in zip(values, others, mask, strict=True)]
    one, two = (masked_gae(rewards, v, mask, 0.5, gamma, lam) for v in (values, changed))
    assert np.array_equal(one, two)
    assert not one[~np.array(mask)].any()
    kept = [value for value, chosen in zip(values, mask, strict=True) if chosen]
    np.testing.assert_allclose(
        one[np.array(mask)], reference.gae(list(compress(rewards, mask)), kept, 0.5, gamma, lam), rtol=1e-9, atol=1e-9
    )
    # With a critic that knows nothing and lambda 1, the advantage is the return-to-go.
    np.testing.assert_allclose(
        masked_gae(rewards, [0.0] * len(mask), mask, 0.0, gamma, 1.0), masked_returns(rewards, mask, gamma), atol=1e-9
    )


@few
@given(st.lists(numbers, max_size=20))
def test_whitening(values: list[float]) -> None:
    white = whitened(np.array(values))
    np.testing.assert_allclose(white, reference.whiten(values), rtol=1e-6, atol=1e-6)
    if len(values) > 1 and white.any():
        assert abs(white.mean()) < 1e-6 and white.std() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("value", [0.1, 1e9, -3.3])
def test_whitening_of_equal_values_is_exactly_zero(value: float) -> None:
    assert not whitened(np.full(1001, value)).any()
    assert whitened(np.array([value])).tolist() == [value]
    assert whitened(np.zeros(0)).tolist() == []


def test_whitening_survives_a_large_common_offset() -> None:
    """E[x^2] - E[x]^2 would be 0 or negative here."""
    assert whitened(np.array([1e9, 1e9 + 4000.0])).tolist() == [-1, 1]


@pytest.mark.parametrize("name", list(ESTIMATORS))
def test_an_empty_batch(name: str) -> None:
    found = credit(ESTIMATORS[name](), [], Evidence(values=[], final=[], greedy=[], teacher=[], penalties=[]))
    assert found.advantages == []
