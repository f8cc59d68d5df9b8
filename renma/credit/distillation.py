"""On-policy distillation: a teacher says of each sampled token how much likelier it would have found it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from renma.credit.base import Evidence, Need, returns_of
from renma.credit.checks import finite
from renma.credit.group_relative import standardised
from renma.credit.layout import FlatCredit, Layout, TokenEstimator


@dataclass(frozen=True, slots=True)
class TeacherAdvantages(TokenEstimator):
    """coefficient * (log teacher - log mu) of each token, plus reward * (the return against the group's)."""

    name: str = "distillation"
    needs: tuple[Need, ...] = ("teacher",)
    coefficient: float = 1.0
    reward: float = 0.0
    std: bool = True

    def flat(self, layout: Layout, evidence: Evidence) -> FlatCredit:
        teacher = layout.flat(evidence.teacher, "the teacher's log-probability")
        if not len(teacher):
            return FlatCredit(teacher)
        behaviour = np.concatenate([step.logprobs for step in layout.steps]).astype(np.float64)
        layout.finite(behaviour, "a recorded log-probability")
        gap = teacher - behaviour
        # A penalty is a reward of its own token and nothing else is: it is placed here, so not in the returns too.
        advantages = self.coefficient * gap + layout.penalties
        if self.reward:
            whole = np.concatenate([standardised(returns_of(group), self.std) for group in layout.groups])
            advantages = advantages + self.reward * np.repeat(whole, layout.lengths)
        return FlatCredit(advantages, metrics={"teacher_kl": -float(gap.mean())})


def distillation(coefficient: float = 1.0, reward: float = 0.0, std: bool = True) -> TeacherAdvantages:
    """A = coefficient * (log teacher - log behaviour) of each sampled token: reverse KL to a teacher, without discount.

    Agarwal et al. 2024 (on-policy distillation, arXiv 2306.13649), reverse KL as a reward on the student's samples.
    reward: weight of a group-relative return besides (`std` as grpo); a group then needs two members. The metric
    teacher_kl is the sampled KL(behaviour || teacher) a token.
    """
    finite("distillation", coefficient=coefficient, reward=reward)
    return TeacherAdvantages(min_group_size=2 if reward else 1, coefficient=coefficient, reward=reward, std=std)
