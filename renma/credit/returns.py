"""REINFORCE: the return itself is the advantage (Williams 1992), optionally minus the batch's mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from renma.credit.base import TrajectoryEstimator, Values, moments, returns_of
from renma.types import Group


@dataclass(frozen=True, slots=True)
class Return(TrajectoryEstimator):
    """A = R, or R - mean over all trainable trajectories of the batch (exactly 0 where the whole batch is uniform)."""

    name: str = "reinforce"
    baseline: Literal["none", "batch_mean"] = "none"

    def values(self, groups: Sequence[Group]) -> list[Values]:
        returns = [returns_of(group) for group in groups]
        if self.baseline == "none" or not returns:
            return returns
        batch = moments(np.concatenate(returns))
        if batch.uniform:
            return [np.zeros_like(values) for values in returns]
        return [values - batch.mean for values in returns]


def reinforce(baseline: Literal["none", "batch_mean"] = "none") -> Return:
    """The plain return; `batch_mean` takes the mean over the batch's trajectories off it.

    The mean contains the trajectory itself, which shrinks its advantage by 1 part in the number of trajectories.
    """
    return Return(baseline=baseline)
