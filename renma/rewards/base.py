"""Rewards: functions of a trajectory, named, weighted and summed.

A reward in two lines, named in a recipe as `my_rewards.py:short`:

    def short(trajectory):
        return 1.0 if len(trajectory.steps) <= 2 else 0.0

It may be `async`, and it may return None: no opinion. What has no opinion counts in no sum and no average; a trajectory
on which every reward has none is an error, because it would silently become a zero.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from renma.errors import RecipeError, RenmaError
from renma.parts import build, checked_options
from renma.recipe import Component
from renma.rewards import REWARDS
from renma.types import Trajectory

Reward = Callable[[Trajectory], float | Awaitable[float | None] | None]


@dataclass(frozen=True, slots=True)
class NamedReward:
    """A reward with the name of its component and the weight it has in the sum."""

    name: str
    function: Reward
    weight: float = 1.0


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


async def combine(rewards: Sequence[NamedReward], trajectory: Trajectory) -> dict[str, float]:
    """The weighted component of each reward that has an opinion; their sum is the outcome's reward.

    None and NaN are no opinion. Raises RewardError, naming the task and member, when every reward abstains or one gives
    something else than a finite number. No rewards at all give no components: the environment's own then stand alone.
    """
    return (await combine_rows(rewards, [trajectory]))[0]


async def combine_rows(rewards: Sequence[NamedReward], trajectories: Sequence[Trajectory]) -> list[dict[str, float]]:
    """`combine` for many trajectories. When every reward abstains on some, one error names them all."""
    rows: list[dict[str, float]] = []
    silent: list[Trajectory] = []
    for trajectory in trajectories:
        row: dict[str, float] = {}
        for reward in rewards:
            given = reward.function(trajectory)
            value = _number(reward, trajectory, await given if inspect.isawaitable(given) else given)
            if value is not None:
                row[reward.name] = reward.weight * value
        if rewards and not row:
            silent.append(trajectory)
        rows.append(row)
    if silent:
        raise RewardError(_abstained(rewards, silent))
    return rows


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
