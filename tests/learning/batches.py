"""Batches by hypothesis: trajectories of unequal length, several rows and steps, observations between the actions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from renma.learning.objective import Objective
from renma.learning.rows import Row
from renma.learning.tokens import Tokens
from tests.learning.reference import Token
from tests.learning.tiny import make_row


@dataclass(frozen=True)
class Batch:
    """rows, and for each of their trained tokens, row after row: logp (pi), began (pi as the batch began), old, and
    reference, float32 values."""

    rows: list[Row]
    logp: np.ndarray
    began: np.ndarray
    old: np.ndarray
    reference: np.ndarray

    @property
    def counts(self) -> list[int]:
        return [int(row.trained.sum()) for row in self.rows]

    def split(self, values: np.ndarray) -> list[np.ndarray]:
        return np.split(values, np.cumsum(self.counts)[:-1])

    @property
    def tokens(self) -> list[Token]:
        """What the slow reference takes."""
        flat = Tokens.of(self.rows)
        columns = (flat.trajectory, flat.step, flat.group, flat.advantage, self.old, flat.behaviour, self.reference)
        return [Token(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]

    def permuted(self, order: Sequence[int]) -> Batch:
        """The same rows in another order."""
        pick = [np.concatenate([self.split(v)[i] for i in order]) for v in self._values]
        return Batch([self.rows[i] for i in order], *pick)

    @property
    def _values(self) -> tuple[np.ndarray, ...]:
        return (self.logp, self.began, self.old, self.reference)


@st.composite
def batches(draw: st.DrawFn, spread: float = 0.5, pairs: bool = False) -> Batch:
    """Up to four trajectories of up to two rows of up to two steps of up to three tokens, in groups of two.

    Some end within a step, as a truncated one does. spread: how far the log-probabilities differ from each other.
    pairs: of each group one trajectory has advantages above 0, one below.
    """
    shape = draw(st.lists(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=2), min_size=1, max_size=2),
                          min_size=1, max_size=4))  # fmt: skip
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows: list[Row] = []
    for number, of_rows in enumerate(shape):
        first = 0
        for sizes in of_rows:
            mask, steps = [0], []
            for step, size in enumerate(sizes):
                mask += [0] * int(rng.integers(0, 3)) + [1] * size
                steps += [first + step] * size
            first += len(sizes)
            n = sum(sizes)
            advantage: Any = rng.normal(size=n) * (rng.random() > 0.25)
            if pairs:
                advantage = np.full(n, 1.0 if number % 2 else -1.0)
            rows.append(
                make_row(
                    rng.integers(0, 9, len(mask)),
                    mask,
                    trajectory=number,
                    group=number // 2,
                    advantage=advantage,
                    logprob=-rng.random(n) * 3 - 0.1,
                    step=steps,
                )
            )
    behaviour = np.concatenate([row.logprobs[row.trained] for row in rows])

    def near(values: np.ndarray) -> np.ndarray:
        return (values + rng.normal(size=len(values)) * spread).astype(np.float32)

    began = near(behaviour)
    return Batch(rows, near(began), began, near(behaviour), near(behaviour))


def ours(
    objective: Objective, batch: Batch, packs: Sequence[Sequence[int]] | None = None
) -> tuple[float, np.ndarray, dict[str, float]]:
    """The learner's objective, its gradient over logp [n] and the summary of the loss's own preparation, in float64.

    packs: the rows of each pack; None: all in one.
    """
    tokens = Tokens.of(batch.rows, batch.split(batch.old), batch.split(batch.reference))
    if objective.correction is not None:
        tokens, _ = tokens.corrected(objective.correction, batch.began)
    summary: dict[str, float] = {}
    loss = objective.traits
    if loss.prepare is not None and (loss.level != "sequence" or packs is not None):
        tokens, summary = tokens.prepared_for(objective, batch.logp)
    tokens = tokens.weighed(objective)
    assert tokens.weight is not None
    logp = torch.tensor(batch.logp, dtype=torch.float64, requires_grad=True)
    total: Tensor = torch.zeros((), dtype=torch.float64)
    for rows in packs or [range(len(batch.rows))]:
        index = np.flatnonzero(np.isin(tokens.row, list(rows)))
        given = tokens.given(index, logp[torch.from_numpy(index)], torch.zeros(len(index), dtype=torch.float64))
        given = replace(
            given, **{f: getattr(given, f).double() for f in ("old", "behaviour", "advantage", "reference")}
        )
        factor = None if tokens.factor is None else torch.from_numpy(tokens.factor[index]).double()
        charge, _ = objective.charge(given, factor)
        total = total + (charge * torch.from_numpy(tokens.weight[index])).sum()
    [gradient] = torch.autograd.grad(total, logp)
    return float(total.detach()), gradient.numpy(), summary
