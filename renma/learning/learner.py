"""The learner: batches of rows in, new weights and statistics out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from renma.errors import RecipeError, RunError
from renma.learning.aggregate import weights
from renma.learning.losses import LossInput, PolicyLoss, k2
from renma.learning.optimizer import MasterAdamW, learning_rate
from renma.learning.rows import MissingLogprobs, Row
from renma.learning.scorer import Scorer
from renma.learning.statistics import OnProgress, Progress, UpdateStatistics
from renma.learning.tree import Pack
from renma.recipe import LearnerSection
from renma.types import Floats

OldLogprobs = Literal["behaviour", "recompute", "on_policy"]


@dataclass(frozen=True, slots=True)
class _Objective:
    """What every optimiser step of one batch minimises."""

    loss: PolicyLoss
    aggregate: str
    constant_length: float
    kl: float
    entropy: float
    recomputed: bool

    @property
    def silent_at_zero_advantage(self) -> bool:
        return self.kl == 0 and self.entropy == 0 and bool(getattr(self.loss, "scales_with_advantage", False))


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The trained tokens of one optimiser step's rows, row after row; every array is [n]. old None: pi itself."""

    row: np.ndarray
    trajectory: np.ndarray
    step: np.ndarray
    advantage: np.ndarray
    behaviour: np.ndarray
    old: np.ndarray | None
    reference: np.ndarray | None
    weight: np.ndarray

    @staticmethod
    def of(
        rows: Sequence[Row], old: list[Floats] | None, reference: list[Floats] | None, objective: _Objective
    ) -> _Tokens:
        counts = [int(np.count_nonzero(row.trained)) for row in rows]
        trajectory = np.repeat(np.array([row.trajectory for row in rows], np.int64), counts)
        step = np.concatenate([row.step[row.trained] for row in rows]).astype(np.int64)
        return _Tokens(
            np.repeat(np.arange(len(rows)), counts),
            trajectory,
            step,
            np.concatenate([row.advantages[row.trained] for row in rows]),
            np.concatenate([row.logprobs[row.trained] for row in rows]),
            None if old is None else np.concatenate(old),
            None if reference is None else np.concatenate(reference).astype(np.float32, copy=False),
            weights(objective.aggregate, trajectory, step, constant_length=objective.constant_length),
        )

    def with_signal(self, rows: int, objective: _Objective) -> np.ndarray:
        """[rows] bool: False for a row whose gradient is exactly 0."""
        if not objective.silent_at_zero_advantage:
            return np.ones(rows, np.bool_)
        signal = np.zeros(rows, np.bool_)
        np.logical_or.at(signal, self.row, self.advantage != 0)
        return signal


class Learner:
    """Trains one causal model (or peft model) in place; an engine may sample from the same module between updates.

    output_ids: sorted ids the policy can emit; log-probabilities are normalised over them; None: over all.
    temperature: what actions are sampled at. compute_dtype: the module's; with bfloat16 the masters are float32.
    total_steps: how many batches (calls of `update`) the schedule spans.

    Dropout is off: the model is in evaluation mode whenever it runs, so an unchanged policy has a ratio of 1.
    Raises ModelError when the architecture cannot be trained as a tree; RecipeError for a schedule without an end.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: LearnerSection,
        *,
        output_ids: Tensor | None = None,
        temperature: float = 1.0,
        compute_dtype: torch.dtype = torch.float32,
        total_steps: int | None = None,
    ) -> None:
        if settings.schedule != "constant" and not total_steps:
            raise RecipeError(f"learner.schedule {settings.schedule!r} needs the number of batches; give total_steps")
        self.model, self.settings = model, settings
        self.total_steps = total_steps
        self.optimizer = MasterAdamW(model.named_parameters(), settings, compute_dtype)
        self.scorer = Scorer(
            model,
            output_ids=output_ids,
            temperature=temperature,
            max_positions=settings.max_positions,
            logit_chunk=settings.logit_chunk,
        )
        self.batches = 0  # calls of `update`
        self.steps = 0  # optimiser steps, skipped ones included
        self.skipped = 0

    def logprobs(self, rows: Sequence[Row]) -> list[Floats]:
        """log pi of each row's trained tokens, float32 [trained tokens] a row; nothing is learned."""
        return self.scorer.logprobs(rows)

    def update(
        self,
        rows: Sequence[Row],
        *,
        loss: PolicyLoss,
        aggregate: str = "token_mean",
        old_logprobs: OldLogprobs = "behaviour",
        kl: float = 0.0,
        reference: Sequence[Floats] | None = None,
        entropy: float = 0.0,
        constant_length: float = 1.0,
        seed: int = 0,
        on_progress: OnProgress | None = None,
    ) -> dict[str, float]:
        """Learn from one batch: `epochs` passes, each in optimiser steps of `mini_batch` trajectories.

        The objective is the aggregate of loss + kl * k2(pi, reference) - entropy * H over the trained tokens of one
        optimiser step; its gradient does not depend on how the rows are packed. A trajectory is never divided, a group
        only where `mini_batch` makes it so.

        old_logprobs: what pi_old is: the recorded log-probabilities, the policy as the batch begins, or pi itself (for
        one optimiser step a batch). reference: for each row the log-probabilities [trained tokens] that `kl` pulls
        towards. constant_length: the divisor of `constant`. seed: which groups share an optimiser step.

        Returns means over the trained tokens, or over the optimiser steps: loss, grad_norm (before clipping), entropy,
        the loss's own, kl_reference (k2) where kl > 0. From the first pass, against the recorded log-probabilities:
        kl_behaviour (k3 of KL(mu||pi)), mismatch_mean and mismatch_max (|log pi - log mu|). Then learning_rate (the
        last), positions (computed, all passes), row_tokens (what separate rows would have computed), trained_tokens,
        updates, skipped_updates (the gradient was not finite) and seconds. Where the gradient is exactly 0 the
        optimiser is left alone.

        Raises RecipeError for options that contradict each other; MissingLogprobs when the loss needs recorded
        log-probabilities that a row has not; RunError when nothing is left to train.
        """
        started = time.perf_counter()
        kept = [number for number, row in enumerate(rows) if row.trained.any()]
        if not kept:
            raise RunError("the batch has no trained token: every trajectory was dropped or masked")
        references = _references(rows, kept, kl, reference)
        rows = [rows[number] for number in kept]
        rng = np.random.default_rng(seed)
        parts = [part for _ in range(self.settings.epochs) for part in _split(rows, self.settings.mini_batch, rng)]
        old = self._old(rows, old_logprobs, len(parts))
        objective = _Objective(loss, aggregate, constant_length, kl, entropy, old_logprobs == "recompute")
        numbers = UpdateStatistics()
        progress = Progress(on_progress, sum(len(rows[i]) for part in parts for i in part))
        for number, part in enumerate(parts):
            chosen = [rows[i] for i in part]
            tokens = _Tokens.of(
                chosen,
                None if old is None else [old[i] for i in part],
                None if references is None else [references[i] for i in part],
                objective,
            )
            numbers.first_pass = number * self.settings.epochs < len(parts)
            self._accumulate(chosen, tokens, objective, numbers, progress)
            self._apply(number / len(parts), numbers)
        self.batches += 1
        return numbers.result() | {
            "trained_tokens": float(sum(int(row.trained.sum()) for row in rows)),
            "updates": float(len(parts)),
            "seconds": time.perf_counter() - started,
        }

    def state_dict(self) -> dict[str, Any]:
        """Trained parameters, optimiser and counters: tensors and integers. Tensors are not copied, so save at once."""
        return {
            "parameters": {name: p.detach() for name, p in self.optimizer.parameters.items()},
            "optimizer": self.optimizer.state_dict(),
            "batches": self.batches,
            "steps": self.steps,
            "skipped": self.skipped,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where `state_dict` was taken. Raises RunError when it is of other parameters."""
        own, saved = self.optimizer.parameters, state["parameters"]
        wrong = sorted(set(saved) ^ set(own)) or [name for name, p in own.items() if saved[name].shape != p.shape]
        if wrong:
            raise RunError(f"the saved weights do not fit the model at {wrong[0]!r}; resume with the run's own model")
        for name, parameter in own.items():
            parameter.copy_(saved[name])
        self.optimizer.refresh()
        self.optimizer.load_state_dict(state["optimizer"])
        self.batches, self.steps, self.skipped = (int(state[key]) for key in ("batches", "steps", "skipped"))

    def refresh(self) -> None:
        """The module's weights have been loaded from elsewhere: train on from them, not from the stale masters."""
        self.optimizer.refresh()

    def _old(self, rows: Sequence[Row], old: str, steps: int) -> list[Floats] | None:
        """log pi_old of each row; None where it is that of the policy at the one optimiser step."""
        if old == "behaviour":
            return [row.logprobs[row.trained] for row in rows]
        if old == "recompute":
            return self.logprobs(rows) if steps > 1 else None
        if old != "on_policy":
            raise RecipeError(f"unknown old_logprobs {old!r}: known: behaviour, recompute, on_policy")
        if steps > 1:
            raise RecipeError(
                f"old_logprobs 'on_policy' is for one optimiser step a batch, and there are {steps}; leave "
                "learner.mini_batch out and learner.epochs at 1, or use old_logprobs: recompute"
            )
        return None

    def _accumulate(
        self,
        rows: Sequence[Row],
        tokens: _Tokens,
        objective: _Objective,
        numbers: UpdateStatistics,
        progress: Progress,
    ) -> None:
        """The gradient of one optimiser step. Rows without signal are run for their statistics, without a gradient."""
        tree_model = self.scorer.tree
        self.model.eval()
        self.optimizer.clear()
        tree_model.begin()
        signal = tokens.with_signal(len(rows), objective)
        loss = 0.0
        for learns in (True, False):
            chosen = np.flatnonzero(signal == learns).tolist()
            where = np.flatnonzero(signal[tokens.row] == learns)
            for tree in tree_model.packs([rows[i] for i in chosen], self.settings.max_positions):
                with torch.set_grad_enabled(learns):
                    part = self._pack_loss(tree, where[tree.token], tokens, objective, numbers)
                if learns:
                    part.backward()
                loss += float(part.detach())
                numbers.add("positions", tree.positions)
                progress.advance(sum(len(rows[chosen[i]]) for i in np.unique(tree.rows)))
        tree_model.finish()
        numbers.add("row_tokens", sum(len(row) for row in rows))
        numbers.mean("loss", loss, 1)

    def _pack_loss(
        self, tree: Pack, index: np.ndarray, tokens: _Tokens, objective: _Objective, numbers: UpdateStatistics
    ) -> Tensor:
        """The pack's part of the objective; its statistics go to `numbers`. index [n]: its tokens in `tokens`."""
        device = self.scorer.tree.device

        def take(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values[index]).to(device)

        logp, entropy = self.scorer.tree.logprobs(tree)
        given = LossInput(
            logp=logp,
            old=logp.detach() if tokens.old is None else take(tokens.old),
            behaviour=take(tokens.behaviour),
            advantage=take(tokens.advantage),
            entropy=entropy if objective.entropy else entropy.detach(),
            trajectory=take(tokens.trajectory),
            step=take(tokens.step),
        )
        charge, statistics = objective.loss(given)
        if charge.shape != logp.shape:
            raise ValueError(f"a policy loss gives one value a token, {tuple(logp.shape)}; got {tuple(charge.shape)}")
        if bool(torch.isnan(charge).any()) and bool(torch.isnan(given.behaviour).any()):
            raise MissingLogprobs(
                "the loss needs the log-probabilities recorded when sampling, and these rows have none: train "
                "demonstrations with the sft loss, or ask the engine for log-probabilities"
            )
        numbers.tokens("entropy", entropy)
        for name, values in statistics.items():
            numbers.tokens(name, values)
        if numbers.first_pass:
            numbers.mismatch(given.old if objective.recomputed else logp.detach(), given.behaviour)
        if objective.kl and tokens.reference is not None:
            penalty = k2(logp, take(tokens.reference))
            numbers.tokens("kl_reference", penalty)
            charge = charge + objective.kl * penalty
        if objective.entropy:
            charge = charge - objective.entropy * entropy
        return (charge * take(tokens.weight).to(charge.dtype)).sum()

    def _apply(self, part: float, numbers: UpdateStatistics) -> None:
        """Clip, and take the optimiser step unless the gradient is not finite (skipped, counted) or exactly zero."""
        done = (self.batches + part) / self.total_steps if self.total_steps else 0.0
        rate = learning_rate(self.settings, self.steps, done)
        self.steps += 1
        norm = self.optimizer.gradient_norm()
        finite = bool(np.isfinite(norm))
        numbers.add("skipped_updates", 0 if finite else 1)
        numbers.last["learning_rate"] = rate
        if finite:
            numbers.mean("grad_norm", norm, 1)
        else:
            self.skipped += 1
        if finite and norm > 0:
            limit = self.settings.clip_norm
            self.optimizer.step(rate, 1.0 if limit is None else min(1.0, limit / norm))
        else:
            self.optimizer.clear()


def _references(
    rows: Sequence[Row], kept: Sequence[int], kl: float, reference: Sequence[Floats] | None
) -> list[Floats] | None:
    """The reference's log-probabilities of the rows that are kept."""
    if kl and reference is None:
        raise RecipeError("kl > 0 needs the reference's log-probabilities of every row")
    if reference is None:
        return None
    if [len(values) for values in reference] != [int(row.trained.sum()) for row in rows]:
        raise ValueError("reference needs one array for each row, with one log-probability for each trained token")
    return [np.asarray(reference[number], np.float32) for number in kept]


def _split(rows: Sequence[Row], mini_batch: int | None, rng: np.random.Generator) -> list[list[int]]:
    """Row numbers of each optimiser step: about `mini_batch` whole trajectories, those of a group side by side."""
    trajectories: dict[tuple[bool, int], dict[int, list[int]]] = {}
    for number, row in enumerate(rows):
        group = (True, row.group) if row.group >= 0 else (False, row.trajectory)
        trajectories.setdefault(group, {}).setdefault(row.trajectory, []).append(number)
    count = sum(len(members) for members in trajectories.values())
    steps = 1 if mini_batch is None else -(-count // mini_batch)
    if steps == 1:
        return [list(range(len(rows)))]
    groups = list(trajectories.values())
    units = [members for group in rng.permutation(len(groups)) for members in groups[group].values()]
    edges = [count * i // steps for i in range(steps + 1)]
    return [sorted(number for unit in units[start:end] for number in unit) for start, end in pairwise(edges)]
