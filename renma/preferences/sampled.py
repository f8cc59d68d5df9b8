"""Preferences from the policy's own attempts, judged by rewards that are known to be right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from renma.errors import RecipeError
from renma.preferences.base import best_and_worst, check_options, with_noise
from renma.preferences.outcomes import from_outcomes
from renma.recipe import Component
from renma.rewards.base import build_rewards
from renma.rollout.runner import Runner
from renma.types import Group, Task


class SampledPreferences:
    """Best against worst of groups that the current policy samples.

    groups, group_size: how much is sampled, from the start of the run's order of tasks. rewards: the verifiers that
    judge (as a recipe's `rewards`); none: the environment's own rewards. noise: the probability that a label is turned
    round. threshold: the return from which on an attempt counts as solved, for labels of steps; None: as its
    environment says.
    """

    def __init__(
        self,
        *,
        runner: Runner,
        task_at: Callable[[int], Task],
        groups: int = 64,
        group_size: int = 8,
        rewards: Sequence[Component] = (),
        noise: float = 0.0,
        threshold: float | None = None,
        seed: int = 0,
    ) -> None:
        check_options("preference source 'sampled'", noise)
        if groups < 1 or group_size < 2:
            raise RecipeError(
                f"preference source 'sampled': groups must be at least 1 and group_size at least 2, to have something "
                f"to compare; got {groups} and {group_size}"
            )
        # What judges here is never the learned reward of the run: that one is yet to be trained.
        self._runner = replace(runner, rewards=build_rewards(rewards, "preferences.rewards"))
        self._tasks = [task_at(position) for position in range(groups)]
        self._size, self._noise, self._threshold, self._seed = group_size, noise, threshold, seed

    async def groups(self) -> list[Group]:
        """The attempts, judged."""
        return await self._runner.groups(self._tasks, self._size, purpose="preferences")

    async def pairs(self) -> list[Group]:
        found = [made for group in await self.groups() if (made := best_and_worst(group)) is not None]
        return with_noise(found, self._noise, self._seed)

    async def judged(self) -> list[Group]:
        return from_outcomes(await self.groups(), threshold=self._threshold, noise=self._noise, seed=self._seed)
