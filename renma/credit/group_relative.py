"""Estimators that compare a trajectory with the others of its task.

| name | advantage of member i of n | source |
|---|---|---|
| grpo | (R_i - mean) / (std + 1e-6) | Shao et al. 2024 (DeepSeekMath), section 4.1.2 |
| dr_grpo | R_i - mean | Liu et al. 2025 (Understanding R1-Zero-like training), section 3.2 |
| rloo | R_i - mean of the others = n/(n-1) (R_i - mean) | Kool et al. 2019; Ahmadian et al. 2024, equation 8 |
| per_component | sum over components c of w_c (R_ic - mean_c) / (std_c + 1e-6) | Liu et al. 2026 (GDPO) |

GDPO's second pass, over the whole batch, is left out: it would weigh groups by each other.
Std is sqrt(mean of squared deviations), ddof 0, except that of the others in `rloo(normalise=True)` (ddof 1).
A group whose members do not differ (see `Moments.uniform`) has advantage exactly 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from renma.credit.base import (
    Evidence,
    Moments,
    TrajectoryEstimator,
    Values,
    components_of,
    moments,
    returns_in,
)
from renma.types import Group

EPSILON = 1e-6
LEAST_SPREAD_OF_OTHERS = 0.01  # of the group's std; dividing by less would blow one member up (by 1e6 at worst)


@dataclass(frozen=True, slots=True)
class GroupRelative(TrajectoryEstimator):
    """R - mean of the group, divided by the group's std when `std`."""

    name: str = "grpo"
    min_group_size: int = 2
    std: bool = True

    def values(self, groups: Sequence[Group], evidence: Evidence) -> list[Values]:
        return [standardised(returns, self.std) for returns in returns_in(groups, evidence)]


@dataclass(frozen=True, slots=True)
class LeaveOneOut(TrajectoryEstimator):
    """R minus the mean of the other members; divided by the others' std when `normalise`.

    The others' std (ddof 1) is skipped, and the difference left as it is, where it counts as zero, where it is under
    1% of the group's own std (an outlier among near-equals), or where there is only one other member.
    """

    name: str = "rloo"
    min_group_size: int = 2
    normalise: bool = False

    def values(self, groups: Sequence[Group], evidence: Evidence) -> list[Values]:
        return [self._group(returns) for returns in returns_in(groups, evidence)]

    def _group(self, returns: Values) -> Values:
        own = moments(returns)
        if own.uniform:
            return np.zeros_like(returns)
        n = len(returns)
        advantages = (returns - own.mean) * (n / (n - 1))
        if not self.normalise or n < 3:
            return advantages
        scales = [self._scale(np.delete(returns, i), own) for i in range(n)]
        return advantages / np.array(scales)

    @staticmethod
    def _scale(others: Values, own: Moments) -> float:
        theirs = moments(others)
        if theirs.uniform or theirs.std < LEAST_SPREAD_OF_OTHERS * own.std:
            return 1.0
        return theirs.std * math.sqrt(len(others) / (len(others) - 1))


@dataclass(frozen=True, slots=True)
class PerComponent(TrajectoryEstimator):
    """Each reward component standardised in its group, then summed with weights: mixes of equal sum stay apart.

    A component that a member lacks (the reward abstained) is 0 for that member's sum and enters no statistic; a
    component that fewer than two members have is left out. Penalties (`Evidence.penalties`) are compared at their own
    scale, group mean off: dividing by their std would undo the coefficient they came with.
    """

    name: str = "per_component"
    min_group_size: int = 2
    weights: Mapping[str, float] = field(default_factory=dict)
    std: bool = True

    def values(self, groups: Sequence[Group], evidence: Evidence) -> list[Values]:
        totals = [self._group(components_of(group), len(group.trainable)) for group in groups]
        if evidence.penalties is None:
            return totals
        sums = [np.array([each.sum(dtype=np.float64) for each in group]) for group in evidence.penalties]
        return [total + standardised(own, std=False) for total, own in zip(totals, sums, strict=True)]

    def _group(self, columns: Mapping[str, Values], size: int) -> Values:
        total = np.zeros(size)
        for name, column in columns.items():
            present = ~np.isnan(column)
            if present.sum() >= 2:
                total[present] += self.weights.get(name, 1.0) * standardised(column[present], self.std)
        return total


def standardised(values: Values, std: bool) -> Values:
    """[n] values minus their mean, divided by (their std + 1e-6) when `std`; exactly 0 when they do not differ."""
    own = moments(values)
    if own.uniform:
        return np.zeros_like(values)
    return (values - own.mean) / (own.std + EPSILON) if std else values - own.mean


def grpo(std: bool = True) -> GroupRelative:
    """Group-relative advantages; `std` False leaves the group's scale in place (as dr_grpo)."""
    return GroupRelative(std=std)


def dr_grpo() -> GroupRelative:
    """Group-relative advantages without the division that favours tasks of nearly equal outcomes."""
    return GroupRelative(name="dr_grpo", std=False)


def rloo(normalise: bool = False) -> LeaveOneOut:
    """Leave-one-out: the other members are an unbiased baseline."""
    return LeaveOneOut(normalise=normalise)


def per_component(weights: dict[str, float] | None = None, std: bool = True) -> PerComponent:
    """Components of the reward compared one by one. `weights` by component name; those not named weigh 1."""
    return PerComponent(weights=dict(weights or {}), std=std)
