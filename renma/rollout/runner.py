"""Many episodes at once, grouped by task. Which episode finishes first never changes what is sampled."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from renma.agents.base import Agent
from renma.environments.base import Environment
from renma.errors import RenmaError
from renma.inference.base import Engine
from renma.profiling import interval
from renma.rewards.base import NamedReward, combine
from renma.rollout.episode import EpisodeRules, describe, run_episode
from renma.seeding import seed_for
from renma.types import Group, Task, Trajectory

MakeAgent = Callable[[Engine, Task, int, list[dict[str, Any]], Callable[[int], int], tuple], Agent]
"""(engine, task, member, tools, seed of a turn, key that orders requests) -> a fresh agent."""


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs episodes over one engine, at most `concurrency` open at once: as one ends, the next of the one queue begins,
    so that no place waits for the longest.

    rewards: empty, the environment's own step rewards are the return. Each trajectory is scored as it ends, while the
    others are sampled; what may hold the event loop up runs in threads, for `reward_workers` trajectories at once.
    """

    engine: Engine
    make_environment: Callable[[], Environment]
    make_agent: MakeAgent
    rules: EpisodeRules
    rewards: Sequence[NamedReward] = ()
    run_seed: int = 0
    concurrency: int = 64
    reward_workers: int = 8

    async def groups(
        self,
        tasks: Sequence[Task],
        size: int,
        *,
        first: int = 0,
        purpose: str = "train",
        done: Callable[[Trajectory], None] | None = None,
    ) -> list[Group]:
        """One group of `size` members for each task, in order.

        first: the position of tasks[0] in the run's order of tasks; with `purpose` it makes the seeds, so that a task
        met again in a later epoch is sampled afresh. done: called as each episode ends.
        """
        finished: dict[tuple[int, int], Trajectory] = {}
        waiting = deque((index, member) for index in range(len(tasks)) for member in range(size))
        at_once = all(reward.instant for reward in self.rewards)
        threads = self.reward_workers if any(reward.blocking for reward in self.rewards) else len(waiting)
        scorers = asyncio.Semaphore(max(threads, 1))

        async def worker() -> None:
            # One worker keeps one place open in the engine from its first episode to its last: an engine that waits for
            # every open episode then never decodes while the next is still on its way. Nor does it wait for rewards.
            self.engine.episode_opened()
            try:
                while waiting:
                    index, member = waiting.popleft()
                    with interval("episode"):
                        trajectory = await self.episode(tasks[index], member, position=first + index, purpose=purpose)
                    if at_once or trajectory.status == "failed":
                        keep(index, member, await self.scored(trajectory))
                    else:
                        jobs.create_task(score(index, member, trajectory))
            finally:
                self.engine.episode_closed()

        async def score(index: int, member: int, trajectory: Trajectory) -> None:
            async with scorers:
                keep(index, member, await self.scored(trajectory))

        def keep(index: int, member: int, trajectory: Trajectory) -> None:
            finished[index, member] = trajectory
            if done is not None:
                done(trajectory)

        try:
            async with asyncio.TaskGroup() as jobs:  # the first error ends all of them
                for _ in range(min(self.concurrency, len(waiting))):
                    jobs.create_task(worker())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [
            Group(task, tuple(finished[index, member] for member in range(size))) for index, task in enumerate(tasks)
        ]

    async def episode(self, task: Task, member: int, *, position: int, purpose: str) -> Trajectory:
        """One episode, with the environment's own rewards."""
        seed = seed_for(self.run_seed, purpose, position, f"{task.family}/{task.id}", member)

        def make_agent(task: Task, member: int, tools: list[dict[str, Any]]) -> Agent:
            def turn_seed(turn: int) -> int:
                return seed_for(seed, turn)

            return self.make_agent(self.engine, task, member, tools, turn_seed, (position, member))

        return await run_episode(task, member, self.make_environment, make_agent, self.rules, seed=seed)

    async def scored(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory with its rewards, on the outcome or on the steps they judge; one whose reward fails is failed,
        with the reason."""
        if trajectory.status == "failed" or not self.rewards:
            return trajectory
        started = time.perf_counter()
        try:
            with interval("reward"):
                judgement = await combine(self.rewards, trajectory)
        except RenmaError:
            raise
        except Exception as error:
            bare = replace(trajectory, steps=tuple(replace(step, reward={}) for step in trajectory.steps))
            return replace(bare, status="failed", stop_reason="reward_error", error=describe(error))
        # The recipe's rewards take the place of the environment's own.
        return replace(judgement.on(trajectory), reward_seconds=time.perf_counter() - started)
