"""Gathering what one training step learns from: the policy's own samples, demonstrations, or recorded preferences."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from renma.errors import RunError
from renma.training.algorithms import Algorithm
from renma.training.batch import Sampled, learnable
from renma.training.batch_metrics import solve_rate
from renma.training.setup import Parts
from renma.types import Group, Trajectory

OnEpisode = Callable[[Trajectory], None]


@dataclass(slots=True)
class Gatherer:
    """Gathers batches from positions of the run's order of tasks; holds no state of its own."""

    parts: Parts
    algorithm: Algorithm

    async def gather(self, position: int, done: OnEpisode | None = None) -> Sampled:
        """One batch from `position` on. Raises RunError when refills end without a single group to learn from."""
        started = time.perf_counter()
        count = self.parts.recipe.rollout.tasks_per_step
        source = self.algorithm.learns_from
        if source == "preferences":
            pairs = self.parts.preferences
            assert pairs is not None
            chosen = [pairs[i % len(pairs)] for i in range(position, position + count)]
            return Sampled(chosen, next_position=position + count, written=True)
        written = await self._demonstrated(position, count) if source != "samples" else []
        if source == "demonstrations":
            return Sampled(written, next_position=position + count, written=True, seconds=time.perf_counter() - started)
        groups, next_position, refills = await self._sampled(position, count, done)
        return Sampled(
            groups,
            await self._greedy(position, len(groups)) if "greedy" in self.algorithm.needs else [],
            written,
            refills,
            next_position,
            time.perf_counter() - started,
        )

    async def _sampled(self, position: int, count: int, done: OnEpisode | None) -> tuple[list[Group], int, int]:
        """`count` groups to learn from, refilled with fresh tasks where the algorithm asks for it.

        A refill draws as many tasks as are expected to fill the batch, going by the share that was kept so far.
        """
        groups = await self._draw(position, count, done)
        if not self.algorithm.refills:
            return groups, position + count, 0
        rollout = self.parts.recipe.rollout
        refills = 0
        while True:
            kept = len(learnable(groups, self.algorithm, rollout.drop_groups_with)[0])
            if kept >= count or refills == self.algorithm.refills:
                break
            share = max(kept / len(groups), 0.25)
            wanted = min(count, math.ceil((count - kept) / share))
            groups += await self._draw(position + len(groups), wanted, done)
            refills += 1
        if not kept:
            raise RunError(
                f"after {refills} refills none of {len(groups)} groups is mixed: solve rate "
                f"{solve_rate(groups):.0%}; take easier or harder tasks, a larger rollout.group_size, or a cold start"
            )
        return groups, position + len(groups), refills

    async def _draw(self, position: int, count: int, done: OnEpisode | None) -> list[Group]:
        tasks = [self.parts.task_at(position + i) for i in range(count)]
        size = self.parts.recipe.rollout.group_size
        return await self.parts.runner.groups(tasks, size, first=position, done=done)

    async def _greedy(self, position: int, count: int) -> list[Trajectory]:
        tasks = [self.parts.task_at(position + i) for i in range(count)]
        groups = await self.parts.greedy.groups(tasks, 1, first=position, purpose="greedy")
        return [group.trajectories[0] for group in groups]

    async def _demonstrated(self, position: int, count: int) -> list[Group]:
        tasks = [self.parts.task_at(position + i) for i in range(count)]
        groups = await self.parts.demonstrator().groups(tasks, 1, first=position, purpose="demonstrations")
        return [group for group in groups if group.trainable]
