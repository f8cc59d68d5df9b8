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

        async def worker() -> None:
            # One worker keeps one place open in the engine from its first episode to its last, scoring included: an
            # engine that waits for every open episode then never decodes while the next one is still on its way.
            self.engine.episode_opened()
            try:
                while waiting:
                    index, member = waiting.popleft()
                    trajectory = await self.episode(tasks[index], member, position=first + index, purpose=purpose)
                    finished[index, member] = trajectory
                    if done is not None:
                        done(trajectory)
            finally:
                self.engine.episode_closed()

        workers = [asyncio.create_task(worker()) for _ in range(min(self.concurrency, len(waiting)))]
        try:
            await asyncio.gather(*workers)
        except BaseException:
            for job in workers:
                job.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            raise
        return [
            Group(task, tuple(finished[index, member] for member in range(size))) for index, task in enumerate(tasks)
        ]

    async def episode(self, task: Task, member: int, *, position: int, purpose: str) -> Trajectory:
        """One episode, scored."""
        seed = seed_for(self.run_seed, purpose, position, f"{task.family}/{task.id}", member)

        def make_agent(task: Task, member: int, tools: list[dict[str, Any]]) -> Agent:
            def turn_seed(turn: int) -> int:
                return seed_for(seed, turn)

            return self.make_agent(self.engine, task, member, tools, turn_seed, (position, member))

        trajectory = await run_episode(task, member, self.make_environment, make_agent, self.rules, seed=seed)
        return await self.scored(trajectory)

    async def scored(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory with its rewards, on the outcome or on the steps they judge; one whose reward fails is failed,
        with the reason."""
        if trajectory.status == "failed" or not self.rewards:
            return trajectory
        started = time.perf_counter()
        try:
            judgement = await combine(self.rewards, trajectory)
        except RenmaError:
            raise
        except Exception as error:
            bare = replace(trajectory, steps=tuple(replace(step, reward={}) for step in trajectory.steps))
            return replace(bare, status="failed", stop_reason="reward_error", error=describe(error))
        # The recipe's rewards take the place of the environment's own.
        return replace(judgement.on(trajectory), reward_seconds=time.perf_counter() - started)
