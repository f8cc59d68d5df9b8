"""Metrics, intervals and tests against brute force and known values."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from renma.evaluation.statistics import (
    Estimate,
    avg_at_n,
    bootstrap_interval,
    difference_interval,
    estimate_mean,
    estimate_proportion,
    maj_at_n,
    mcnemar,
    pass_at_k,
    pass_hat_k,
    sign_flip,
    wilson_interval,
)

few = settings(max_examples=30, deadline=None)


@st.composite
def counts(draw):
    n = draw(st.integers(1, 8))
    return draw(st.integers(0, n)), n, draw(st.integers(1, n))


@few
@given(counts())
def test_pass_metrics_count_the_subsets(case):
    c, n, k = case
    outcomes = [True] * c + [False] * (n - c)
    subsets = list(itertools.combinations(outcomes, k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    assert pass_hat_k(n, c, k) == pytest.approx(sum(map(all, subsets)) / len(subsets))


def test_pass_metrics_known_values():
    assert [pass_at_k(4, c, 2) for c in range(4)] == [0.0, 0.5, pytest.approx(5 / 6), 1.0]
    assert [pass_hat_k(4, c, 2) for c in (1, 2, 4)] == [0.0, pytest.approx(1 / 6), 1.0]
    assert pass_at_k(10_000, 5000, 1) == 0.5  # no overflow


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 5, 1), (4, -1, 1), (4, 1, 0)])
def test_pass_metrics_refuse_what_has_no_meaning(n, c, k):
    for metric in (pass_at_k, pass_hat_k):
        with pytest.raises(ValueError, match=f"{c} successes of {n} attempts do not allow k={k}"):
            metric(n, c, k)


def test_averages():
    assert avg_at_n([[1, 0, 0, 1], [0.5]]).tolist() == [0.5, 0.5]
    with pytest.raises(ValueError, match="without attempts"):
        avg_at_n([[1], []])


@pytest.mark.parametrize(
    ("answers", "correct", "expected"),
    [
        ("aab", (1, 1, 0), 1.0),
        ("abb", (1, 0, 0), 0.0),
        ("ab", (1, 0), 0.5),
        ("abc", (0, 0, 0), 0.0),
        (["a", None, None], (1, 0, 0), 1.0),
        ([None, None], (0, 0), 0.0),
        ("aabbc", (1, 1, 0, 0, 1), 0.5),
    ],
)
def test_majority(answers, correct, expected):
    assert maj_at_n([list(answers)], [[bool(c) for c in correct]])[0] == expected


def test_majority_needs_a_judgement_per_attempt():
    with pytest.raises(ValueError, match="2 answers, 1 judgements"):
        maj_at_n([["a", "b"]], [[True]])


def test_wilson_known_values():
    assert wilson_interval(24, 100) == pytest.approx((0.1669, 0.3323), abs=1e-4)
    assert wilson_interval(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson_interval(10, 10)[1] == 1.0
    with pytest.raises(ValueError, match="no proportion"):
        wilson_interval(0, 0)
    with pytest.raises(ValueError, match="level"):
        wilson_interval(1, 2, level=95)


@few
@given(st.integers(1, 400), st.data(), st.floats(0.5, 0.999))
def test_wilson_is_where_the_score_test_turns(n, data, level):
    c = data.draw(st.integers(0, n))
    low, high = wilson_interval(c, n, level)
    assert 0 <= low <= c / n <= high <= 1
    assert wilson_interval(n - c, n, level) == pytest.approx((1 - high, 1 - low))
    if 0 < c < n:  # at either end, |share - p| / sqrt(p(1-p)/n) is the normal quantile
        scores = [abs(c / n - p) / math.sqrt(p * (1 - p) / n) for p in (low, high)]
        assert scores[0] == pytest.approx(scores[1])


def test_bootstrap_matches_every_resample_of_a_small_set():
    values = [0.0, 0.2, 0.9, 1.0]
    means = [np.mean(pick) for pick in itertools.product(values, repeat=4)]
    low, high = bootstrap_interval(values, level=0.8, draws=40_000)
    assert (low, high) == pytest.approx(tuple(np.quantile(means, [0.1, 0.9])), abs=0.03)


def test_bootstrap_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(3)
    hits = 0
    for trial in range(200):
        low, high = bootstrap_interval(rng.random(60), level=0.9, draws=400, seed=trial)
        hits += low <= 0.5 <= high
    assert 165 <= hits <= 195


def test_bootstrap_is_seeded_whatever_the_chunks(monkeypatch):
    values = np.random.default_rng(0).random(50)
    whole = bootstrap_interval(values, draws=1000, seed=5)
    assert bootstrap_interval(values, draws=1000, seed=5) == whole
    assert bootstrap_interval(values, draws=1000, seed=6) != whole
    monkeypatch.setattr("renma.evaluation.statistics.CHUNK", 500)
    assert bootstrap_interval(values, draws=1000, seed=5) == whole


@pytest.mark.parametrize("values", [[], [0.5, math.nan], [[0.5]]])
def test_bootstrap_needs_a_number_per_task(values):
    with pytest.raises(ValueError, match="one finite number for each task"):
        bootstrap_interval(values)


def test_estimates():
    assert estimate_proportion(24, 100).value == 0.24
    made = estimate_mean([0.0, 1.0, 1.0, 1.0], draws=500)
    assert made.value == 0.75 and made.n == 4 and made.low < 0.75 < made.high


def test_difference_interval_is_newcombes():
    """56/70 against 48/80: Newcombe's own example, 0.0524 to 0.3339."""
    a, b = estimate_proportion(56, 70), estimate_proportion(48, 80)
    assert difference_interval(b, a) == pytest.approx((0.0524, 0.3339), abs=1e-4)
    exact = Estimate(0.4, 0.4, 0.4, 9)
    assert difference_interval(exact, exact) == (0.0, 0.0)


def test_mcnemar_known_value():
    """1 worse, 9 better: 2 * (C(10,0) + C(10,1)) / 2^10."""
    before = [True] + [False] * 9 + [True] * 5
    after = [False] + [True] * 9 + [True] * 5
    test = mcnemar(before, after)
    assert (test.better, test.worse, test.n) == (9, 1, 15)
    assert test.p_value == pytest.approx(22 / 1024)
    assert test.difference == pytest.approx(8 / 15)
    assert mcnemar([True], [True]).p_value == 1.0
    assert mcnemar([True, False], [False, True]).p_value == 1.0


@few
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=12))
def test_sign_flip_of_successes_is_mcnemar(pairs):
    before, after = [b for b, _ in pairs], [a for _, a in pairs]
    exact, flipped = mcnemar(before, after), sign_flip(before, after)
    assert flipped.p_value == pytest.approx(exact.p_value)
    assert (flipped.better, flipped.worse, flipped.n) == (exact.better, exact.worse, exact.n)
    assert flipped.difference == pytest.approx(exact.difference)


@few
@given(st.lists(st.integers(-5, 5), min_size=1, max_size=8))
def test_sign_flip_tries_every_pattern(differences):
    patterns = itertools.product([1, -1], repeat=len(differences))
    sums = [abs(sum(s * d for s, d in zip(signs, differences, strict=True))) for signs in patterns]
    expected = np.mean([total >= abs(sum(differences)) for total in sums])
    test = sign_flip(np.zeros(len(differences)), [float(d) for d in differences])
    assert test.p_value == pytest.approx(expected)


def test_sampled_sign_flip_agrees_with_mcnemar_on_many_tasks():
    rng = np.random.default_rng(1)
    before, after = rng.random(200) < 0.4, rng.random(200) < 0.52
    sampled = sign_flip(before, after)
    assert sampled.method == "sign_flip_sampled"
    assert sampled.p_value == pytest.approx(mcnemar(list(before), list(after)).p_value, abs=0.02)
    assert sampled == sign_flip(before, after)


def test_sign_flip_refuses_unequal_sets():
    with pytest.raises(ValueError, match="2 tasks before, 1 after"):
        sign_flip([0.0, 1.0], [1.0])
