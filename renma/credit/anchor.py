"""GiGPO: besides the whole trajectories, single steps are compared where members of a group met in the same state.

Feng et al. 2025 (arXiv 2505.10978), section 4. The state is `Step.state_key`, read before the action.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from renma.credit.base import UNIFORM, Evidence, Values, returns_in
from renma.credit.checks import discount, finite
from renma.credit.group_relative import standardised
from renma.credit.layout import FlatCredit, Layout, TokenEstimator
from renma.credit.recursions import discounted


@dataclass(frozen=True, slots=True)
class AnchorGroups(TokenEstimator):
    """A_episode + omega A_step: the return against the group's, and a step's return-to-go against that of all steps of
    the group taken in an identical state. A step alone in its state, or without a key, has A_step = 0."""

    name: str = "gigpo"
    min_group_size: int = 2
    omega: float = 1.0
    gamma: float = 0.95
    std: bool = False

    def flat(self, layout: Layout, evidence: Evidence) -> FlatCredit:
        returns = returns_in(layout.groups, evidence)
        if not returns:
            return FlatCredit(np.zeros(0))
        episode = np.concatenate([standardised(own, self.std) for own in returns])
        to_go = discounted(layout.step_rewards, self.gamma, layout.steps_of)
        anchors = anchors_of(layout)
        advantages = layout.over_steps(episode) + self.omega * less_mean_of_equals(to_go, anchors)
        shared = float(np.mean(np.bincount(anchors)[anchors] > 1))
        return FlatCredit(layout.over_tokens(advantages), metrics={"anchored_share": shared})


def anchors_of(layout: Layout) -> NDArray[np.int64]:
    """[S] one number for each state of each group; a step without a key has a number of its own."""
    numbers: dict[tuple[int, str | int], int] = {}
    keys = (number if step.state_key is None else step.state_key for number, step in enumerate(layout.steps))
    places = zip(layout.group_of_step.tolist(), keys, strict=True)
    return np.array([numbers.setdefault(place, len(numbers)) for place in places], dtype=np.int64)


def less_mean_of_equals(values: Values, kinds: NDArray[np.int64]) -> Values:
    """[S] values minus the mean over those of the same kind; exactly 0 where those do not differ, or one is alone."""
    counts = np.bincount(kinds)
    means = np.bincount(kinds, weights=values) / counts
    deviations = values - means[kinds]
    stds = np.sqrt(np.bincount(kinds, weights=deviations**2) / counts)
    uniform = stds < UNIFORM * np.maximum(1.0, np.abs(means))
    return np.where(uniform[kinds], 0.0, deviations)


def gigpo(omega: float = 1.0, gamma: float = 0.95, std: bool = False) -> AnchorGroups:
    """Group-in-group: trajectories against their group, and steps against those taken in the same state.

    omega weighs the step part; gamma discounts its returns-to-go per step; `std` divides the episode part by the
    group's std (the step part keeps its scale). Without state keys this is dr_grpo.
    """
    discount("gigpo", gamma=gamma)
    finite("gigpo", omega=omega)
    return AnchorGroups(omega=omega, gamma=gamma, std=std)
