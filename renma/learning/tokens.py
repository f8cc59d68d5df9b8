"""The trained tokens of one optimiser step as flat arrays, and which rows share an optimiser step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from renma.learning.aggregate import weights
from renma.learning.correction import Corrected, Correction
from renma.learning.losses.base import LossInput, StepTokens
from renma.learning.objective import Objective
from renma.learning.rows import Row
from renma.types import Floats


@dataclass(frozen=True, slots=True)
class Tokens:
    """The n trained tokens of one optimiser step's rows, row after row; every array is [n].

    old None: pi itself. factor, keep None: no correction, all kept. prepared None: the loss needs nothing made ready.
    weight: the aggregate's, 0 for a token that takes no part.
    """

    row: NDArray[np.int64]
    trajectory: NDArray[np.int64]
    step: NDArray[np.int64]
    group: NDArray[np.int64]
    advantage: Floats
    behaviour: Floats
    old: Floats | None = None
    reference: Floats | None = None
    factor: Floats | None = None
    keep: NDArray[np.bool_] | None = None
    prepared: NDArray[Any] | None = None
    weight: NDArray[np.float64] | None = None

    @staticmethod
    def of(
        rows: Sequence[Row], old: Sequence[Floats] | None = None, reference: Sequence[Floats] | None = None
    ) -> Tokens:
        """The rows' tokens; old, reference: one array [trained tokens] a row."""
        counts = [int(np.count_nonzero(row.trained)) for row in rows]
        trained = np.concatenate([row.trained for row in rows])
        return Tokens(
            np.repeat(np.arange(len(rows)), counts),
            np.repeat(np.array([row.trajectory for row in rows], np.int64), counts),
            np.concatenate([row.step for row in rows])[trained].astype(np.int64),
            np.repeat(np.array([row.group for row in rows], np.int64), counts),
            np.concatenate([row.advantages for row in rows])[trained],
            np.concatenate([row.logprobs for row in rows])[trained],
            None if old is None else np.concatenate(old),
            None if reference is None else np.concatenate(reference).astype(np.float32, copy=False),
        )

    def __len__(self) -> int:
        return len(self.row)

    def delta(self, policy: NDArray[Any]) -> NDArray[Any]:
        """log pi - log mu [n], in float64."""
        result: NDArray[Any] = policy.astype(np.float64) - self.behaviour
        return result

    def corrected(self, correction: Correction, began: NDArray[Any]) -> tuple[Tokens, Corrected]:
        """With the correction's factors. began [n]: log pi of the policy as the batch begins.

        A demonstration (no recorded log-probability) is left as it is: it was not sampled.
        """
        delta = self.delta(began)
        known = ~np.isnan(delta)
        result = correction.apply(np.where(known, delta, 0.0), self.trajectory, self.step)
        if not known.all():
            result = Corrected(np.where(known, result.factor, np.float32(1)), result.keep | ~known, result.clipped)
        return replace(self, factor=result.factor, keep=result.keep), result

    def prepared_for(self, objective: Objective, logp: NDArray[Any]) -> tuple[Tokens, dict[str, float]]:
        """With what the loss makes ready from the whole step, and its summary. logp [n]: by the policy as it is now."""
        loss = objective.traits
        assert loss.prepare is not None
        seen = StepTokens(
            logp,
            logp if self.old is None else self.old,
            self.behaviour,
            self.reference,
            self.advantage,
            self.trajectory,
            self.step,
            self.group,
        )
        prepared = loss.prepare(seen)
        if prepared.shape != logp.shape:
            raise ValueError(f"a loss's prepare gives one value a token, {logp.shape}; got {prepared.shape}")
        numbers = {} if loss.summary is None else loss.summary(seen, prepared)
        out = np.isnan(prepared)
        keep = self.keep
        if out.any():
            keep = ~out if keep is None else keep & ~out
        return replace(self, prepared=np.where(out, 0, prepared).astype(np.float32), keep=keep), numbers

    def weighed(self, objective: Objective) -> Tokens:
        """With the aggregate's weights, over the tokens that are kept."""
        length = objective.constant_length
        return replace(
            self,
            weight=weights(objective.aggregate, self.trajectory, self.step, constant_length=length, keep=self.keep),
        )

    def divided(self, rows: int) -> bool:
        """Whether some trajectory has several of the `rows` rows: its tokens may then lie in different packs."""
        return len(np.unique(self.trajectory)) < rows

    def with_signal(self, rows: int, objective: Objective) -> NDArray[np.bool_]:
        """[rows] bool: False for a row whose gradient is exactly 0."""
        assert self.weight is not None
        signal = self.weight != 0
        if objective.silent_at_zero_advantage:
            signal = signal & (self.advantage != 0)
        result: NDArray[np.bool_] = np.bincount(self.row, signal, rows) > 0
        return result

    def given(self, index: NDArray[np.int64], logp: Tensor, entropy: Tensor) -> LossInput:
        """What the loss sees of the tokens `index` [n], which a pack gave logp and entropy."""

        def take(values: NDArray[Any] | None) -> Tensor | None:
            return None if values is None else torch.from_numpy(values[index]).to(logp.device)

        def have(values: NDArray[Any]) -> Tensor:
            return torch.from_numpy(values[index]).to(logp.device)

        return LossInput(
            logp=logp,
            old=logp.detach() if self.old is None else have(self.old),
            behaviour=have(self.behaviour),
            advantage=have(self.advantage),
            entropy=entropy,
            trajectory=have(self.trajectory),
            step=have(self.step),
            group=have(self.group),
            reference=take(self.reference),
            prepared=take(self.prepared),
        )


def split(
    rows: Sequence[Row], mini_batch: int | None, rng: np.random.Generator, whole_groups: bool = False
) -> list[list[int]]:
    """Row numbers of each optimiser step: about `mini_batch` whole trajectories, those of a group side by side.

    whole_groups: no group is divided; a step then ends with the group that fills it, and there may be fewer steps.
    """
    trajectories: dict[tuple[bool, int], dict[int, list[int]]] = {}
    for number, row in enumerate(rows):
        group = (True, row.group) if row.group >= 0 else (False, row.trajectory)
        trajectories.setdefault(group, {}).setdefault(row.trajectory, []).append(number)
    count = sum(len(members) for members in trajectories.values())
    steps = 1 if mini_batch is None else -(-count // mini_batch)
    if steps == 1:
        return [list(range(len(rows)))]
    groups = list(trajectories.values())
    order = rng.permutation(len(groups))
    units = [members for group in order for members in groups[group].values()]
    edges = [count * i // steps for i in range(steps + 1)]
    if whole_groups:
        ends = np.cumsum([len(groups[group]) for group in order])
        edges = sorted({0, *(int(ends[np.searchsorted(ends, edge)]) for edge in edges[1:])})
    return [sorted(number for unit in units[start:end] for number in unit) for start, end in pairwise(edges)]
