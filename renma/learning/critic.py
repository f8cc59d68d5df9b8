"""The critic: the value of the state before each sampled token, with a trunk of its own or on the policy's.

A value is read at the position that predicts the token, so the value before a step is that at the last prompt token.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from renma.errors import RecipeError, RunError
from renma.learning.forward import TreeModel, TreeTrunk
from renma.learning.learner import Learner
from renma.learning.optimizer import MasterAdamW, apply_gradients, learning_rate
from renma.learning.rows import Row
from renma.learning.statistics import OnProgress, Progress, UpdateStatistics
from renma.learning.tokens import split
from renma.learning.tree import Pack
from renma.learning.value_head import ValueHead, explained_variance, value_loss
from renma.recipe import CriticSection, LearnerSection
from renma.types import Floats, Group, Ids, Trajectory

if TYPE_CHECKING:
    from renma.models.policy import Policy

FASTER = 10.0  # a critic's learning rate against its actor's, unless one is given


def critic_settings(actor: LearnerSection, learning_rate: float | None = None) -> LearnerSection:
    """The actor's settings with the critic's own learning rate; None: ten times the actor's."""
    return actor.model_copy(update={"learning_rate": learning_rate or FASTER * actor.learning_rate})


class Critic:
    """V of states, learned from targets by regression.

    trunk: "separate" copies the inner model of `model` (the starting policy, or any causal model with its tokenizer)
    and trains the copy; parameters that require no gradient are shared with it, not copied. "shared" reads the values
    off the policy's own hidden states: `update` then trains the head alone, and `objective` makes the loss a part of
    the policy's (`Learner.update(auxiliary=...)`), times `coefficient`; with `detach` it moves the head only.

    settings: as a learner's; `critic_settings` makes them from the actor's. clip: see `value_loss`. total_steps: how
    many batches the schedule spans. seed: decides the head's first weights.

    `batches` counts the batches learned from. Raises ModelError when the architecture cannot be run as a tree;
    RecipeError for a schedule without an end.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: LearnerSection,
        *,
        trunk: Literal["separate", "shared"] = "separate",
        clip: float | None = None,
        coefficient: float = 1.0,
        detach: bool = False,
        total_steps: int | None = None,
        seed: int = 0,
    ) -> None:
        if settings.schedule != "constant" and not total_steps:
            raise RecipeError(f"the critic's schedule {settings.schedule!r} needs the number of batches: total_steps")
        if trunk not in ("separate", "shared"):
            raise RecipeError(f"critic.trunk is {trunk!r}; choose separate or shared")
        self.settings, self.clip, self.coefficient, self.detach = settings, clip, coefficient, detach
        self.shared, self.total_steps = trunk == "shared", total_steps
        whole = TreeModel(model.eval())
        whole.check()
        inner = whole.inner if self.shared else _own_copy(whole.inner)
        self.trunk = TreeTrunk(inner, inner.config.get_text_config(), type(whole.causal).__name__)
        self.trunk.replays_routing = self.shared  # a trunk of its own chooses its own experts
        self.head = ValueHead(int(whole.head.in_features), device=self.trunk.device, seed=seed)
        # One optimiser for each type: the head stays in float32 whatever the trunk computes in.
        self.optimizers = {"head": MasterAdamW(self.head.named_parameters(), settings)}
        if not self.shared and any(p.requires_grad for p in inner.parameters()):
            dtype = self.trunk.embedding.weight.dtype
            self.optimizers["trunk"] = MasterAdamW(inner.named_parameters(), settings, dtype)
        self.batches = 0
        self.steps = 0  # optimiser steps, skipped ones included
        self.skipped = 0

    @staticmethod
    def of(policy: Policy, section: CriticSection, actor: LearnerSection, learner: Learner) -> Critic:
        """The critic that a recipe's `critic` section describes, begun from the policy as it now is."""
        return Critic(
            policy.model,
            critic_settings(actor, section.learning_rate),
            trunk=section.trunk,
            clip=section.clip,
            coefficient=section.coefficient,
            detach=section.detach,
            total_steps=learner.total_steps,
        )

    def values(self, rows: Sequence[Row]) -> list[Floats]:
        """V of the state before each trained token, float32 [trained tokens] a row; nothing is learned."""
        self.trunk.inner.eval()
        return self.trunk.each_token(
            rows, self.settings.max_positions, lambda tree: self._at_tokens(self.trunk.hidden(tree), tree)
        )

    def state_values(self, groups: Sequence[Group], rows: Sequence[Row]) -> tuple[list[Floats], list[list[float]]]:
        """`values` of the rows, and for each group, for each trainable trajectory, the value after its last step.

        That is 0 where the episode terminated (status "done"). Where a limit cut it, it is V at the end of
        `next_prompt_ids`; without such a prompt, or with one longer than the model has positions, V after the last
        sampled token: where the policy would have gone on.
        """
        cut = [[t.status == "truncated" for t in group.trainable] for group in groups]
        limit = getattr(self.trunk.config, "max_position_embeddings", None)
        ends = [
            _end_row(t, limit, number)
            for number, t in enumerate(t for group in groups for t in group.trainable if t.status == "truncated")
        ]
        found = self.values([*rows, *ends])
        after = iter(found[len(rows) :])
        final = [[float(next(after)[0]) if is_cut else 0.0 for is_cut in group] for group in cut]
        return found[: len(rows)], final

    def update(
        self,
        rows: Sequence[Row],
        targets: Sequence[Floats],
        old_values: Sequence[Floats],
        *,
        seed: int = 0,
        on_progress: OnProgress | None = None,
    ) -> dict[str, float]:
        """Learn from one batch: `epochs` passes, each in optimiser steps of `mini_batch` trajectories.

        targets: for each row [trained tokens], NaN where a token has none (of a step only its first token may have
        one). old_values: as `values` gave them before, looked at where there is a target only. The objective is the
        mean of `value_loss` over the targets of one optimiser step; how rows are packed changes nothing. seed: which
        groups share an optimiser step.

        Returns value_loss, value_clip_share (where `clip` is set), grad_norm (before clipping): means over targets or
        optimiser steps; explained_variance of the old values (left out where all targets are equal), value_mean (old),
        target_mean, targets (their number), learning_rate (the last), positions, updates, skipped_updates, seconds.

        Raises RunError when no token has a target.
        """
        started = time.perf_counter()
        known = _Known.of(rows, targets, old_values)
        if not known.rows:
            raise RunError("the critic has nothing to learn from: no sampled token of the batch has a target")
        rng = np.random.default_rng(seed)
        parts = [p for _ in range(self.settings.epochs) for p in split(known.rows, self.settings.mini_batch, rng)]
        numbers = UpdateStatistics()
        progress = Progress(on_progress, sum(len(known.rows[i]) for part in parts for i in part))
        for number, part in enumerate(parts):
            self._accumulate(known.of_rows(part), numbers, progress)
            self.apply(number / len(parts), numbers)
        self.batches += 1
        return (
            numbers.result()
            | known.described()
            | {"updates": float(len(parts)), "seconds": time.perf_counter() - started}
        )

    def objective(
        self,
        rows: Sequence[Row],
        critic_rows: Sequence[Row],
        targets: Sequence[Floats],
        old_values: Sequence[Floats],
    ) -> ValueObjective:
        """The critic's loss as a part of the policy's, for one `Learner.update` of `rows`; call its `finish` after.

        critic_rows, targets and old_values as in `update`. A row is found among the critic's by its trajectory and
        first step; one that is none of them (a demonstration's) has no targets.
        """
        _check_sizes(critic_rows, targets, old_values)
        places = {_key(row): number for number, row in enumerate(critic_rows)}
        found = [places.get(_key(row)) for row in rows]
        nothing = [np.full(int(np.count_nonzero(row.trained)), np.nan, np.float32) for row in rows]
        return ValueObjective(
            self,
            rows,
            [empty if at is None else targets[at] for at, empty in zip(found, nothing, strict=True)],
            [empty if at is None else old_values[at] for at, empty in zip(found, nothing, strict=True)],
        )

    def state_dict(self) -> dict[str, Any]:
        """Trained parameters, optimisers and counters: tensors and integers. Tensors are not copied: save at once."""
        return {
            "parameters": {
                part: {name: p.detach() for name, p in optimizer.parameters.items()}
                for part, optimizer in self.optimizers.items()
            },
            "optimizers": {part: optimizer.state_dict() for part, optimizer in self.optimizers.items()},
            "batches": self.batches,
            "steps": self.steps,
            "skipped": self.skipped,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where `state_dict` was taken. Raises RunError when it is of other parameters."""
        saved = {f"{part}.{name}": p for part, own in state["parameters"].items() for name, p in own.items()}
        own = {f"{part}.{name}": p for part, o in self.optimizers.items() for name, p in o.parameters.items()}
        wrong = sorted(set(saved) ^ set(own)) or [name for name, p in own.items() if saved[name].shape != p.shape]
        if wrong:
            raise RunError(
                f"the saved critic does not fit at {wrong[0]!r}; resume with the run's own model and critic.trunk"
            )
        for name, parameter in own.items():
            parameter.copy_(saved[name])
        for part, optimizer in self.optimizers.items():
            optimizer.refresh()
            optimizer.load_state_dict(state["optimizers"][part])
        self.batches, self.steps, self.skipped = (int(state[key]) for key in ("batches", "steps", "skipped"))

    def clear(self) -> None:
        """Forget all gradients."""
        for optimizer in self.optimizers.values():
            optimizer.clear()

    def apply(self, part: float, numbers: UpdateStatistics) -> None:
        """Clip, and take the optimiser step unless the gradient is not finite (skipped, counted) or exactly zero."""
        done = (self.batches + part) / self.total_steps if self.total_steps else 0.0
        rate = learning_rate(self.settings, self.steps, done)
        self.steps += 1
        if not apply_gradients(list(self.optimizers.values()), self.settings, rate, numbers):
            self.skipped += 1

    def charge(self, value: Tensor, target: NDArray[Any], old: NDArray[Any], numbers: UpdateStatistics) -> Tensor:
        """The summed loss of [n] values that have a target; its statistics go to `numbers`."""
        device = value.device
        loss, clipped = value_loss(
            value, torch.from_numpy(target).to(device), torch.from_numpy(old).to(device), self.clip
        )
        numbers.tokens("value_loss", loss)
        if self.clip is not None:
            numbers.tokens("value_clip_share", clipped.float())
        return loss.sum()

    def _accumulate(self, known: _Known, numbers: UpdateStatistics, progress: Progress) -> None:
        self.trunk.inner.eval()
        self.clear()
        self.trunk.begin()
        target, old = np.concatenate(known.targets), np.concatenate(known.old)
        for tree in self.trunk.packs(known.rows, self.settings.max_positions):
            with torch.set_grad_enabled("trunk" in self.optimizers):
                hidden = self.trunk.hidden(tree)
            total = self.charge(self._at_tokens(hidden, tree), target[tree.token], old[tree.token], numbers)
            (total / len(target)).backward()
            numbers.add("positions", tree.positions)
            progress.advance(sum(len(known.rows[i]) for i in np.unique(tree.rows)))
        self.trunk.finish()

    def _at_tokens(self, hidden: Tensor, tree: Pack) -> Tensor:
        """V [n] before each of the pack's tokens, from the hidden states [M, H] of its predictors."""
        value: Tensor = self.head(hidden)
        return value[torch.from_numpy(tree.token_predictor).to(value.device)]


class ValueObjective:
    """The loss of a critic on the policy's trunk, over the rows of one `Learner.update` (an `Auxiliary`)."""

    def __init__(
        self, critic: Critic, rows: Sequence[Row], targets: Sequence[Floats], old_values: Sequence[Floats]
    ) -> None:
        _check_sizes(rows, targets, old_values)
        self.critic = critic
        self.targets = [np.asarray(values, np.float32) for values in targets]
        self.old = [np.asarray(values, np.float32) for values in old_values]
        self.numbers = UpdateStatistics()
        self._known = _Known.of(rows, targets, old_values)
        self._target = self._old = np.empty(0, np.float32)
        self._count = 0

    def begin(self, rows: Sequence[int]) -> None:
        self._target = np.concatenate([self.targets[i] for i in rows])
        self._old = np.concatenate([self.old[i] for i in rows])
        self._count = int(np.count_nonzero(~np.isnan(self._target)))
        self.critic.clear()

    def loss(self, hidden: Tensor, predictor: Tensor, index: NDArray[np.int64]) -> Tensor:
        known = np.flatnonzero(~np.isnan(self._target[index]))
        if not len(known):
            return hidden.new_zeros((), dtype=torch.float32)
        value = self.critic.head(hidden.detach() if self.critic.detach else hidden)
        at = predictor[torch.from_numpy(known).to(predictor.device)]
        index = index[known]
        total = self.critic.charge(value[at], self._target[index], self._old[index], self.numbers)
        return self.critic.coefficient / self._count * total

    def apply(self, done: float) -> None:
        self.critic.apply(done, self.numbers)
        self.numbers.add("updates", 1)

    def finish(self) -> dict[str, float]:
        """The batch is learned: counts it, and gives the statistics of `Critic.update` that the learner's own lack."""
        self.critic.batches += 1
        return self.numbers.result() | self._known.described()


class _Known(NamedTuple):
    """Rows of which exactly the tokens with a target count as trained; for each row its targets and old values."""

    rows: list[Row]
    targets: list[Floats]
    old: list[Floats]

    @staticmethod
    def of(rows: Sequence[Row], targets: Sequence[Floats], old_values: Sequence[Floats]) -> _Known:
        _check_sizes(rows, targets, old_values)
        known = _Known([], [], [])
        for row, target, old in zip(rows, targets, old_values, strict=True):
            has = ~np.isnan(target)
            if has.any():
                trained = np.zeros(len(row), np.bool_)
                trained[np.flatnonzero(row.trained)[has]] = True
                known.rows.append(replace(row, trained=trained))
                known.targets.append(np.asarray(target, np.float32)[has])
                known.old.append(np.asarray(old, np.float32)[has])
        return known

    def of_rows(self, numbers: Sequence[int]) -> _Known:
        return _Known(
            [self.rows[i] for i in numbers], [self.targets[i] for i in numbers], [self.old[i] for i in numbers]
        )

    def described(self) -> dict[str, float]:
        """What the values that credit was given from were worth."""
        if not self.rows:
            return {"targets": 0.0}
        target, old = np.concatenate(self.targets), np.concatenate(self.old)
        explained = explained_variance(old, target)
        return {
            "targets": float(len(target)),
            "target_mean": float(target.mean(dtype=np.float64)),
            "value_mean": float(old.mean(dtype=np.float64)),
        } | ({} if explained is None else {"explained_variance": explained})


def _own_copy(inner: Any) -> Any:
    """A copy of what is trained; frozen weights (LoRA's base) never change, so they are the same tensors."""
    return copy.deepcopy(inner, {id(p): p for p in inner.parameters() if not p.requires_grad})


def _end_row(trajectory: Trajectory, limit: int | None, number: int) -> Row:
    """A row whose one trained token is a stand-in: the value before it is that of the state the episode was cut in."""
    last = trajectory.steps[-1]
    ids = trajectory.next_prompt_ids
    if ids is None or not len(ids) or (limit is not None and len(ids) > limit):
        ids = np.concatenate([last.prompt_ids, last.action_ids])
    return _reading_row(ids, number)


def _reading_row(ids: Ids, number: int) -> Row:
    size = len(ids) + 1
    trained = np.arange(size) == size - 1
    zeros, whole = np.zeros(size, np.float32), np.where(trained, 0, -1).astype(np.int32)
    return Row(np.append(ids, 0).astype(np.int32), trained, zeros, zeros, whole, whole, number)


def _key(row: Row) -> tuple[int, int]:
    """Which row of a batch it is: a step is in one row only."""
    return row.trajectory, int(row.step[row.trained][0]) if row.trained.any() else -1


def _check_sizes(rows: Sequence[Row], targets: Sequence[Floats], old_values: Sequence[Floats]) -> None:
    sizes = [int(np.count_nonzero(row.trained)) for row in rows]
    for name, arrays in (("targets", targets), ("old_values", old_values)):
        if [len(values) for values in arrays] != sizes:
            raise ValueError(f"{name} needs one array for each row, with one number for each trained token")
