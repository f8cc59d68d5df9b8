"""Rollout correction: what to do where the sampler disagrees with the learner.

Delta = log pi_old - log mu of each sampled token: pi_old the policy as the batch begins, as the learner computes it, mu
the policy that sampled, as recorded. A correction weighs each token by exp(Delta), truncated, or takes tokens out of
the loss and of its normaliser, or both. Weights are plain numbers: no gradient goes through them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from renma.errors import RecipeError
from renma.learning.units import Level, means, units

CLAMP = 20.0  # |log ratio| beyond this is held there, so that exp stays finite

Statistic = Literal["product", "geometric", "k3"]


@dataclass(frozen=True, slots=True)
class Corrected:
    """What a correction makes of n tokens. factor [n] float32: what the loss of each is multiplied by, 0 where it is
    rejected. keep [n] bool: False where it is rejected. clipped [n] bool: where the cap made the factor smaller."""

    factor: NDArray[np.float32]
    keep: NDArray[np.bool_]
    clipped: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Correction:
    """A rule over the units of one level: single tokens, the tokens of a step, or those of a trajectory ("sequence").

    statistic: what is bounded: "product" exp(sum Delta), "geometric" exp(mean Delta), or "k3" the mean of
    exp(Delta) - 1 - Delta.
    low, high: a unit whose statistic is outside is rejected: all its tokens leave the loss and its normaliser; None: no
    such bound. weighs: the tokens that stay are multiplied by exp(sum Delta) over their unit, at most `cap`.
    """

    kind: str
    level: Level
    statistic: Statistic = "product"
    weighs: bool = True
    cap: float | None = None
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        if self.cap is not None and not self.cap >= 1:
            raise RecipeError(f"correction {self.kind}: cap bounds the ratio from above, at 1 or more; got {self.cap}")
        low, high = self.low or 0.0, np.inf if self.high is None else self.high
        if self.statistic == "k3":
            if not high > 0:
                raise RecipeError(f"correction {self.kind}: high bounds a divergence, above 0; got {self.high}")
        elif not 0 <= low <= 1 <= high:
            raise RecipeError(
                f"correction {self.kind}: low and high bound the ratio, 0 <= low <= 1 <= high; got {self.low} and "
                f"{self.high}"
            )

    def apply(self, delta: NDArray[Any], trajectory: NDArray[Any], step: NDArray[Any]) -> Corrected:
        """The factors of one optimiser step's tokens, all arrays [n]; whole trajectories must be given.

        Delta is held within +-20, and so is its sum, before it goes into an exponential.
        """
        held = np.clip(delta.astype(np.float64), -CLAMP, CLAMP)
        unit, count = units(self.level, trajectory, step)
        single = self.level == "token"
        total = held if single else np.bincount(unit, held, count)
        ratio = np.exp(np.clip(total, -CLAMP, CLAMP))
        inside = np.ones(count, np.bool_)
        if self.low is not None or self.high is not None:
            bounded = ratio
            if self.statistic == "k3":
                divergence = np.expm1(held) - held
                bounded = divergence if single else means(divergence, unit, count)
            elif self.statistic == "geometric" and not single:
                bounded = np.exp(means(held, unit, count))
            if self.low is not None:
                inside &= bounded >= self.low
            if self.high is not None:
                inside &= bounded <= self.high
        clipped = np.zeros(count, np.bool_)
        factor = inside.astype(np.float32)
        if self.weighs:
            if self.cap is not None:
                clipped = inside & (ratio > self.cap)
                ratio = np.minimum(ratio, self.cap)
            factor *= ratio.astype(np.float32)
        if single:
            return Corrected(factor, inside, clipped)
        return Corrected(factor[unit], inside[unit], clipped[unit])


def token_tis(cap: float = 2.0) -> Correction:
    """Truncated importance sampling: each token weighs min(exp(Delta), cap) (Ionides 2008)."""
    return Correction("token_tis", "token", cap=cap)


def sequence_tis(cap: float = 2.0, level: Literal["sequence", "step"] = "sequence") -> Correction:
    """Each token weighs min(exp(sum Delta), cap), the sum over its trajectory (or its step)."""
    return Correction("sequence_tis", level, cap=cap)


def token_mask(low: float = 0.5, high: float = 5.0) -> Correction:
    """Each token weighs exp(Delta); one whose weight is outside [low, high] is taken out (IcePop, Ling team 2025)."""
    return Correction("token_mask", "token", low=low, high=high)


def sequence_mis(
    low: float = 0.5, high: float = 2.0, cap: float = 2.0, level: Literal["sequence", "step"] = "sequence"
) -> Correction:
    """`sequence_tis`, and a trajectory (or step) with exp(sum Delta) outside [low, high] is taken out."""
    return Correction("sequence_mis", level, cap=cap, low=low, high=high)


def geometric_rejection(
    low: float = 0.999, high: float = 1.001, level: Literal["sequence", "step"] = "sequence"
) -> Correction:
    """A trajectory (or step) with exp(mean Delta) outside [low, high] is taken out; nothing is weighed."""
    return Correction("geometric_rejection", level, "geometric", weighs=False, low=low, high=high)


def k3_rejection(high: float = 0.01, level: Literal["sequence", "step"] = "sequence") -> Correction:
    """A trajectory (or step) with mean(exp(Delta) - 1 - Delta) above `high` is taken out; nothing is weighed."""
    return Correction("k3_rejection", level, "k3", weighs=False, high=high)
