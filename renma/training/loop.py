"""The loop. One loop for all: synchronous training is the loop with a staleness bound of 0.

Batch n is the groups at positions n·B … (n+1)·B − 1 of the run's order of tasks, and it is consumed at version n. Its
episodes may start once the version is at least n − η, so no token is ever more than η versions old, nothing is thrown
away for its age, and what a batch holds does not depend on timing. On resume at version v the batches from v on are
simply sampled again: none is lost, none is trained twice, and at most (η + 1)·B groups are in flight.

An algorithm that refills its batches with fresh tasks takes positions as it needs them, batch after batch (η = 0); the
next position is part of a checkpoint.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from renma.errors import RunError
from renma.learning.learner import Learner
from renma.learning.losses import traits
from renma.learning.rows import Row
from renma.profiling import span
from renma.training.algorithms import Algorithm
from renma.training.batch import Batch, Sampled, make_batch
from renma.training.batch_metrics import describe_batch, idle_workers
from renma.training.gather import Gatherer
from renma.training.judges import Judges
from renma.training.mismatch import check_mismatch, mismatch_tolerance
from renma.training.setup import Parts
from renma.training.state import Stateful
from renma.types import Group

if TYPE_CHECKING:
    from renma.training.records import Records


def unprofiled(version: int) -> AbstractContextManager[object]:
    """A step that nobody profiles."""
    return nullcontext()


@dataclass(slots=True)
class Loop:
    """Trains `parts.policy` from `version` to the recipe's last step.

    `records` takes every result out (metrics, trajectories, checkpoints); the loop itself writes nothing.
    position: where the next batch begins in the order of tasks; `start`: where the first does, None: after `version`
    batches of the plain size. profiled: what is open around the step that begins at a version (training/profile.py).
    """

    parts: Parts
    learner: Learner
    algorithm: Algorithm
    records: Records
    version: int = 0
    start: InitVar[int | None] = None
    judges: Judges = field(default_factory=Judges)
    profiled: Callable[[int], AbstractContextManager[object]] = unprofiled
    gatherer: Gatherer = field(init=False)
    position: int = field(init=False)
    _running: dict[int, asyncio.Task[Sampled]] = field(default_factory=dict)
    _checked: bool = False
    _sync_seconds: float = 0.0

    def __post_init__(self, start: int | None) -> None:
        self.gatherer = Gatherer(self.parts, self.algorithm)
        self.position = self.version * self.parts.recipe.rollout.tasks_per_step if start is None else start

    @property
    def states(self) -> dict[str, Stateful]:
        """What a checkpoint must hold besides the policy."""
        states: dict[str, Stateful] = {"learner": self.learner}
        if self.judges.critic is not None:
            states["critic"] = self.judges.critic
        if self.parts.pool is not None:
            states["pool"] = self.parts.pool
        if isinstance(self.algorithm.advantage, Stateful):
            states["advantage"] = self.algorithm.advantage
        return states

    async def run(self) -> None:
        recipe = self.parts.recipe
        await self._sync()
        try:
            while self.version < recipe.training.steps:
                with self.profiled(self.version), span("step"):
                    self._start_batches()
                    with span("rollout"):
                        sampled = await self._running.pop(self.version)
                    self._learn(sampled)
                    self.version += 1
                    self.position = sampled.next_position
                    # The sampler gets the new weights before anything is awaited that could need them.
                    with span("sync"):
                        await self._sync()
                await self.records.step_done(self)
        finally:
            await self._stop_batches()

    async def _sync(self) -> None:
        started = time.perf_counter()
        await self.parts.engine.load_weights(self.version)
        self._sync_seconds = time.perf_counter() - started

    def _start_batches(self) -> None:
        training, size = self.parts.recipe.training, self.parts.recipe.rollout.tasks_per_step
        for ahead in range(min(training.staleness + 1, training.steps - self.version)):
            batch = self.version + ahead
            if batch not in self._running:
                done = partial(self.records.episode_done, batch)
                self._running[batch] = asyncio.create_task(self.gatherer.gather(self.position + ahead * size, done))

    async def _stop_batches(self) -> None:
        running, self._running = list(self._running.values()), {}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _learn(self, sampled: Sampled) -> None:
        started = time.perf_counter()
        drop = self.parts.recipe.rollout.drop_groups_with
        batch = make_batch(sampled, self.algorithm, drop_groups_with=drop, judges=self.judges)
        credited = time.perf_counter()
        with span("learner"):
            stats = self._update(sampled, batch)
        learned = time.perf_counter()
        tokens = sum(t.sampled_tokens for group in sampled.groups for t in group.trajectories)
        metrics = describe_batch(sampled, batch, self.version) | stats
        metrics |= idle_workers(sampled, self.parts.recipe.rollout.slots)
        metrics |= {
            "seconds_sync": self._sync_seconds,
            "seconds_rollout": sampled.seconds,
            "seconds_credit": credited - started,
            "seconds_learn": learned - credited,
            "sampled_tokens": float(tokens),
            "tokens_per_second_rollout": tokens / max(sampled.seconds, 1e-9),
            "tokens_per_second": tokens / max(sampled.seconds + learned - started, 1e-9),
        }
        self.records.learned(self.version, sampled.groups, batch, metrics)

    def _update(self, sampled: Sampled, batch: Batch) -> dict[str, float]:
        """Critic and policy learn from the batch; their statistics by `critic/` and `learner/`."""
        recipe, algorithm, critic = self.parts.recipe, self.algorithm, self.judges.critic
        if not batch.groups:
            raise RunError(
                f"step {self.version}: none of the {len(sampled.groups)} groups can be trained on "
                f"(dropped: {batch.dropped}); endings: {endings(sampled.groups)}; "
                f"first error: {first_error(sampled.groups)}"
            )
        if not self._checked and (fresh := fresh_rows(batch.rows, self.version)):
            check_mismatch(self.learner, fresh, mismatch_tolerance(recipe))
            self._checked = True
        numbers: dict[str, float] = {}
        auxiliary = None
        warming = critic is not None and critic.batches < recipe.critic.warmup_steps
        if critic is not None:
            if critic.shared and not warming and batch.rows:
                auxiliary = critic.objective(batch.rows, batch.critic_rows, batch.targets, batch.values)
            else:
                numbers = critic.update(batch.critic_rows, batch.targets, batch.values, seed=self.version)
        if not warming and batch.rows:  # no rows: nothing stood out, and what has advantage 0 is left out
            stats = self.learner.update(
                batch.rows,
                loss=algorithm.loss,
                aggregate=algorithm.aggregate,
                old_logprobs=algorithm.old_logprobs,
                correction=algorithm.correction,
                kl=0.0 if algorithm.kl_form == "k1_reward" else algorithm.kl,
                kl_form="k3_ratio" if algorithm.kl_form == "k3_ratio" else "k2",
                entropy=algorithm.entropy,
                constant_length=self._constant_length(),
                reference=batch.reference,
                version=self.version,
                auxiliary=auxiliary,
                seed=self.version,
            )
        else:
            stats = {"updates": 0.0}
        if auxiliary is not None:
            numbers = auxiliary.finish()
        return {f"critic/{name}": value for name, value in numbers.items()} | {
            f"learner/{name}": value for name, value in stats.items()
        }

    def _constant_length(self) -> float:
        """The divisor of `constant`: an episode's most tokens; of pairs, the 2 trajectories that make one (dpo)."""
        if traits(self.algorithm.loss).whole_groups:
            return 0.5
        return float(self.parts.recipe.sampling.max_tokens * self.parts.max_turns)


def fresh_rows(rows: Sequence[Row], version: int) -> list[Row]:
    """The rows that the current weights sampled: only there must engine and learner agree."""
    return [
        row
        for row in rows
        if (row.versions[row.trained] == version).all() and not np.isnan(row.logprobs[row.trained]).any()
    ]


def endings(groups: Sequence[Group]) -> str:
    counts = Counter(t.stop_reason for group in groups for t in group.trajectories)
    return ", ".join(f"{reason} {count}" for reason, count in counts.most_common())


def first_error(groups: Sequence[Group]) -> str:
    return next((t.error for group in groups for t in group.trajectories if t.error), "none")
