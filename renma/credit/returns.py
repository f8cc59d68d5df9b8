"""REINFORCE and its baselines that need no group: the return itself is the advantage.

| name | advantage | source |
|---|---|---|
| reinforce | R, or R - mean over the batch, or over the batches before | Williams 1992 |
| remax | R - R(greedy trajectory of the same task) | Li et al. 2024 (ReMax, arXiv 2310.10505), equation 5 |
| reinforce_pp | returns-to-go of the tokens, whitened over all | Hu 2025 (REINFORCE++, arXiv 2501.03262) |

The running mean is the one estimator with a memory: it is part of a checkpoint (`state_dict`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from renma.credit.base import Evidence, Need, TrajectoryEstimator, Values, moments, returns_in
from renma.credit.checks import discount
from renma.credit.group_relative import standardised
from renma.credit.layout import FlatCredit, Layout, TokenEstimator
from renma.credit.recursions import discounted
from renma.credit.whitening import large_moments, whitened
from renma.errors import RecipeError, RunError
from renma.types import Group


@dataclass(frozen=True, slots=True)
class Return(TrajectoryEstimator):
    """A = R, or R - mean over all trainable trajectories of the batch (exactly 0 where the whole batch is uniform)."""

    name: str = "reinforce"
    baseline: Literal["none", "batch_mean"] = "none"

    def values(self, groups: Sequence[Group], evidence: Evidence) -> list[Values]:
        returns = returns_in(groups, evidence)
        if self.baseline == "none" or not returns:
            return returns
        batch = moments(np.concatenate(returns))
        if batch.uniform:
            return [np.zeros_like(values) for values in returns]
        return [values - batch.mean for values in returns]


@dataclass(frozen=True, slots=True)
class OverRunningMean(TrajectoryEstimator):
    """R minus an exponential mean of the returns of earlier batches, which hold no action of this one: unbiased.

    mean <- decay * mean + (1 - decay) * the batch's mean, after the batch is credited; the first batch has nothing
    before it, so its own mean is taken off, and begins the memory. `memory` holds the mean once there is one.
    """

    name: str = "reinforce"
    decay: float = 0.9
    memory: list[float] = field(default_factory=list)

    def values(self, groups: Sequence[Group], evidence: Evidence) -> list[Values]:
        returns = returns_in(groups, evidence)
        if not returns:
            return returns
        batch = moments(np.concatenate(returns)).mean
        before = self.memory[0] if self.memory else batch
        self.memory[:] = [self.decay * before + (1 - self.decay) * batch]
        return [values - before for values in returns]

    def state_dict(self) -> dict[str, Any]:
        return {"memory": torch.tensor(self.memory, dtype=torch.float64)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.memory[:] = [float(value) for value in state["memory"]]


@dataclass(frozen=True, slots=True)
class OverGreedy(TrajectoryEstimator):
    """R minus the return of a greedy trajectory of the same task (`Evidence.greedy`)."""

    name: str = "remax"
    needs: tuple[Need, ...] = ("greedy",)

    def values(self, groups: Sequence[Group], evidence: Evidence) -> list[Values]:
        if evidence.greedy is None:
            raise RunError("advantage estimator remax: no greedy returns were given; roll out one greedily per task")
        returns = returns_in(groups, evidence)
        for group, greedy in zip(groups, evidence.greedy, strict=True):
            if not np.isfinite(greedy):
                raise RunError(f"advantage estimator remax: task {group.task.id!r} has the greedy return {greedy}")
        return [own - greedy for own, greedy in zip(returns, evidence.greedy, strict=True)]


@dataclass(frozen=True, slots=True)
class WhitenedReturns(TokenEstimator):
    """Token returns, or the trajectory's return minus its group's mean, whitened over all sampled tokens."""

    name: str = "reinforce_pp"
    gamma: float = 1.0
    baseline: Literal["none", "group_mean"] = "none"

    def flat(self, layout: Layout, evidence: Evidence) -> FlatCredit:
        if self.baseline == "none":
            values = discounted(layout.token_rewards, self.gamma, layout.lengths)
        else:
            groups = [standardised(own, std=False) for own in returns_in(layout.groups, evidence)]
            values = np.repeat(np.concatenate(groups) if groups else np.zeros(0), layout.lengths)
        spread = {"advantage_std": large_moments(values).std} if len(values) else {}
        return FlatCredit(whitened(values), metrics=spread)


def reinforce(
    baseline: Literal["none", "batch_mean", "running_mean"] = "none", decay: float = 0.9
) -> Return | OverRunningMean:
    """The plain return; `batch_mean` takes the mean over the batch's trajectories off it, `running_mean` that of the
    batches before, whose share shrinks by `decay` with each.

    The batch's mean contains the trajectory itself, which shrinks its advantage by 1 part in the number of
    trajectories; the running mean does not.
    """
    if baseline == "running_mean":
        if not 0 <= decay < 1:
            raise RecipeError(f"advantage reinforce: decay must be at least 0 and below 1; got {decay}")
        return OverRunningMean(decay=decay)
    return Return(baseline=baseline)


def remax() -> OverGreedy:
    """The return minus that of a greedy trajectory of the same task; its penalties, if any, are not the greedy's."""
    return OverGreedy()


def reinforce_pp(gamma: float = 1.0, baseline: Literal["none", "group_mean"] = "none") -> WhitenedReturns:
    """REINFORCE++: returns-to-go of the sampled tokens, whitened over the batch; `group_mean` takes the group's off.

    gamma discounts per sampled token, never over observations. With `group_mean` every token of a trajectory has its
    undiscounted return minus the group's mean, so gamma must stay 1 and a group needs two members.
    """
    discount("reinforce_pp", gamma=gamma)
    if baseline == "none":
        return WhitenedReturns(gamma=gamma)
    if gamma != 1:
        raise RecipeError("advantage reinforce_pp: baseline group_mean compares whole returns; leave gamma at 1")
    return WhitenedReturns(min_group_size=2, baseline=baseline)
