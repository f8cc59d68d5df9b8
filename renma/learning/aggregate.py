"""How token losses become one number: a weight for each token, made once for a whole optimiser step.

Micro-batches and ranks then only add up `weight * loss`: the normaliser covers the optimiser step exactly and is
applied once, however the step is divided (case 2.10).
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from renma.errors import RecipeError
from renma.learning.units import units
from renma.registry import nearest

Aggregate = Literal["token_mean", "sequence_mean", "step_mean", "constant"]


def weights(
    aggregate: str,
    trajectory: NDArray[Any],
    step: NDArray[Any],
    *,
    constant_length: float = 1.0,
    keep: NDArray[np.bool_] | None = None,
) -> NDArray[np.float64]:
    """The weight [n] of each trained token of one optimiser step.

    trajectory, step [n]: the trajectory of each token and the step within it. A trajectory counts once, whatever the
    number of its rows; tokens that are not trained are not given here and are in no normaliser. keep [n]: a token that
    is not kept (a correction rejected it) weighs 0 and is in no normaliser either; None: all are kept.

    token_mean: 1/n. sequence_mean: the mean over trajectories of the mean over a trajectory's tokens. step_mean: the
    mean over steps of the mean over a step's tokens. constant: 1/(B * constant_length), B the number of trajectories
    (Dr. GRPO, arXiv 2503.20783; with length 1 the plain sum over a trajectory's tokens). But for `constant` the weights
    sum to 1.

    Raises RecipeError for an unknown name, or for a length that is not above 0.
    """
    known = get_args(Aggregate)
    if aggregate not in known:
        raise RecipeError(f"unknown aggregate {aggregate!r}: {nearest(aggregate, list(known))}")
    if aggregate == "constant" and constant_length <= 0:
        raise RecipeError(f"aggregate 'constant' divides by a fixed length above 0; got {constant_length}")
    if keep is not None and not keep.all():
        result = np.zeros(len(trajectory))
        result[keep] = weights(aggregate, trajectory[keep], step[keep], constant_length=constant_length)
        return result
    count = len(trajectory)
    if count == 0:
        return np.zeros(0)
    if aggregate == "token_mean":
        return np.full(count, 1.0 / count)
    unit, number = units("step" if aggregate == "step_mean" else "sequence", trajectory, step)
    if aggregate == "constant":
        return np.full(count, 1.0 / (number * constant_length))
    per_unit = 1.0 / (number * np.bincount(unit, minlength=number))
    return per_unit[unit]
