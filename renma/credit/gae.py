"""Generalised advantage estimation with a critic, over tokens (PPO) or over steps (StepPO).

Schulman et al. 2016 (arXiv 1506.02438), equation 16. After the last item the value is `Evidence.final`: 0 where the
episode terminated, the critic's where a limit cut it. The critic's targets are A + V, taken before whitening.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from renma.credit.base import Evidence, Need, Values
from renma.credit.checks import discount
from renma.credit.layout import FlatCredit, Layout, TokenEstimator
from renma.credit.recursions import gae
from renma.credit.whitening import large_moments, whitened
from renma.errors import RunError


@dataclass(frozen=True, slots=True)
class _WithCritic(TokenEstimator):
    """What both kinds of GAE are made with."""

    needs: tuple[Need, ...] = ("values",)
    gamma: float = 1.0
    lam: float = 0.95
    whiten: bool = True


@dataclass(frozen=True, slots=True)
class TokenAdvantages(_WithCritic):
    """GAE over a trajectory's sampled tokens, all steps in one sequence; a target at every token."""

    name: str = "gae_token"

    def flat(self, layout: Layout, evidence: Evidence) -> FlatCredit:
        values = layout.flat(evidence.values, "the critic's value")
        final = _final(layout, evidence)
        advantages = gae(layout.token_rewards, values, final, self.gamma, self.lam, layout.lengths)
        return FlatCredit(
            whitened(advantages) if self.whiten else advantages,
            advantages + values,
            _metrics(advantages, values),
        )


@dataclass(frozen=True, slots=True)
class StepAdvantages(_WithCritic):
    """GAE over a trajectory's steps, spread over the tokens of each; a target at each step's first token only."""

    name: str = "gae_step"
    gamma: float = 0.99

    def flat(self, layout: Layout, evidence: Evidence) -> FlatCredit:
        values = layout.flat(evidence.values, "the critic's value")[layout.first_tokens]
        final = _final(layout, evidence)
        advantages = gae(layout.step_rewards, values, final, self.gamma, self.lam, layout.steps_of)
        targets = np.full(len(layout.penalties), np.nan)
        targets[layout.first_tokens] = advantages + values
        return FlatCredit(
            layout.over_tokens(whitened(advantages) if self.whiten else advantages),
            targets,
            _metrics(advantages, values),
        )


def _final(layout: Layout, evidence: Evidence) -> Values:
    """[T] the value after each trajectory's last step."""
    if evidence.final is None:
        raise RunError("credit: the values after the last steps (final) are missing from the evidence")
    if [len(group) for group in evidence.final] != layout.members.tolist():
        raise RunError("credit: final must hold one value for each trainable trajectory")
    values = np.array([value for group in evidence.final for value in group], dtype=np.float64)
    return layout.finite(values, "the critic's value after the last step")


def _metrics(advantages: Values, values: Values) -> dict[str, float]:
    """advantage_mean, advantage_std: before whitening. explained_variance: 1 - var(target - value) / var(target), of
    the values as they were when the batch was credited; left out where the targets do not differ."""
    if not len(advantages):
        return {}
    own, target = large_moments(advantages), large_moments(advantages + values)
    numbers = {"advantage_mean": own.mean, "advantage_std": own.std, "target_mean": target.mean}
    if not target.uniform:
        numbers["explained_variance"] = 1.0 - (own.std / target.std) ** 2
    return numbers


def gae_token(gamma: float = 1.0, lam: float = 0.95, whiten: bool = True) -> TokenAdvantages:
    """GAE over sampled tokens with a critic (PPO). gamma and lam are per token; observations do not discount.

    gamma is 1 because an action's tokens are not moments of time: 0.99 would forget a reward 500 tokens away.
    whiten: mean 0 and std 1 over all sampled tokens of the batch.
    """
    discount("gae_token", gamma=gamma, lam=lam)
    return TokenAdvantages(gamma=gamma, lam=lam, whiten=whiten)


def gae_step(gamma: float = 0.99, lam: float = 0.95, whiten: bool = True) -> StepAdvantages:
    """GAE over steps with a critic that is read once a step, at its last prompt token (StepPO).

    gamma and lam are per step. whiten: mean 0 and std 1 over all steps of the batch, each counted once whatever its
    tokens.
    """
    discount("gae_step", gamma=gamma, lam=lam)
    return StepAdvantages(gamma=gamma, lam=lam, whiten=whiten)
