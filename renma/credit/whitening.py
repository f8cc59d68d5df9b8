"""Putting numbers on one scale: mean 0 and std 1, over a batch or over each family of tasks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from renma.credit.base import Moments, PerToken, Values
from renma.types import Group


def whitened(values: Values) -> Values:
    """[n] -> (values - mean) / std, in float64, std = sqrt(mean of squared deviations) (ddof 0).

    Fewer than two are left as they are; values that do not differ (see `Moments.uniform`) become exactly 0.
    """
    if len(values) < 2:
        return values
    own = large_moments(values)
    if own.uniform:
        return np.zeros_like(values)
    return (values - own.mean) / own.std


def large_moments(values: Values) -> Moments:
    """The moments of [n] values, n >= 1, for the many tokens of a batch: pairwise sums, where `moments` is exact."""
    wide = np.asarray(values, dtype=np.float64)
    mean = float(wide.mean())
    deviations = wide - mean
    return Moments(mean, float(np.sqrt(np.mean(deviations * deviations))))


def task_normalised(per_token: PerToken, groups: Sequence[Group]) -> PerToken:
    """After any estimator: advantages whitened over all sampled tokens of each task family in the batch.

    (A - mean_i) / std_i for family i, so that an easy family does not drown a hard one (Zhang et al. 2025, AgentRL,
    section 3.2.2). Takes and gives `Credit.advantages` for the same groups.
    """
    families: dict[str, list[int]] = {}
    for number, group in enumerate(groups):
        families.setdefault(group.task.family, []).append(number)
    normalised: PerToken = [[] for _ in groups]
    for numbers in families.values():
        arrays = [array for number in numbers for array in per_token[number]]
        if not arrays:
            continue
        flat = whitened(np.concatenate(arrays).astype(np.float64)).astype(np.float32)
        parts = iter(np.split(flat, np.cumsum([len(array) for array in arrays])[:-1]))
        for number in numbers:
            normalised[number] = [next(parts) for _ in per_token[number]]
    return normalised
