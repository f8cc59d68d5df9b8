"""Which trajectory or step each token of a batch belongs to, as numbers 0, 1, 2 … that sums can be gathered by."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Level = Literal["token", "step", "sequence"]
Longs = NDArray[np.int64]


def units(level: str, trajectory: NDArray[Any], step: NDArray[Any]) -> tuple[Longs, int]:
    """[n] the unit of each token, and how many units there are.

    trajectory, step [n] whole numbers, the step's not negative: equal trajectories (level "sequence"), or equal
    trajectory and step (level "step"), are one unit wherever they stand; at level "token" each token is its own.
    """
    count = len(trajectory)
    if level == "token" or count == 0:
        return np.arange(count), count
    differs = trajectory[1:] != trajectory[:-1]
    if level == "step":
        differs = differs | (step[1:] != step[:-1])
    # Neighbours mostly belong together: only where they part is there anything to sort.
    starts = np.concatenate([[0], np.flatnonzero(differs) + 1])
    keys = trajectory[starts].astype(np.int64)
    if level == "step":
        keys = keys * (int(step.max()) + 1) + step[starts]
    kinds, unit = np.unique(keys, return_inverse=True)
    return np.repeat(unit, np.diff(starts, append=count)), len(kinds)


def means(values: NDArray[Any], unit: Longs, count: int) -> NDArray[np.float64]:
    """[count] the mean over each unit's tokens, float64."""
    result: NDArray[np.float64] = np.bincount(unit, values, count) / np.bincount(unit, minlength=count)
    return result


def unit_means(values: Tensor, level: Level, trajectory: Tensor, step: Tensor) -> Tensor:
    """[n] for each token the mean of `values` [n] over the tokens of its unit."""
    if level == "token":
        return values
    key = trajectory if level == "sequence" else trajectory * (step.max() + 1) + step
    _, unit, sizes = torch.unique(key, return_inverse=True, return_counts=True)
    sums = torch.zeros(len(sizes), dtype=values.dtype, device=values.device).index_add_(0, unit, values)
    return (sums / sizes)[unit]
