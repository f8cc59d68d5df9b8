"""Drawing: the distribution, the recorded log-probability, the filters, the seeds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from renma.errors import ModelError
from renma.inference.local.sampler import Drawing, draw, uniforms


def drawing(uniform: Any, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Drawing:
    n = len(uniform)
    return Drawing(
        np.full(n, 1.0 / temperature if temperature else 1.0, np.float32),
        np.full(n, temperature == 0),
        np.full(n, top_k),
        np.full(n, top_p),
        np.full(n, min_p),
        np.asarray(uniform, np.float64),
    )


GRID = (np.arange(4000) + 0.5) / 4000


def shares(logits: list[float], **how: Any) -> np.ndarray[Any, Any]:
    """What share of evenly spaced uniform numbers each entry gets: the distribution drawn from."""
    chosen, _ = draw(torch.tensor([logits] * len(GRID)), drawing(GRID, **how))
    return np.bincount(chosen, minlength=len(logits)) / len(GRID)


def test_case_6_1_logprob_is_of_logits_over_temperature() -> None:
    chosen, logprobs = draw(torch.tensor([[2.0, 1.0, 0.0]]), drawing([0.1], temperature=0.6))
    assert chosen.tolist() == [0]
    assert logprobs[0] == pytest.approx(-0.2026, abs=1e-4)


@given(st.integers(1, 1300), st.integers(0, 2**32), st.sampled_from([0.3, 1.0, 1.7]))
def test_one_uniform_inverts_the_cumulative_distribution(width: int, seed: int, temperature: float) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(0, 3, (5, width)).astype(np.float32))
    uniform = rng.random(5)
    exact = (logits.double() / temperature).softmax(-1)
    chosen, logprobs = draw(logits.clone(), drawing(uniform, temperature))
    upper = exact.cumsum(-1)[range(5), chosen].numpy()
    lower = upper - exact[range(5), chosen].numpy()
    assert ((lower - 1e-5 <= uniform) & (uniform <= upper + 1e-5)).all()
    np.testing.assert_allclose(logprobs, exact[range(5), chosen].log(), atol=1e-5)


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2.0**-52])
def test_an_impossible_entry_is_never_drawn(uniform: float) -> None:
    logits = torch.full((1, 1100), -float("inf"))
    logits[0, [600, 601]] = 0.0
    chosen, logprobs = draw(logits, drawing([uniform]))
    assert chosen[0] == (600 if uniform == 0.0 else 601)
    assert logprobs[0] == pytest.approx(np.log(0.5))


def test_filters_cut_the_set_and_leave_the_recorded_logprob() -> None:
    probabilities = [0.4, 0.3, 0.2, 0.1]
    logits = np.log(probabilities).tolist()
    np.testing.assert_allclose(shares(logits), probabilities, atol=1e-3)
    np.testing.assert_allclose(shares(logits, top_k=2), [4 / 7, 3 / 7, 0, 0], atol=1e-3)
    np.testing.assert_allclose(shares(logits, top_p=0.65), [4 / 7, 3 / 7, 0, 0], atol=1e-3)
    np.testing.assert_allclose(shares(logits, top_p=1e-9), [1, 0, 0, 0], atol=1e-3)
    np.testing.assert_allclose(shares(logits, min_p=0.45), [4 / 9, 3 / 9, 2 / 9, 0], atol=1e-3)
    # top_p speaks of what top_k left: 4/7 < 0.6, so both stay.
    np.testing.assert_allclose(shares(logits, top_k=2, top_p=0.6), [4 / 7, 3 / 7, 0, 0], atol=1e-3)
    _, logprobs = draw(torch.tensor([logits]), drawing([0.99], top_k=2))
    assert logprobs[0] == pytest.approx(np.log(0.3), abs=1e-5)


def test_rows_of_one_batch_have_their_own_parameters() -> None:
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]])).repeat(4, 1)
    how = Drawing(
        np.array([1.0, 1.0, 1.0, 2.0], np.float32),
        np.array([True, False, False, False]),
        np.array([0, 1, 0, 0]),
        np.array([1.0, 1.0, 0.5, 1.0]),
        np.zeros(4),
        np.full(4, 0.95),
    )
    chosen, logprobs = draw(logits, how)
    assert chosen.tolist() == [0, 0, 1, 2]
    assert logprobs[3] == pytest.approx(np.log(0.04 / 0.30), abs=1e-5)


def test_logits_that_are_not_finite_are_an_error() -> None:
    with pytest.raises(ModelError, match="not finite"):
        draw(torch.tensor([[0.0, float("nan")]]), drawing([0.5]))


def test_case_7_9_uniforms_depend_on_seed_and_step_only_and_are_flat() -> None:
    seeds, steps = np.arange(2000, dtype=np.uint64) % 20, np.arange(2000) // 20
    values = uniforms(seeds, steps)
    assert np.array_equal(values[::-1], uniforms(seeds[::-1], steps[::-1]))
    assert len(set(values.tolist())) == 2000
    assert values.min() >= 0 and values.max() < 1
    counts = np.bincount((values * 10).astype(int))
    assert abs(counts - 200).max() < 60  # 4.5 standard deviations
    table = values.reshape(100, 20)
    assert abs(np.corrcoef(table[1:].ravel(), table[:-1].ravel())[0, 1]) < 0.1
    assert abs(np.corrcoef(table[:, 1:].ravel(), table[:, :-1].ravel())[0, 1]) < 0.1
