"""Rewards: functions of a trajectory, named, weighted and summed.

A reward in two lines, named in a recipe as `my_rewards.py:short`:

    def short(trajectory):
        return 1.0 if len(trajectory.steps) <= 2 else 0.0

It may be `async`, and it may return None: no opinion. What has no opinion counts in no sum and no average; a trajectory
on which every reward has none is an error, because it would silently become a zero.

A plain reward is called in a thread, so that the policy goes on sampling meanwhile and several trajectories are scored
at once. One that takes no time says `short.blocking = False` (a class: `blocking = False`) and is called where it is;
one that must not run beside itself says `thread_safe = False`.

A process reward returns a sequence instead, one number (or None) for each step; each lands on its own step:

    def brief(trajectory):
        return [-0.01 * len(step.action_ids) for step in trajectory.steps]
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from renma.errors import RecipeError, RenmaError
from renma.parts import build, checked_options
from renma.recipe import Component
from renma.rewards import REWARDS
from renma.rollout.threads import call, is_async, may_block, unwrapped
from renma.types import Trajectory

_ONE_AT_A_TIME = threading.Lock()  # of the rewards that are not thread-safe
Verdict = float | Sequence[float | None] | None
Reward = Callable[[Trajectory], Verdict | Awaitable[Verdict]]


@dataclass(frozen=True, slots=True)
class NamedReward:
    """A reward with the name of its component and the weight it has in the sum."""

    name: str
    function: Reward
    weight: float = 1.0

    @property
    def blocking(self) -> bool:
        """Whether it needs a thread."""
        return may_block(self.function)

    @property
    def instant(self) -> bool:
        """Whether it answers where it is called, without waiting for anything."""
        return not self.blocking and not is_async(self.function)

    async def __call__(self, trajectory: Trajectory) -> Verdict:
        """What it says, from a thread where it needs one."""
        given = await call(self._alone, trajectory) if self.blocking else self.function(trajectory)
        return await given if inspect.isawaitable(given) else given

    def _alone(self, trajectory: Trajectory) -> Verdict | Awaitable[Verdict]:
        if getattr(unwrapped(self.function), "thread_safe", True):
            return self.function(trajectory)
        with _ONE_AT_A_TIME:
            return self.function(trajectory)


class RewardError(RenmaError):
    """A reward gave what is no number, or every reward abstained."""

    exit_code = 6


def build_rewards(components: Sequence[Component], place: str = "rewards") -> list[NamedReward]:
    """The rewards a recipe names. Besides its own options each may have `weight` (default 1) and `name` (the type).

    A class is made with its options and called with the trajectory; of a function the first parameter is the
    trajectory and the others are options. Raises RecipeError naming the place.
    """
    rewards: list[NamedReward] = []
    for position, component in enumerate(components):
        here = f"{place}.{position}"
        options = component.options
        weight, name = options.pop("weight", 1.0), options.pop("name", component.type.rpartition(":")[2])
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise RecipeError(f"{here}.weight: must be a number, got {weight!r}")
        if not isinstance(name, str) or any(reward.name == name for reward in rewards):
            raise RecipeError(f"{here}.name: {name!r} is used twice or not text; give each reward a name of its own")
        rewards.append(NamedReward(name, _made(Component(type=component.type, **options), here), float(weight)))
    return rewards


def _made(component: Component, place: str) -> Reward:
    try:
        part = REWARDS[component.type]
    except RecipeError as error:
        raise RecipeError(f"{place}: {error}") from None
    if inspect.isclass(part):
        made: Reward = build(REWARDS, component, place)
        return made
    first = next(iter(inspect.signature(part).parameters), None) if callable(part) else None
    if first is None:
        raise RecipeError(f"{place}: {component.type!r} takes no trajectory; a reward is a function of one")
    return functools.partial(part, **checked_options(REWARDS, component, place, {first}))


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the rewards say of one trajectory, weights applied. outcome: by name, of the whole trajectory; steps [K]: by
    name, of each step. A reward is in one of the two, or in neither where it has no opinion."""

    outcome: dict[str, float]
    steps: tuple[dict[str, float], ...]

    @property
    def silent(self) -> bool:
        return not self.outcome and not any(self.steps)

    def on(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory with these rewards and no others."""
        steps = tuple(replace(step, reward=own) for step, own in zip(trajectory.steps, self.steps, strict=True))
        return replace(trajectory, steps=steps, rewards=self.outcome)


async def combine(rewards: Sequence[NamedReward], trajectory: Trajectory) -> Judgement:
    """The weighted component of each reward that has an opinion; their sums are the outcome's and the steps' rewards.

    None and NaN are no opinion. Raises RewardError, naming the reward, task and member, when one gives something else
    than a finite number or a sequence of one entry for each step; and when every reward abstains, unless nothing was
    sampled: such a trajectory is in no statistic and is not trained. No rewards at all give no components: the
    environment's own then stand alone.
    """
    return (await combine_rows(rewards, [trajectory]))[0]


async def combine_rows(rewards: Sequence[NamedReward], trajectories: Sequence[Trajectory]) -> list[Judgement]:
    """`combine` for many trajectories, side by side. When every reward abstains on some, one error names them all."""
    rows = list(await asyncio.gather(*(_judge(rewards, trajectory) for trajectory in trajectories)))
    silent = [t for t, row in zip(trajectories, rows, strict=True) if row.silent and t.sampled_tokens]
    if rewards and silent:
        raise RewardError(_abstained(rewards, silent))
    return rows


async def _judge(rewards: Sequence[NamedReward], trajectory: Trajectory) -> Judgement:
    found = Judgement({}, tuple({} for _ in trajectory.steps))
    for reward in rewards:
        value = await reward(trajectory)
        # Arrays, tensors and their scalars become plain lists and numbers.
        plain: object = value.tolist() if hasattr(value, "tolist") else value  # type: ignore[union-attr]
        if isinstance(plain, list | tuple):
            _put_on_steps(reward, trajectory, plain, found.steps)
        else:
            number = _number(reward, trajectory, plain)
            if number is not None:
                found.outcome[reward.name] = reward.weight * number
    return found


def _put_on_steps(
    reward: NamedReward, trajectory: Trajectory, values: Sequence[object], steps: Sequence[dict[str, float]]
) -> None:
    if len(values) != len(steps):
        raise RewardError(
            f"reward {reward.name!r} gave {len(values)} numbers for the {len(steps)} steps of {_row(trajectory)}; give "
            "one for each step, None for no opinion"
        )
    for own, value in zip(steps, values, strict=True):
        number = _number(reward, trajectory, value)
        if number is not None:
            own[reward.name] = reward.weight * number


def average(values: Iterable[float | None]) -> float | None:
    """The mean of the opinions: None and NaN are left out. None when there is no opinion at all."""
    given = [value for value in values if value is not None and not math.isnan(value)]
    return math.fsum(given) / len(given) if given else None


def _number(reward: NamedReward, trajectory: Trajectory, value: object) -> float | None:
    if value is None:
        return None
    try:
        number = float(value)  # type: ignore[arg-type]  # what is no number is told below
    except (TypeError, ValueError):
        number = math.inf
    if math.isinf(number):
        raise RewardError(f"reward {reward.name!r} gave {value!r} for {_row(trajectory)}; give a finite number or None")
    return None if math.isnan(number) else number


def _row(trajectory: Trajectory) -> str:
    return f"task {trajectory.task.id!r} member {trajectory.member}"


def _abstained(rewards: Sequence[NamedReward], silent: Sequence[Trajectory]) -> str:
    rows = ", ".join(_row(trajectory) for trajectory in silent[:8])
    more = f" and {len(silent) - 8} more" if len(silent) > 8 else ""
    names = ", ".join(reward.name for reward in rewards)
    return f"every reward ({names}) abstained on {rows}{more}; let at least one give a number for every trajectory"
