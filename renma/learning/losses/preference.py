"""Direct preference optimisation, as a policy gradient with a weight for each pair."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from renma.errors import RecipeError, RunError
from renma.learning.losses.base import LossInput, PolicyLoss, StepTokens, having
from renma.learning.units import means, units


def dpo(beta: float = 0.1) -> PolicyLoss:
    """The gradient of -log sigma(beta * Delta), Delta = (sum of log(pi/ref))(chosen) - (…)(rejected) (Rafailov et al.,
    arXiv 2305.18290, equation 7): -w sign(A) log pi with w = beta * sigma(-beta * Delta), held fixed.

    One pair a group: the chosen trajectory's tokens have an advantage above 0, the rejected one's below 0, and any
    others 0: they are in no sum, which is how a pair is compared over whole trajectories or from the step where they
    part. A group without both takes no part. With aggregate `constant` and a length of 1/2 (a pair is two
    trajectories) the gradient is that of the mean over pairs; `loss` is then a surrogate, and the mean over pairs is
    reported as preference_loss, with pair_margin (beta * Delta), pair_accuracy (the share with Delta > 0, a tie being
    half) and pairs.

    Raises RunError for a group with two chosen or two rejected trajectories, or an advantage outside any group.
    """
    if not beta > 0:
        raise RecipeError(f"loss dpo: beta must be above 0; got {beta}")

    def prepare(step: StepTokens) -> NDArray[Any]:
        if step.reference is None:
            raise RecipeError("loss dpo needs the reference's log-probabilities of every row")
        sign = np.sign(step.advantage)
        if bool((step.group[sign != 0] < 0).any()):
            raise RunError("loss dpo compares the members of a group, and a trajectory with an advantage is in none")
        unit, count = units("sequence", step.group, step.step)
        member, members = units("sequence", step.trajectory, step.step)
        group_of = np.zeros(members, np.int64)
        group_of[member] = unit
        chosen, rejected = (np.bincount(member[sign == side], minlength=members) > 0 for side in (1, -1))
        counts = [np.bincount(group_of[side], minlength=count) for side in (chosen, rejected)]
        most = max((int(found.max(initial=0)) for found in counts), default=0)
        if most > 1 or bool((chosen & rejected).any()):
            raise RunError(
                f"loss dpo compares one pair a group, and a group has {most} trajectories with an advantage of one "
                "sign (or one trajectory with both signs): use the advantage 'pairs'"
            )
        both = (counts[0] == 1) & (counts[1] == 1)
        difference = step.logp.astype(np.float64) - step.reference
        margins = np.bincount(unit, sign * difference, count)
        return np.where((sign != 0) & both[unit], margins[unit], np.nan)

    def summary(step: StepTokens, prepared: NDArray[Any]) -> dict[str, float]:
        part = ~np.isnan(prepared)
        unit, count = units("sequence", step.group[part], step.step[part])
        if not count:
            return {"pairs": 0.0}
        margin = means(prepared[part], unit, count)
        return {
            "pairs": float(count),
            "preference_loss": float(np.logaddexp(0.0, -beta * margin).mean()),
            "pair_margin": float(beta * margin.mean()),
            "pair_accuracy": float(((margin > 0) + 0.5 * (margin == 0)).mean()),
        }

    def loss(x: LossInput) -> tuple[Tensor, dict[str, Tensor]]:
        if x.prepared is None:
            raise RunError("loss dpo needs the pairs of the whole optimiser step: run it by the learner")
        weight = beta * torch.sigmoid(-beta * x.prepared)
        return -weight * x.advantage.sign() * x.logp, {"pair_weight_mean": weight}

    return having(
        loss,
        scales_with_advantage=True,
        against="nothing",
        supervised=True,
        needs_reference=True,
        whole_groups=True,
        prepare=prepare,
        summary=summary,
    )
