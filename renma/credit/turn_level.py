"""Turn-level credit: how the whole went against the group, plus what each step brought from there on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from renma.credit.base import Evidence, returns_in
from renma.credit.checks import discount, finite
from renma.credit.group_relative import standardised
from renma.credit.layout import FlatCredit, Layout, TokenEstimator
from renma.credit.recursions import discounted


@dataclass(frozen=True, slots=True)
class TurnLevel(TokenEstimator):
    """outcome_weight * (whole against the group) + process_weight * (return-to-go of the steps' own rewards)."""

    name: str = "turn_level"
    min_group_size: int = 2
    gamma: float = 1.0
    compare: Literal["total", "outcome"] = "total"
    outcome_weight: float = 1.0
    process_weight: float = 1.0
    std: bool = True

    def flat(self, layout: Layout, evidence: Evidence) -> FlatCredit:
        if not layout.groups:
            return FlatCredit(np.zeros(0))
        if self.compare == "total":
            wholes = returns_in(layout.groups, evidence)
        else:
            wholes = np.split(layout.outcome, np.cumsum(layout.members)[:-1])
        outcome = np.concatenate([standardised(own, self.std) for own in wholes])
        process = discounted(layout.process_rewards, self.gamma, layout.steps_of)
        steps = self.outcome_weight * layout.over_steps(outcome) + self.process_weight * process
        return FlatCredit(layout.over_tokens(steps))


def turn_level(
    gamma: float = 1.0,
    compare: Literal["total", "outcome"] = "total",
    outcome_weight: float = 1.0,
    process_weight: float = 1.0,
    std: bool = True,
) -> TurnLevel:
    """Group-relative over whole trajectories, plus process rewards as return-to-go on each step's own tokens.

    Zeng et al. 2025 (turn-level credit assignment, arXiv 2505.11821), with returns-to-go in place of a step's own
    reward. compare: what a whole is, all its rewards (`total`) or the outcome's only. gamma discounts process rewards
    per step. std: divide by the group's, as grpo. Penalties are process rewards of their steps.
    """
    discount("turn_level", gamma=gamma)
    finite("turn_level", outcome_weight=outcome_weight, process_weight=process_weight)
    return TurnLevel(
        gamma=gamma, compare=compare, outcome_weight=outcome_weight, process_weight=process_weight, std=std
    )
