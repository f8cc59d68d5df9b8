"""The learner: batches of rows in, new weights and statistics out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from renma.errors import RecipeError, RunError
from renma.learning.correction import Correction
from renma.learning.losses.base import PolicyLoss
from renma.learning.losses.kl import KlForm
from renma.learning.objective import Objective, OldLogprobs
from renma.learning.optimizer import MasterAdamW, apply_gradients, learning_rate
from renma.learning.rows import Row
from renma.learning.scorer import Scorer
from renma.learning.statistics import OnProgress, Progress, UpdateStatistics
from renma.learning.tokens import Tokens, split
from renma.learning.value_head import Auxiliary
from renma.profiling import span, timed
from renma.recipe import LearnerSection
from renma.types import Floats


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
        correction: Correction | None = None,
        kl: float = 0.0,
        kl_form: KlForm = "k2",
        reference: Sequence[Floats] | None = None,
        entropy: float = 0.0,
        constant_length: float = 1.0,
        version: int | None = None,
        auxiliary: Auxiliary | None = None,
        seed: int = 0,
        on_progress: OnProgress | None = None,
    ) -> dict[str, float]:
        """Learn from one batch: `epochs` passes, each in optimiser steps of `mini_batch` trajectories.

        The objective is the aggregate of factor * loss + kl * KL(pi, reference) - entropy * H over the trained tokens
        of one optimiser step (`Objective`); its gradient does not depend on how the rows are packed. A trajectory is
        never divided, a group only where `mini_batch` makes it so and the loss bears it.

        old_logprobs: what pi_old is: the recorded log-probabilities, the policy as the batch begins, or pi itself (for
        one optimiser step a batch). correction: weighs or rejects tokens by log pi_old - log mu, pi_old the policy as
        the batch begins; a rejected token is in no normaliser. kl_form: k2, or k3 times pi/pi_old. reference: for each
        row the log-probabilities [trained tokens] that `kl` pulls towards and the loss may look at. constant_length:
        the divisor of `constant`. version: the policy version that the weights are now; where it is given, older
        samples under a ratio that cannot see their age are refused. auxiliary: a further part of the objective, a
        critic's on the policy's trunk; rows without a signal of their own learn from it too. seed: which groups share
        an optimiser step.

        Returns means over the trained tokens, or over the optimiser steps: loss, grad_norm (before clipping), entropy,
        the loss's own, kl_reference (k3) where there is a reference, kl_penalty where kl > 0. From the first pass, with
        Delta = log pi - log mu against the recorded log-probabilities (pi_old's where it is recomputed), correction on
        or off: mismatch_mean and mismatch_max (|Delta|), kl_behaviour (k3 of KL(mu||pi)), effective_sample_size (of the
        ratios exp(Delta), as a share of the tokens, in (0, 1]), perplexity_ratio (exp(mean Delta): the sampler's
        perplexity over the learner's), mismatch_outside_share (tokens whose ratio is outside [0.5, 2]),
        correction_clip_share and correction_reject_share (tokens whose weight the cap cut, tokens taken out; 0 without
        a correction). Then learning_rate (the last), positions (computed with a gradient or for statistics, all
        passes), row_tokens (what separate rows would have computed), trained_tokens, updates, skipped_updates (the
        gradient was not finite) and seconds. Where the gradient is exactly 0 the optimiser is left alone.

        Raises RecipeError for options that contradict each other; MissingLogprobs when the loss or the correction
        needs recorded log-probabilities that a row has not; RunError when nothing is left to train.
        """
        started = time.perf_counter()
        kept = [number for number, row in enumerate(rows) if row.trained.any()]
        if not kept:
            raise RunError("the batch has no trained token: every trajectory was dropped or masked")
        objective = Objective(loss, aggregate, constant_length, kl, kl_form, entropy, old_logprobs, correction)
        objective.check()
        references = _references(rows, kept, objective, reference)
        rows = [rows[number] for number in kept]
        objective.check_rows(rows, version)
        rng = np.random.default_rng(seed)
        whole = objective.traits.whole_groups
        parts = [p for _ in range(self.settings.epochs) for p in split(rows, self.settings.mini_batch, rng, whole)]
        began = self._began(rows, objective, len(parts))
        numbers = UpdateStatistics()
        progress = Progress(on_progress, sum(len(rows[i]) for part in parts for i in part))
        for number, part in enumerate(parts):
            chosen = [rows[i] for i in part]
            policy = None if began is None else [began[i] for i in part]
            old = _old(chosen, policy, objective, len(parts))
            tokens = Tokens.of(chosen, old, None if references is None else [references[i] for i in part])
            numbers.measures = number * self.settings.epochs < len(parts)
            tokens = self._ready(chosen, tokens, policy, objective, numbers, moved=number > 0)
            if auxiliary is not None:
                auxiliary.begin([kept[i] for i in part])
            self._accumulate(chosen, tokens, objective, auxiliary, numbers, progress)
            self._apply(number / len(parts), numbers)
            if auxiliary is not None:
                auxiliary.apply(number / len(parts))
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

    def _began(self, rows: Sequence[Row], objective: Objective, steps: int) -> list[Floats] | None:
        """log pi of each row as the batch begins, where it must be known beforehand; None where the packs will tell."""
        if objective.old_logprobs == "on_policy" and steps > 1:
            raise RecipeError(
                f"old_logprobs 'on_policy' is for one optimiser step a batch, and there are {steps}; leave "
                "learner.mini_batch out and learner.epochs at 1, or use old_logprobs: recompute"
            )
        if objective.correction is None and (objective.old_logprobs != "recompute" or steps == 1):
            return None
        return self.logprobs(rows)

    def _ready(
        self,
        rows: Sequence[Row],
        tokens: Tokens,
        began: list[Floats] | None,
        objective: Objective,
        numbers: UpdateStatistics,
        moved: bool,
    ) -> Tokens:
        """The tokens with all that is known of a whole optimiser step before its first pack: the correction's factors,
        what the loss makes ready, the aggregate's weights. moved: the policy is no longer `began`."""
        loss = objective.traits
        policy = None if began is None else np.concatenate(began)
        if policy is not None:
            corrected = None
            if objective.correction is not None:
                tokens, corrected = tokens.corrected(objective.correction, policy)
            if numbers.measures:
                numbers.mismatch.add(tokens.delta(policy), corrected)
                numbers.measures = False
        if loss.prepare is not None and (
            loss.level != "sequence" or (tokens.old is not None and tokens.divided(len(rows)))
        ):
            if moved or policy is None:
                policy = np.concatenate(self.logprobs(rows))
            tokens, summary = tokens.prepared_for(objective, policy)
            for name, value in summary.items():
                numbers.mean(name, value, 1)
        return tokens.weighed(objective)

    def _accumulate(
        self,
        rows: Sequence[Row],
        tokens: Tokens,
        objective: Objective,
        auxiliary: Auxiliary | None,
        numbers: UpdateStatistics,
        progress: Progress,
    ) -> None:
        """The gradient of one optimiser step. Of the rows without signal a share is run, for the statistics alone."""
        tree_model = self.scorer.tree
        self.model.eval()
        self.optimizer.clear()
        tree_model.begin()
        signal = tokens.with_signal(len(rows), objective) if auxiliary is None else np.ones(len(rows), np.bool_)
        policy = np.full(len(tokens), np.nan, np.float32)
        loss = 0.0
        for learns in (True, False):
            chosen = (np.flatnonzero(signal) if learns else self._measured(np.flatnonzero(~signal))).tolist()
            stands_for = 1.0 if learns else np.count_nonzero(~signal) / max(1, len(chosen))
            where = np.flatnonzero(np.isin(tokens.row, chosen))
            for tree in tree_model.packs([rows[i] for i in chosen], self.settings.max_positions):
                index = where[tree.token]
                with torch.set_grad_enabled(learns):
                    hidden = tree_model.hidden(tree)
                    logp, entropy = tree_model.score(tree, hidden)
                    part = self._pack_loss(logp, entropy, index, tokens, objective, numbers, stands_for)
                    if auxiliary is not None:
                        predictor = torch.from_numpy(tree.token_predictor).to(hidden.device)
                        part = part + auxiliary.loss(hidden, predictor, index)
                if learns:
                    with span("backward"):
                        part.backward()
                policy[index] = logp.detach().float().cpu().numpy()
                loss += float(part.detach())
                numbers.add("positions", tree.positions)
                progress.advance(sum(len(rows[chosen[i]]) for i in np.unique(tree.rows)))
        tree_model.finish()
        if numbers.measures:
            numbers.mismatch.add(tokens.delta(policy))
        numbers.add("row_tokens", sum(len(row) for row in rows))
        numbers.mean("loss", loss, 1)

    def _measured(self, rows: np.ndarray) -> np.ndarray:
        """The share of `rows` that is run for the statistics: neighbours, which share a prompt, others each batch."""
        count = int(np.ceil(len(rows) * self.settings.measured_share))
        return np.sort(np.roll(rows, -self.batches * count)[:count])

    @timed("loss")
    def _pack_loss(
        self,
        logp: Tensor,
        entropy: Tensor,
        index: np.ndarray,
        tokens: Tokens,
        objective: Objective,
        numbers: UpdateStatistics,
        stands_for: float,
    ) -> Tensor:
        """The pack's part of the objective; its statistics go to `numbers`. index [n]: its tokens in `tokens`.

        stands_for: how many tokens each counts for in the means.
        """
        assert tokens.weight is not None
        given = tokens.given(index, logp, entropy if objective.entropy else entropy.detach())
        factor = None if tokens.factor is None else torch.from_numpy(tokens.factor[index]).to(logp.device)
        charge, statistics = objective.charge(given, factor)
        numbers.tokens("entropy", entropy, stands_for)
        for name, values in statistics.items():
            numbers.tokens(name, values, stands_for)
        weight = torch.from_numpy(tokens.weight[index]).to(logp.device, charge.dtype)
        return (charge * weight).sum()

    def _apply(self, part: float, numbers: UpdateStatistics) -> None:
        """Clip, and take the optimiser step unless the gradient is not finite (skipped, counted) or exactly zero."""
        done = (self.batches + part) / self.total_steps if self.total_steps else 0.0
        rate = learning_rate(self.settings, self.steps, done)
        self.steps += 1
        if not apply_gradients([self.optimizer], self.settings, rate, numbers):
            self.skipped += 1


def _old(rows: Sequence[Row], began: list[Floats] | None, objective: Objective, steps: int) -> list[Floats] | None:
    """log pi_old of each row; None where it is that of the policy at the one optimiser step."""
    if objective.old_logprobs == "behaviour":
        return [row.logprobs[row.trained] for row in rows]
    return began if objective.old_logprobs == "recompute" and steps > 1 else None


def _references(
    rows: Sequence[Row], kept: Sequence[int], objective: Objective, reference: Sequence[Floats] | None
) -> list[Floats] | None:
    """The reference's log-probabilities of the rows that are kept."""
    if reference is None and (objective.kl or objective.traits.needs_reference):
        what = "kl > 0" if objective.kl else "the loss"
        raise RecipeError(f"{what} needs the reference's log-probabilities of every row")
    if reference is None:
        return None
    if [len(values) for values in reference] != [int(row.trained.sum()) for row in rows]:
        raise ValueError("reference needs one array for each row, with one log-probability for each trained token")
    return [np.asarray(reference[number], np.float32) for number in kept]
