"""Many episodes at once, grouped by task. Which episode finishes first never changes what is sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from renma.agents.base import Agent
from renma.environments.base import Environment
from renma.errors import RenmaError
from renma.inference.base import Engine
from renma.rewards.base import NamedReward, combine
from renma.rollout.episode import EpisodeRules, describe, run_episode
from renma.seeding import seed_for
from renma.types import Group, Task, Trajectory

MakeAgent = Callable[[Engine, Task, int, list[dict[str, Any]], Callable[[int], int], tuple], Agent]
"""(engine, task, member, tools, seed of a turn, key that orders requests) -> a fresh agent."""


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs episodes over one engine, at most `concurrency` open at once.

    `rewards` empty: the environment's own step rewards are the return.
    """

    engine: Engine
    make_environment: Callable[[], Environment]
    make_agent: MakeAgent
    rules: EpisodeRules
    rewards: Sequence[NamedReward] = ()
    run_seed: int = 0
    concurrency: int = 64

    async def groups(
        self, tasks: Sequence[Task], size: int, *, first: int = 0, purpose: str = "train", done: Callable[[Trajectory], None] | None = None
    ) -> list[Group]:
        """One group of `size` members for each task, in order.

        first: the position of tasks[0] in the run's order of tasks; with `purpose` it makes the seeds, so that a task
        met again in a later epoch is sampled afresh. done: called as each episode ends.
        """
        gate = asyncio.Semaphore(self.concurrency)

        async def one(index: int, member: int) -> Trajectory:
            async with gate:
                trajectory = await self.episode(tasks[index], member, position=first + index, purpose=purpose)
            if done is not None:
                done(trajectory)
            return trajectory

        jobs = [asyncio.create_task(one(i, m)) for i in range(len(tasks)) for m in range(size)]
        try:
            finished = await asyncio.gather(*jobs)
        except BaseException:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
            raise
        return [Group(task, tuple(finished[i * size : (i + 1) * size])) for i, task in enumerate(tasks)]

    async def episode(self, task: Task, member: int, *, position: int, purpose: str) -> Trajectory:
        seed = seed_for(self.run_seed, purpose, position, f"{task.family}/{task.id}", member)

        def make_agent(task: Task, member: int, tools: list[dict[str, Any]]) -> Agent:
            def turn_seed(turn: int) -> int:
                return seed_for(seed, turn)

            return self.make_agent(self.engine, task, member, tools, turn_seed, (position, member))

        self.engine.episode_opened()
        try:
            trajectory = await run_episode(task, member, self.make_environment, make_agent, self.rules, seed=seed)
        finally:
            self.engine.episode_closed()
        return await self.scored(trajectory)

    async def scored(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory with its outcome rewards; one whose reward fails is failed, with the reason."""
        if trajectory.status == "failed" or not self.rewards:
            return trajectory
        # The recipe's rewards take the place of the environment's own.
        bare = replace(trajectory, steps=tuple(replace(step, reward={}) for step in trajectory.steps))
        try:
            return replace(bare, rewards=await combine(self.rewards, trajectory))
        except RenmaError:
            raise
        except Exception as error:
            return replace(bare, status="failed", stop_reason="reward_error", error=describe(error))
