"""The loop. One loop for all: synchronous training is the loop with a staleness bound of 0.

Batch n is the groups at positions n·B … (n+1)·B − 1 of the run's order of tasks, and it is consumed at version n. Its
episodes may start once the version is at least n − η, so no token is ever more than η versions old, nothing is thrown
away for its age, and what a batch holds does not depend on timing. On resume at version v the batches from v on are
simply sampled again: none is lost, none is trained twice, and at most (η + 1)·B groups are in flight.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from renma.errors import RunError
from renma.learning.learner import Learner
from renma.learning.scorer import Scorer
from renma.training.algorithms import Algorithm
from renma.training.batch import Batch, describe_batch, make_batch
from renma.training.mismatch import check_mismatch
from renma.training.setup import Parts
from renma.types import Group

if TYPE_CHECKING:
    from renma.training.records import Records


@dataclass(slots=True)
class Loop:
    """Trains `parts.policy` from `version` to the recipe's last step.

    `records` takes every result out (metrics, trajectories, checkpoints); the loop itself writes nothing.
    """

    parts: Parts
    learner: Learner
    algorithm: Algorithm
    records: Records
    version: int = 0
    reference: Scorer | None = None
    _running: dict[int, asyncio.Task[tuple[list[Group], float]]] = field(default_factory=dict)
    _checked: bool = False
    _sync_seconds: float = 0.0

    async def run(self) -> None:
        recipe = self.parts.recipe
        await self._sync()
        try:
            while self.version < recipe.training.steps:
                self._start_batches()
                groups, waited = await self._running.pop(self.version)
                self._learn(groups, waited)
                self.version += 1
                # The sampler gets the new weights before anything is awaited that could need them.
                await self._sync()
                await self.records.step_done(self)
        finally:
            await self._stop_batches()

    async def _sync(self) -> None:
        started = time.perf_counter()
        await self.parts.engine.load_weights(self.version)
        self._sync_seconds = time.perf_counter() - started

    def _start_batches(self) -> None:
        training = self.parts.recipe.training
        for batch in range(self.version, min(self.version + training.staleness + 1, training.steps)):
            if batch not in self._running:
                self._running[batch] = asyncio.create_task(self._sample(batch))

    async def _sample(self, batch: int) -> tuple[list[Group], float]:
        rollout = self.parts.recipe.rollout
        started = time.perf_counter()
        first = batch * rollout.tasks_per_step
        tasks = [self.parts.task_at(first + i) for i in range(rollout.tasks_per_step)]
        groups = await self.parts.runner.groups(
            tasks, rollout.group_size, first=first, done=lambda t: self.records.episode_done(batch, t)
        )
        return groups, time.perf_counter() - started

    async def _stop_batches(self) -> None:
        running, self._running = list(self._running.values()), {}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _learn(self, groups: Sequence[Group], sampling_seconds: float) -> None:
        recipe, algorithm = self.parts.recipe, self.algorithm
        started = time.perf_counter()
        batch = make_batch(
            groups,
            algorithm.advantage,
            min_group=algorithm.min_group_size,
            drop_groups_with=recipe.rollout.drop_groups_with,
            mask_truncated=algorithm.mask_truncated,
        )
        credited = time.perf_counter()
        stats = self._update(groups, batch)
        learned = time.perf_counter()
        sampled = sum(t.sampled_tokens for group in groups for t in group.trajectories)
        metrics = describe_batch(groups, batch, self.version) | {f"learner/{k}": v for k, v in stats.items()}
        metrics |= {
            "seconds_sync": self._sync_seconds,
            "seconds_rollout": sampling_seconds,
            "seconds_credit": credited - started,
            "seconds_learn": learned - credited,
            "sampled_tokens": float(sampled),
            "tokens_per_second_rollout": sampled / max(sampling_seconds, 1e-9),
            "tokens_per_second": sampled / max(sampling_seconds + learned - started, 1e-9),
        }
        self.records.learned(self.version, groups, batch, metrics)

    def _update(self, groups: Sequence[Group], batch: Batch) -> dict[str, float]:
        algorithm, recipe = self.algorithm, self.parts.recipe
        if not batch.rows:
            raise RunError(
                f"step {self.version}: none of the {len(groups)} groups can be trained on (dropped: {batch.dropped}); "
                f"endings: {endings(groups)}; first error: {first_error(groups)}"
            )
        if not self._checked:
            check_mismatch(self.learner, batch.rows, recipe.training.mismatch_tolerance)
            self._checked = True
        return self.learner.update(
            batch.rows,
            loss=algorithm.loss,
            aggregate=algorithm.aggregate,
            old_logprobs=algorithm.old_logprobs,
            kl=algorithm.kl,
            entropy=algorithm.entropy,
            constant_length=float(recipe.sampling.max_tokens * self.parts.max_turns),
            reference=self.reference.logprobs(batch.rows) if self.reference else None,
            seed=self.version,
        )


def endings(groups: Sequence[Group]) -> str:
    counts = Counter(t.stop_reason for group in groups for t in group.trajectories)
    return ", ".join(f"{reason} {count}" for reason, count in counts.most_common())


def first_error(groups: Sequence[Group]) -> str:
    return next((t.error for group in groups for t in group.trajectories if t.error), "none")
