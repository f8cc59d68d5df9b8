"""Policy losses: what each sampled token is charged. How the charges are added up is aggregate.py's.

A loss is a function of `LossInput` that returns the loss [n] of each token and its statistics, each [n]: the learner
reports the mean of a statistic over the tokens, or the maximum of one whose name ends in `_max`.

The tokens given are those of one pack. A token's whole step is always among them, its whole trajectory only where
that is one row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from renma.errors import RecipeError
from renma.learning.correction import CLAMP, token_weights


@dataclass(frozen=True, slots=True)
class LossInput:
    """Flat tensors over n sampled tokens.

    logp: log pi of the token, with gradient. old: log pi_old, the policy whose ratio is clipped. behaviour: log mu, as
    recorded when it was sampled. advantage: A. entropy: of the distribution it was drawn from, or None. trajectory,
    step int64: which trajectory of the batch, which step of it. All but `logp` and `entropy` carry no gradient.
    """

    logp: Tensor
    old: Tensor
    behaviour: Tensor
    advantage: Tensor
    entropy: Tensor | None
    trajectory: Tensor
    step: Tensor


PolicyLoss = Callable[[LossInput], tuple[Tensor, dict[str, Tensor]]]


def scales_with_advantage(loss: PolicyLoss) -> PolicyLoss:
    """Marks a loss whose gradient is exactly 0 wherever the advantage is: such rows need no backward pass."""
    loss.scales_with_advantage = True  # type: ignore[attr-defined]
    return loss


def log_ratio(logp: Tensor, old: Tensor) -> Tensor:
    """log pi - log pi_old, held within +-20 so that its exponential is finite."""
    return (logp - old).clamp(-CLAMP, CLAMP)


def reinforce(importance: bool = False, cap: float | None = None) -> PolicyLoss:
    """-A log pi (Williams 1992); with `importance` -sg(w) A log pi, w = pi/mu, at most `cap` where one is given."""
    if cap is not None and not importance:
        raise RecipeError("loss reinforce: cap bounds the importance ratio; set importance: true, or leave cap out")

    def loss(x: LossInput) -> tuple[Tensor, dict[str, Tensor]]:
        if not importance:
            return -x.advantage * x.logp, {}
        ratio = log_ratio(x.logp.detach(), x.behaviour).exp()
        weight = ratio if cap is None else ratio.clamp(max=cap)
        return -weight * x.advantage * x.logp, {
            "ratio_mean": ratio,
            "ratio_max": ratio,
            "clip_share": _share(weight < ratio),
        }

    return scales_with_advantage(loss)


def ppo_clip(
    low: float = 0.8, high: float = 1.2, dual: float | None = None, correction: float | None = None
) -> PolicyLoss:
    """max(-A r, -A clip(r, low, high)), r = pi/pi_old (Schulman et al., arXiv 1707.06347, equation 7).

    low, high: bounds on the ratio itself. dual: for A < 0 the loss is at most -A * dual (arXiv 1912.09729, equation 5).
    correction: multiply by min(pi_old/mu, correction), detached, where pi_old is not the policy that sampled.
    clip_share counts the tokens whose gradient a bound took away.
    """
    if not 0 <= low <= 1 <= high:
        raise RecipeError(f"loss ppo_clip: low and high bound the ratio, 0 <= low <= 1 <= high; got {low} and {high}")
    if dual is not None and dual <= 1:
        raise RecipeError(f"loss ppo_clip: dual bounds the ratio from above 1 (3 is usual); got {dual}")

    def loss(x: LossInput) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = log_ratio(x.logp, x.old).exp()
        plain, clipped = -x.advantage * ratio, -x.advantage * ratio.clamp(low, high)
        value = torch.maximum(plain, clipped)
        bound = clipped > plain
        if dual is not None:
            ceiling = torch.where(x.advantage < 0, -x.advantage * dual, torch.inf)
            bound = bound | (value > ceiling)
            value = torch.minimum(value, ceiling)
        if correction is not None:
            value = value * token_weights(x.old, x.behaviour, correction)
        seen = ratio.detach()
        return value, {"ratio_mean": seen, "ratio_max": seen, "clip_share": _share(bound)}

    return scales_with_advantage(loss)


def sft() -> PolicyLoss:
    """-log pi: supervised learning of the given actions; advantages and recorded log-probabilities play no part."""

    def loss(x: LossInput) -> tuple[Tensor, dict[str, Tensor]]:
        return -x.logp, {}

    return loss


def k2(logp: Tensor, reference: Tensor) -> Tensor:
    """(log pi - log ref)**2 / 2: as a loss on the policy's own samples its expected gradient is that of KL(pi||ref)."""
    return 0.5 * (logp - reference) ** 2


def k3(logp: Tensor, reference: Tensor) -> Tensor:
    """ref/pi - 1 - log(ref/pi): an estimate of KL(pi||ref), never negative. For measuring; as a loss it is biased."""
    difference = log_ratio(reference, logp)
    return difference.exp() - 1 - difference


def _share(condition: Tensor) -> Tensor:
    return condition.to(torch.float32)
