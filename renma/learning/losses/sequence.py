"""Losses whose ratio is one number for a whole trajectory or a whole step."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from renma.errors import RecipeError
from renma.learning.correction import CLAMP
from renma.learning.losses.base import LossInput, PolicyLoss, StepTokens, clipped, having, ratio_statistics
from renma.learning.losses.token import check_bounds
from renma.learning.units import means, unit_means, units


def sequence_ratio(level: Literal["sequence", "step"], low: float = 1 - 3e-4, high: float = 1 + 4e-4) -> PolicyLoss:
    """max(-A s, -A clip(s, low, high)), s = exp(mean of log(pi/pi_old) over the tokens of the trajectory, or the step).

    Each token carries s as sg(s) * pi/sg(pi): the value is s, and each token's own gradient flows (GSPO, arXiv
    2507.18071, equations 14 and 15), so that with a mean over each trajectory's (step's) tokens the gradient is that
    of s itself. low, high: bounds on s; much nearer 1 than a token's, for s is a mean over many.
    """
    if level not in ("sequence", "step"):
        raise RecipeError(f"loss sequence_ratio: level is 'sequence' or 'step'; got {level!r}")
    check_bounds("gspo" if level == "sequence" else "step_ratio", low, high)

    def prepare(step: StepTokens) -> NDArray[Any]:
        unit, count = units(level, step.trajectory, step.step)
        return means(step.logp.astype(np.float64) - step.old, unit, count)[unit]

    def loss(x: LossInput) -> tuple[Tensor, dict[str, Tensor]]:
        held = x.logp.detach()
        if x.prepared is None:
            mean = unit_means(held - x.old, level, x.trajectory, x.step)
        else:
            mean = x.prepared
        ratio = mean.clamp(-CLAMP, CLAMP).exp() * (x.logp - held).exp()
        value, bound = clipped(x.advantage, ratio, low, high)
        return value, ratio_statistics(ratio, bound)

    # A step is never divided between packs; only a trajectory of several rows is, and needs `prepare`.
    more: dict[str, Any] = {"prepare": prepare} if level == "sequence" else {}
    return having(loss, scales_with_advantage=True, against="old", level=level, **more)


def gspo(low: float = 1 - 3e-4, high: float = 1 + 4e-4) -> PolicyLoss:
    """`sequence_ratio` over whole trajectories."""
    return sequence_ratio("sequence", low, high)


def step_ratio(low: float = 1 - 3e-4, high: float = 1 + 4e-4) -> PolicyLoss:
    """`sequence_ratio` over each step's tokens (StepPO)."""
    return sequence_ratio("step", low, high)
