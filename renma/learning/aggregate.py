"""How token losses become one number: a weight for each token, made once for a whole optimiser step.

Micro-batches and ranks then only add up `weight * loss`: the normaliser covers the optimiser step exactly and is
applied once, however the step is divided (case 2.10).
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from renma.errors import RecipeError
from renma.registry import nearest

Aggregate = Literal["token_mean", "sequence_mean", "step_mean", "constant"]


def weights(
    aggregate: str,
    trajectory: NDArray[Any],
    step: NDArray[Any],
    *,
    constant_length: float = 1.0,
) -> NDArray[np.float64]:
    """The weight [n] of each trained token of one optimiser step.

    trajectory, step [n]: the trajectory of each token and the step within it. A trajectory counts once, whatever the
    number of its rows; tokens that are not trained are not given here and are in no normaliser.

    token_mean: 1/n. sequence_mean: the mean over trajectories of the mean over a trajectory's tokens. step_mean: the
    mean over steps of the mean over a step's tokens. constant: 1/(B * constant_length), B the number of trajectories
    (Dr. GRPO, arXiv 2503.20783; with length 1 the plain sum over a trajectory's tokens). But for `constant` the weights
    sum to 1.

    Raises RecipeError for an unknown name, or for a length that is not above 0.
    """
    known = get_args(Aggregate)
    if aggregate not in known:
        raise RecipeError(f"unknown aggregate {aggregate!r}: {nearest(aggregate, list(known))}")
    count = len(trajectory)
    if count == 0:
        return np.zeros(0)
    if aggregate == "token_mean":
        return np.full(count, 1.0 / count)
    if aggregate == "constant":
        if constant_length <= 0:
            raise RecipeError(f"aggregate 'constant' divides by a fixed length above 0; got {constant_length}")
        return np.full(count, 1.0 / (len(np.unique(trajectory)) * constant_length))
    keys = trajectory.astype(np.int64)
    if aggregate == "step_mean":
        keys = keys * (int(step.max()) + 1) + step
    _, unit, sizes = np.unique(keys, return_inverse=True, return_counts=True)
    result: NDArray[np.float64] = 1.0 / (len(sizes) * sizes[unit])
    return result
