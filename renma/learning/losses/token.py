"""Losses that charge each token by itself."""

from __future__ import annotations

import torch
from torch import Tensor

from renma.errors import RecipeError
from renma.learning.losses.base import LossInput, PolicyLoss, clipped, having, log_ratio, ratio_statistics


def reinforce(importance: bool = False, cap: float | None = None) -> PolicyLoss:
    """-A log pi (Williams 1992); with `importance` -sg(w) A log pi, w = pi/mu, at most `cap` where one is given."""
    if cap is not None and not importance:
        raise RecipeError("loss reinforce: cap bounds the importance ratio; set importance: true, or leave cap out")

    def loss(x: LossInput) -> tuple[Tensor, dict[str, Tensor]]:
        if not importance:
            return -x.advantage * x.logp, {}
        ratio = log_ratio(x.logp.detach(), x.behaviour).exp()
        weight = ratio if cap is None else ratio.clamp(max=cap)
        return -weight * x.advantage * x.logp, ratio_statistics(ratio, weight < ratio)

    return having(loss, scales_with_advantage=True, against="behaviour" if importance else "nothing")


def ppo_clip(low: float = 0.8, high: float = 1.2, dual: float | None = None) -> PolicyLoss:
    """max(-A r, -A clip(r, low, high)), r = pi/pi_old (Schulman et al., arXiv 1707.06347, equation 7).

    low, high: bounds on the ratio itself. dual: for A < 0 the loss is at most -A * dual (arXiv 1912.09729, equation 5).
    clip_share counts the tokens whose gradient a bound took away.
    """
    check_bounds("ppo_clip", low, high)
    if dual is not None and dual <= 1:
        raise RecipeError(f"loss ppo_clip: dual bounds the ratio from above 1 (3 is usual); got {dual}")

    def loss(x: LossInput) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = log_ratio(x.logp, x.old).exp()
        value, bound = clipped(x.advantage, ratio, low, high)
        if dual is not None:
            ceiling = torch.where(x.advantage < 0, -x.advantage * dual, torch.inf)
            bound = bound | (value > ceiling)
            value = torch.minimum(value, ceiling)
        return value, ratio_statistics(ratio, bound)

    return having(loss, scales_with_advantage=True, against="old")


def decoupled(low: float = 0.8, high: float = 1.2, cap: float | None = None) -> PolicyLoss:
    """sg(pi_old/mu) * max(-A r, -A clip(r, low, high)), r = pi/pi_old (AReaL, arXiv 2505.24298, equation 5).

    pi_old is the policy as the batch begins, recomputed (`old_logprobs: recompute`), and mu what was recorded: stale
    samples are weighed for what they are, and the clip acts on what this batch changes. cap: the largest weight.
    """
    check_bounds("decoupled", low, high)
    if cap is not None and cap < 1:
        raise RecipeError(f"loss decoupled: cap bounds pi_old/mu from above, at 1 or more; got {cap}")

    def loss(x: LossInput) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = log_ratio(x.logp, x.old).exp()
        value, bound = clipped(x.advantage, ratio, low, high)
        weight = log_ratio(x.old, x.behaviour).exp()
        if cap is not None:
            weight = weight.clamp(max=cap)
        return weight * value, ratio_statistics(ratio, bound) | {"weight_mean": weight, "weight_max": weight}

    return having(loss, scales_with_advantage=True, against="behaviour", needs_recompute=True)


def cispo(low: float = 0.0, high: float = 4.0) -> PolicyLoss:
    """-sg(clip(r, low, high)) A log pi, r = pi/pi_old: every token keeps its gradient, only its weight is clipped.

    MiniMax-M1, arXiv 2506.13585, equations 4 and 5; low, high: bounds on the ratio itself.
    """
    check_bounds("cispo", low, high)

    def loss(x: LossInput) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = log_ratio(x.logp.detach(), x.old).exp()
        weight = ratio.clamp(low, high)
        return -weight * x.advantage * x.logp, ratio_statistics(ratio, weight != ratio)

    return having(loss, scales_with_advantage=True, against="old")


def sft() -> PolicyLoss:
    """-log pi: supervised learning of the given actions; advantages and recorded log-probabilities play no part."""

    def loss(x: LossInput) -> tuple[Tensor, dict[str, Tensor]]:
        return -x.logp, {}

    return having(loss, against="nothing", supervised=True)


def hybrid(low: float = 0.8, high: float = 1.2, imitation: float = 1.0) -> PolicyLoss:
    """`ppo_clip` on what the policy sampled, `imitation` * -log pi on demonstrations, in one update.

    A demonstrated token is one without a recorded log-probability (NaN); its advantage plays no part.
    """
    if imitation < 0:
        raise RecipeError(f"loss hybrid: imitation weighs the demonstrations, at 0 or more; got {imitation}")
    on_samples = ppo_clip(low, high)

    def loss(x: LossInput) -> tuple[Tensor, dict[str, Tensor]]:
        demonstrated = x.behaviour.isnan()
        # A NaN must not enter the branch that is not taken: its gradient would be NaN times 0.
        known = torch.where(demonstrated, x.logp.detach(), x.old)
        value, statistics = on_samples(
            LossInput(x.logp, known, x.behaviour, x.advantage, x.entropy, x.trajectory, x.step)
        )
        share = demonstrated.to(torch.float32)
        return torch.where(demonstrated, -imitation * x.logp, value), statistics | {"demonstrated_share": share}

    return having(loss, against="old", takes_demonstrations=True)


def check_bounds(name: str, low: float, high: float) -> None:
    """Raise RecipeError for bounds that do not bound a ratio."""
    if not 0 <= low <= 1 <= high:
        raise RecipeError(f"loss {name}: low and high bound the ratio, 0 <= low <= 1 <= high; got {low} and {high}")
