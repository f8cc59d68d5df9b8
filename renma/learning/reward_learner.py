"""Training a reward model: pairs for the outcome form, labelled steps for the process form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from renma.errors import DataError
from renma.learning.optimizer import MasterAdamW, apply_gradients, learning_rate
from renma.learning.reward_model import Reading, RewardModel, reading
from renma.learning.statistics import UpdateStatistics
from renma.preferences.base import chosen_and_rejected, labels_of
from renma.recipe import LearnerSection
from renma.types import Group

Unit = tuple[tuple[Reading, ...], Tensor]
"""What is never divided: a pair's two readings and no target, or one reading and its labels [n] (NaN: not judged)."""


def bradley_terry(chosen: Tensor, rejected: Tensor) -> Tensor:
    """[n] -log sigma(r_chosen - r_rejected) of each pair (Ouyang et al. 2022, eq. 1, one pair a prompt)."""
    return -functional.logsigmoid(chosen - rejected)


def step_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """[n] the cross-entropy of each step's score, a logit, to its label from 0 to 1; 0 where the label is NaN.

    Lightman et al. 2023; labels between 0 and 1 are the soft estimation of Wang et al. 2024 (Math-Shepherd).
    """
    known = torch.isfinite(labels)
    charge = functional.binary_cross_entropy_with_logits(scores, torch.where(known, labels, 0.0), reduction="none")
    return torch.where(known, charge, 0.0)


class RewardLearner:
    """Trains a RewardModel in place, a batch of groups an optimiser step.

    settings: rate, schedule, clipping and decay; `mini_batch` and `epochs` are the caller's. total_steps: how many
    batches the schedule spans. In the outcome form a group is a pair, in the process form its trajectories' steps have
    labels (renma/preferences). A pair is never divided; what is computed at once is bounded by the model's
    max_positions, and the gradient does not depend on how a batch is cut for it.
    """

    def __init__(
        self,
        model: RewardModel,
        settings: LearnerSection,
        *,
        compute_dtype: torch.dtype = torch.float32,
        total_steps: int | None = None,
    ) -> None:
        self.model, self.settings, self.total_steps = model, settings, total_steps
        self.optimizer = MasterAdamW(model.named_parameters().items(), settings, compute_dtype)
        self.steps = 0

    def update(self, groups: Sequence[Group]) -> dict[str, float]:
        """One optimiser step on the mean over the batch's pairs or labelled steps.

        Returns loss; accuracy (of pairs: the chosen scored higher, equal scores count half; of steps: on the label's
        side of 1/2, those labelled 1/2 left out); margin (of pairs: the mean of r_chosen - r_rejected), or score_good
        and score_bad (the mean probability of steps labelled over and under 1/2); items (pairs or labelled steps),
        grad_norm, learning_rate, skipped_updates. Raises DataError for groups that are no pairs, or where no step has
        a label.
        """
        units = self._units(groups)
        numbers = UpdateStatistics()
        total = _items(units)
        self.model.trunk.begin()
        for chunk in _chunks(units, self.model.max_positions):
            charge = self._charge(chunk, numbers)
            (charge / total).backward()
        self.model.trunk.finish()
        self._apply(numbers)
        return numbers.result() | {"items": float(total)}

    @torch.no_grad()
    def measure(self, groups: Sequence[Group]) -> dict[str, float]:
        """What `update` says of its groups (not of the gradient), without learning."""
        units = self._units(groups)
        numbers = UpdateStatistics()
        self.model.trunk.begin()
        for chunk in _chunks(units, self.model.max_positions):
            self._charge(chunk, numbers)
        return numbers.result() | {"items": float(_items(units))}

    @torch.no_grad()
    def centre(self, groups: Sequence[Group]) -> float:
        """Shift the scores so that their mean over the groups' trajectories is 0; returns what was taken away.

        A loss over differences leaves the zero open (Ouyang et al. 2022 set it so before reinforcement learning).
        """
        readings = [reading(t, "outcome") for group in groups for t in group.trainable]
        mean = float(np.mean(np.concatenate(self.model.scores(readings)), dtype=np.float64))
        self.model.head.bias.sub_(mean)
        self.optimizer.refresh()
        return mean

    def _units(self, groups: Sequence[Group]) -> list[Unit]:
        units: list[Unit] = []
        nothing = torch.zeros(0)
        for group in groups:
            if self.model.form == "outcome":
                members = chosen_and_rejected(group)
                units.append((tuple(reading(t, "outcome") for t in members), nothing))
                continue
            for trajectory in group.trainable:
                labels, read = labels_of(trajectory), reading(trajectory, "process")
                given = [labels[step] for step in read.steps]
                values = [np.nan if label is None else label for label in given]
                units.append(((read,), torch.tensor(values, dtype=torch.float32, device=self.model.trunk.device)))
        if not _items(units):
            raise DataError("there is nothing to train the reward model on: no pair, and no step with a label")
        return units

    def _charge(self, units: Sequence[Unit], numbers: UpdateStatistics) -> Tensor:
        """The sum of the units' losses; their statistics go to `numbers`."""
        scores = self.model.raw([read for reads, _ in units for read in reads])
        if self.model.form == "outcome":
            charge = _charge_pairs(scores, numbers)
        else:
            charge = _charge_steps(scores, torch.cat([labels for _, labels in units]), numbers)
        if len(charge):
            numbers.mean("loss", float(charge.detach().mean()), len(charge))
        return charge.sum()

    def _apply(self, numbers: UpdateStatistics) -> None:
        """Clip, and take the optimiser step unless the gradient is not finite (skipped, counted) or exactly zero."""
        rate = learning_rate(self.settings, self.steps, self.steps / self.total_steps if self.total_steps else 0.0)
        self.steps += 1
        apply_gradients([self.optimizer], self.settings, rate, numbers)


def _charge_pairs(scores: Tensor, numbers: UpdateStatistics) -> Tensor:
    """The loss [n] of n pairs from their 2 n scores, the chosen's before the rejected's."""
    chosen, rejected = scores.view(-1, 2).unbind(1)
    margin = (chosen - rejected).detach()
    numbers.mean("accuracy", float((0.5 * (1 + margin.sign())).mean()), len(margin))
    numbers.mean("margin", float(margin.mean()), len(margin))
    return bradley_terry(chosen, rejected)


def _charge_steps(scores: Tensor, labels: Tensor, numbers: UpdateStatistics) -> Tensor:
    """The loss [n] of the n steps that have a label."""
    known = torch.isfinite(labels)
    charge, scores, labels = step_loss(scores, labels)[known], scores.detach()[known], labels[known]
    sided = labels != 0.5
    if bool(sided.any()):
        right = 0.5 * (1 + (scores.sign() * (labels - 0.5).sign())[sided])
        numbers.mean("accuracy", float(right.mean()), len(right))
    for name, side in (("score_good", labels > 0.5), ("score_bad", labels < 0.5)):
        if bool(side.any()):
            numbers.mean(name, float(scores[side].sigmoid().mean()), int(side.sum()))
    return charge


def _items(units: Sequence[Unit]) -> int:
    """Pairs, or labelled steps."""
    return sum(int(torch.isfinite(labels).sum()) if len(reads) == 1 else 1 for reads, labels in units)


def _chunks(units: Sequence[Unit], max_positions: int) -> Iterator[list[Unit]]:
    """The units, cut so that the positions of each piece stay below the bound; a longer unit is a piece of its own.

    A pair's loss needs both its scores at once: the piece is what the backward pass holds.
    """
    piece: list[Unit] = []
    size = 0
    for unit in units:
        positions = sum(read.positions for read in unit[0])
        if piece and size + positions > max_positions:
            yield piece
            piece, size = [], 0
        piece.append(unit)
        size += positions
    if piece:
        yield piece
