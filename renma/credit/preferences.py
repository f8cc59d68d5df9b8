"""Preference pairs: in each group the best trajectory against the worst, for DPO (Rafailov et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from renma.credit.base import Evidence, moments, returns_in
from renma.credit.layout import FlatCredit, Layout, TokenEstimator
from renma.types import Step, Trajectory


@dataclass(frozen=True, slots=True)
class BestAndWorst(TokenEstimator):
    """+1 on the tokens of the group's best trajectory, -1 on those of its worst, 0 on all others."""

    name: str = "pairs"
    min_group_size: int = 2
    from_divergence: bool = False

    def flat(self, layout: Layout, evidence: Evidence) -> FlatCredit:
        advantages = np.zeros(len(layout.penalties))
        starts = np.cumsum(layout.lengths) - layout.lengths
        offset, margins = 0, []
        for group, returns in zip(layout.groups, returns_in(layout.groups, evidence), strict=True):
            best, worst = int(np.argmax(returns)), int(np.argmin(returns))
            chosen, rejected = group.trainable[best], group.trainable[worst]
            shared = shared_tokens(chosen, rejected) if self.from_divergence else 0
            apart = shared < min(chosen.sampled_tokens, rejected.sampled_tokens)
            if apart and not moments(returns).uniform:
                for place, trajectory, sign in ((best, chosen, 1.0), (worst, rejected, -1.0)):
                    start = starts[offset + place]
                    advantages[start + shared : start + trajectory.sampled_tokens] = sign
                margins.append(float(returns[best] - returns[worst]))
            offset += len(returns)
        metrics = {"pairs": float(len(margins)), "groups_without_pair": float(len(layout.groups) - len(margins))}
        if margins:
            metrics["pair_margin"] = float(np.mean(margins))
        return FlatCredit(advantages, metrics=metrics)


def shared_tokens(one: Trajectory, other: Trajectory) -> int:
    """Sampled tokens of the steps, from the first on, in which both saw and did exactly the same."""
    count = 0
    for mine, theirs in zip(one.steps, other.steps, strict=False):
        if not _same(mine, theirs):
            break
        count += len(mine.action_ids)
    return count


def _same(one: Step, other: Step) -> bool:
    return np.array_equal(one.prompt_ids, other.prompt_ids) and np.array_equal(one.action_ids, other.action_ids)


def pairs(from_divergence: bool = False) -> BestAndWorst:
    """The best return of each group chosen (+1), the worst rejected (-1), the others 0; no pair where returns tie.

    Of several best or worst the first in the group's order counts. from_divergence: only tokens from the first step on
    at which the two saw or did something different (step-DPO, Lai et al. 2024); no pair where one of them holds no
    token from there on.
    """
    return BestAndWorst(from_divergence=from_divergence)
