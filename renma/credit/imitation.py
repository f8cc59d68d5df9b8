"""Imitation: advantage 1 on what is to be repeated, 0 on the rest (rejection fine-tuning, supervised learning)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from renma.credit.base import Evidence, TrajectoryEstimator, Values, returns_in
from renma.credit.checks import finite
from renma.errors import RecipeError
from renma.types import Group

ROUNDING = 1e-9  # a return this far (relatively) below the threshold is the threshold: 0.7 + 0.2 + 0.1 is 1


@dataclass(frozen=True, slots=True)
class Best(TrajectoryEstimator):
    """1 where the return reaches the threshold, else 0; at most `per_group` of a group, those of the highest return."""

    name: str = "best"
    threshold: float = 1.0
    per_group: int | None = None

    def values(self, groups: Sequence[Group], evidence: Evidence) -> list[Values]:
        return [self._group(returns) for returns in returns_in(groups, evidence)]

    def _group(self, returns: Values) -> Values:
        kept = returns >= self.threshold - ROUNDING * max(1.0, abs(self.threshold))
        if self.per_group is not None:
            order = np.argsort(-returns, kind="stable")
            kept[order[self.per_group :]] = False
        return kept.astype(np.float64)


@dataclass(frozen=True, slots=True)
class Ones(TrajectoryEstimator):
    """1 everywhere."""

    name: str = "ones"

    def values(self, groups: Sequence[Group], evidence: Evidence) -> list[Values]:
        return [np.ones(len(group.trainable)) for group in groups]


def best(threshold: float = 1.0, per_group: int | None = None) -> Best:
    """Rejection fine-tuning: 1 on trajectories whose return is at least `threshold`, 0 on the others.

    per_group keeps at most so many of each group, those of the highest return, the first of equals, so that easy
    tasks do not crowd out hard ones (Yuan et al. 2023, RFT; Zelikman et al. 2022, STaR).
    """
    finite("best", threshold=threshold)
    if per_group is not None and per_group < 1:
        raise RecipeError(f"advantage best: per_group must be at least 1, or left out to keep all; got {per_group}")
    return Best(threshold=threshold, per_group=per_group)


def ones() -> Ones:
    """1 on every sampled token: with -A log pi, supervised learning of the given actions, whatever their reward."""
    return Ones()
