"""Statistics of an evaluation: metrics of a policy, their intervals, and tests between two checkpoints.

Tasks are the unit. A metric is one value for a task (`pass_at_k`, ...), and its mean over tasks is what is reported,
so that `bootstrap_interval` of the values is the metric's interval. A single attempt per task is a plain proportion:
`wilson_interval`, which stays honest at 0% and 100%, where a bootstrap shrinks to a point.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Values = NDArray[np.float64]

ENUMERATED = 14  # up to this many differing tasks all 2^n sign patterns are tried
CHUNK = 1 << 20  # numbers held at once by a resampling


class Interval(NamedTuple):
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over n tasks, with the interval around it."""

    value: float
    low: float
    high: float
    n: int


@dataclass(frozen=True, slots=True)
class PairedTest:
    """after - before on the same n tasks: mean difference, tasks better and worse, two-sided p-value."""

    difference: float
    better: int
    worse: int
    n: int
    p_value: float
    method: Literal["mcnemar", "sign_flip_exact", "sign_flip_sampled"]


# -- metrics of a task ---------------------------------------------------------------------------------------


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that at least one of k attempts succeeds, unbiased: 1 - C(n-c, k) / C(n, k).

    c of one task's n attempts succeeded. Source: Chen et al. 2021 (Codex), equation 1. Raises ValueError unless
    0 <= c <= n and 1 <= k <= n.
    """
    _check_counts(n, c, k)
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def pass_hat_k(n: int, c: int, k: int) -> float:
    """pass^k, the chance that all of k attempts succeed, unbiased: C(c, k) / C(n, k).

    Source: Yao et al. 2024 (tau-bench), section 3. Raises as `pass_at_k`.
    """
    _check_counts(n, c, k)
    return math.comb(c, k) / math.comb(n, k)


def avg_at_n(scores: Sequence[Sequence[float]]) -> Values:
    """[tasks] the mean score of each task's attempts; rows may differ in length, none may be empty."""
    if any(len(row) == 0 for row in scores):
        raise ValueError("a task without attempts has no average; leave it out")
    return np.array([math.fsum(row) / len(row) for row in scores])


def maj_at_n(answers: Sequence[Sequence[Hashable | None]], correct: Sequence[Sequence[bool]]) -> Values:
    """[tasks] 1 where the commonest answer of the attempts is correct (self-consistency, Wang et al. 2023).

    None is an attempt without an answer: it does not vote, and a task without votes scores 0. Among t answers with the
    most votes each is chosen with chance 1/t. `correct` says of each attempt whether its answer is right.
    """
    return np.array([_majority(row, right) for row, right in zip(answers, correct, strict=True)])


def _majority(answers: Sequence[Hashable | None], correct: Sequence[bool]) -> float:
    if len(answers) != len(correct):
        raise ValueError(f"{len(answers)} answers, {len(correct)} judgements: one is needed for each attempt")
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = {answer for answer, count in votes.items() if count == most}
    right = sum(ok for answer, ok in zip(answers, correct, strict=True) if answer in winners)
    return right / (most * len(winners))


def _check_counts(n: int, c: int, k: int) -> None:
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"{c} successes of {n} attempts do not allow k={k}; need 0 <= c <= n and 1 <= k <= n")


# -- intervals ---------------------------------------------------------------------------------------------------------


def wilson_interval(successes: int, n: int, level: float = 0.95) -> Interval:
    """The score interval of a proportion, in [0, 1]. Source: Wilson 1927.

    Raises ValueError unless 0 <= successes <= n and n > 0.
    """
    if not (n > 0 and 0 <= successes <= n):
        raise ValueError(f"{successes} successes of {n} is no proportion")
    z = _quantile(level)
    share = successes / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return Interval(0.0 if successes == 0 else centre - half, 1.0 if successes == n else centre + half)


def bootstrap_interval(values: ArrayLike, level: float = 0.95, draws: int = 10_000, seed: int = 0) -> Interval:
    """Percentile bootstrap of the mean over tasks: whole tasks are drawn again, with their attempts together.

    values: [tasks], one number each. The same seed gives the same interval. Source: Efron & Tibshirani 1993, ch. 13.
    """
    tasks = _values(values)
    rng = np.random.default_rng(seed)
    means = np.empty(draws)
    rows = max(1, CHUNK // len(tasks))
    for start in range(0, draws, rows):
        count = min(rows, draws - start)
        means[start : start + count] = tasks[rng.integers(0, len(tasks), (count, len(tasks)))].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high))


def estimate_proportion(successes: int, n: int, level: float = 0.95) -> Estimate:
    """A share with its Wilson interval: one attempt for each of n tasks."""
    low, high = wilson_interval(successes, n, level)
    return Estimate(successes / n, low, high, n)


def estimate_mean(values: ArrayLike, level: float = 0.95, draws: int = 10_000, seed: int = 0) -> Estimate:
    """The mean of per-task values with its bootstrap interval."""
    tasks = _values(values)
    low, high = bootstrap_interval(tasks, level, draws, seed)
    return Estimate(float(tasks.mean()), low, high, len(tasks))


def difference_interval(before: Estimate, after: Estimate) -> Interval:
    """The interval of after - before from the two intervals alone, as if their tasks were not the same ones.

    Source: Newcombe 1998, method 10 (for any two intervals: Zou & Donner 2008). On the same tasks it is usually wider
    than need be; with the values of each task at hand use a paired test.
    """
    difference = after.value - before.value
    down = math.hypot(after.value - after.low, before.high - before.value)
    up = math.hypot(after.high - after.value, before.value - before.low)
    return Interval(difference - down, difference + up)


def _quantile(level: float) -> float:
    if not 0 < level < 1:
        raise ValueError(f"level {level} must be between 0 and 1, as 0.95")
    return NormalDist().inv_cdf((1 + level) / 2)


def _values(values: ArrayLike) -> Values:
    tasks = np.asarray(values, dtype=np.float64)
    if tasks.ndim != 1 or not len(tasks) or not np.isfinite(tasks).all():
        raise ValueError(f"one finite number for each task is needed, got an array of shape {tasks.shape}")
    return tasks


# -- tests between two checkpoints -------------------------------------------------------------------------------------


def mcnemar(before: Sequence[bool], after: Sequence[bool]) -> PairedTest:
    """Exact McNemar test: are the tasks that changed as likely to have got better as worse?

    Two-sided binomial p-value over the changed tasks; 1 when none changed. Source: McNemar 1947, exact form.
    """
    pairs = [(bool(b), bool(a)) for b, a in zip(before, after, strict=True)]
    if not pairs:
        raise ValueError("no tasks to compare")
    better, worse = pairs.count((False, True)), pairs.count((True, False))
    changed = better + worse
    tail = sum(math.comb(changed, i) for i in range(min(better, worse) + 1))
    return PairedTest(
        (better - worse) / len(pairs), better, worse, len(pairs), min(1.0, 2 * tail / 2**changed), "mcnemar"
    )


def sign_flip(before: ArrayLike, after: ArrayLike, draws: int = 20_000, seed: int = 0) -> PairedTest:
    """Paired permutation test of the mean difference of per-task values: under no effect each sign is a coin toss.

    Every pattern of signs is tried for up to 14 differing tasks; beyond, `draws` random ones, and the p-value is
    (1 + patterns at least as extreme) / (1 + draws). Source: Fisher 1935; Phipson & Smyth 2010 for the added one.
    """
    old, new = _values(before), _values(after)
    if len(old) != len(new):
        raise ValueError(f"{len(old)} tasks before, {len(new)} after: pair them task by task")
    all_differences = new - old
    differences = all_differences[all_differences != 0]
    observed = abs(differences.sum()) * (1 - 1e-12)  # equal sums in another order still count as equal
    if len(differences) <= ENUMERATED:
        patterns = np.arange(2 ** len(differences))[:, None] >> np.arange(len(differences)) & 1
        extreme = np.abs((1.0 - 2.0 * patterns) @ differences) >= observed
        p_value = float(extreme.mean())
    else:
        p_value = (1 + _sampled_extremes(differences, observed, draws, seed)) / (1 + draws)
    return PairedTest(
        float(all_differences.mean()),
        int((differences > 0).sum()),
        int((differences < 0).sum()),
        len(old),
        p_value,
        "sign_flip_exact" if len(differences) <= ENUMERATED else "sign_flip_sampled",
    )


def _sampled_extremes(differences: Values, observed: float, draws: int, seed: int) -> int:
    rng = np.random.default_rng(seed)
    rows = max(1, CHUNK // len(differences))
    extreme = 0
    for start in range(0, draws, rows):
        count = min(rows, draws - start)
        signs = 2.0 * rng.integers(0, 2, (count, len(differences))) - 1.0
        extreme += int((np.abs(signs @ differences) >= observed).sum())
    return extreme
