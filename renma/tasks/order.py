"""The order in which a run takes its tasks: every task once an epoch, shuffled anew each epoch.

The order is a pure function of (length, seed, position), so a run resumes from one integer and can neither skip a task
nor see one twice in an epoch.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from renma.seeding import seed_for


class TaskOrder:
    """`index_at(position)` for position = 0, 1, 2, … without end."""

    def __init__(self, source_len: int, seed: int) -> None:
        if source_len < 1:
            raise ValueError(f"an order needs at least one task, got a source of {source_len}")
        self.source_len = source_len
        self.seed = seed

    def index_at(self, position: int) -> int:
        """The task index at a position."""
        if position < 0:
            raise ValueError(f"a position is at least 0, got {position}")
        epoch, offset = divmod(position, self.source_len)
        return int(_permutation(self.source_len, self.seed, epoch)[offset])

    def epoch_at(self, position: int) -> int:
        """How many times the whole source has been gone through before this position."""
        return position // self.source_len


@lru_cache(maxsize=8)
def _permutation(length: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed_for("task order", seed, epoch)).permutation(length)
