"""What every estimator shares: the contract, the statistics of a group, and what a batch's groups have to teach.

Statistics are over trajectories, one float64 value each, whatever their lengths; failed trajectories are in none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from renma.errors import RecipeError, RunError
from renma.types import Floats, Group, Trajectory

Estimator = Callable[[Sequence[Group]], list[list[Floats]]]
"""groups -> for each group, for each of its `trainable` trajectories in order, [n] float32: the advantage of each of
the trajectory's n sampled tokens, all steps concatenated. An estimator may carry `name` and `min_group_size`."""

Values = NDArray[np.float64]

UNIFORM = 1e-6  # a std below UNIFORM * max(1, |mean|) is rounding, not a difference between members
LARGEST_RETURN = 1e30  # squares stay finite in float64 and advantages in float32


class Moments(NamedTuple):
    """mean, and std = sqrt(mean of squared deviations) (ddof 0); `uniform` when the std counts as zero."""

    mean: float
    std: float

    @property
    def uniform(self) -> bool:
        return self.std < UNIFORM * max(1.0, abs(self.mean))


def moments(values: Values) -> Moments:
    """The moments of [n] values, n >= 1. Sums are exact (fsum), so the order of the members changes no bit."""
    mean = math.fsum(values) / len(values)
    return Moments(mean, math.sqrt(math.fsum((values - mean) ** 2) / len(values)))


def returns_of(group: Group) -> Values:
    """[n] the returns of the group's trainable trajectories.

    Raises RunError when one is not a finite number of reasonable size: a reward that went wrong must not be averaged.
    """
    return np.array([_checked(t.ret, t) for t in group.trainable], dtype=np.float64)


def _checked(value: float, trajectory: Trajectory) -> float:
    if not abs(value) <= LARGEST_RETURN:
        task = trajectory.task
        raise RunError(
            f"task {task.family}/{task.id}, member {trajectory.member}: the return is {value}, which cannot be "
            f"compared; check the rewards {dict(trajectory.rewards)} (a reward with no opinion returns None, not nan)"
        )
    return value


def require_group(group: Group, minimum: int, name: str) -> None:
    """Raise RecipeError for a group sampled smaller than the estimator needs (the recipe's check finds it sooner)."""
    if len(group.trajectories) < minimum:
        raise RecipeError(
            f"group_size must be >= {minimum} for {name}: task {group.task.id!r} has {len(group.trajectories)}; "
            "group by task, and raise rollout.group_size"
        )


@dataclass(frozen=True, slots=True)
class TrajectoryEstimator:
    """An estimator with one advantage per trajectory, spread unchanged over all its sampled tokens.

    A subclass gives `values`. A group that failures reduced below `min_group_size` has nothing to compare with: its
    advantages are exactly 0, and the loop drops it (`usable_groups`).
    """

    name: str = "estimator"
    min_group_size: int = 1

    def values(self, groups: Sequence[Group]) -> list[Values]:
        """For each group, [n] the advantage of each trainable trajectory. Groups here have at least the minimum."""
        raise TypeError(f"{type(self).__name__} has no values(groups): give one that returns an array per group")

    def __call__(self, groups: Sequence[Group]) -> list[list[Floats]]:
        for group in groups:
            require_group(group, self.min_group_size, self.name)
        usable, _ = usable_groups(groups, self.min_group_size)
        values = {id(group): value for group, value in zip(usable, self.values(usable), strict=True)}
        return [spread(group, values.get(id(group), np.zeros(len(group.trainable)))) for group in groups]


def spread(group: Group, values: Values) -> list[Floats]:
    """One value per trainable trajectory -> [n] float32 for the n sampled tokens of each."""
    return [
        np.full(trajectory.sampled_tokens, value, dtype=np.float32)
        for trajectory, value in zip(group.trainable, values, strict=True)
    ]


def usable_groups(groups: Sequence[Group], minimum: int = 2) -> tuple[list[Group], int]:
    """The groups that still have `minimum` trainable trajectories (and at least one), and how many were dropped."""
    kept = [group for group in groups if len(group.trainable) >= max(1, minimum)]
    return kept, len(groups) - len(kept)


def group_signal(groups: Sequence[Group], minimum: int = 1) -> dict[str, float]:
    """What a batch's groups have to teach: flat metrics, shares in [0, 1].

    groups_used, groups_dropped: with at least `minimum` trainable members, and with fewer.
    return_mean, return_std: over the trajectories of the used groups; return_std_within: mean of the groups' own.
    zero_std_share: groups whose members all have the same return: they give a group-relative estimator no gradient.
    zero_std_parts_share: groups uniform in the sum but not in every reward component. Both and `return_std_within` are
    over the used groups of two or more.
    solved_none_share, solved_some_share, solved_all_share: over used groups where every member's success is known.
    A number that has nothing to be computed from is left out, never nan.
    """
    used, dropped = usable_groups(groups, minimum)
    signal = {"groups_used": float(len(used)), "groups_dropped": float(dropped)}
    if not used:
        return signal
    everything = moments(np.concatenate([returns_of(group) for group in used]))
    signal["return_mean"] = everything.mean
    signal["return_std"] = everything.std
    compared = [(group, moments(returns_of(group))) for group in used if len(group.trainable) > 1]
    if compared:
        signal["return_std_within"] = math.fsum(own.std for _, own in compared) / len(compared)
        signal["zero_std_share"] = sum(own.uniform for _, own in compared) / len(compared)
        hidden = sum(own.uniform and _parts_differ(group) for group, own in compared)
        signal["zero_std_parts_share"] = hidden / len(compared)
    known = [[t.success for t in g.trainable] for g in used if all(t.success is not None for t in g.trainable)]
    if known:
        solved_all = sum(all(row) for row in known)
        solved_none = sum(not any(row) for row in known)
        signal["solved_none_share"] = solved_none / len(known)
        signal["solved_some_share"] = (len(known) - solved_all - solved_none) / len(known)
        signal["solved_all_share"] = solved_all / len(known)
    return signal


def components_of(group: Group) -> dict[str, Values]:
    """Reward components by name, [n] over the trainable trajectories: the outcome's plus the sum over the steps.

    nan where a member has no such outcome (the reward abstained); a step's reward that never came is 0.
    """
    trajectories = group.trainable
    table: dict[str, Values] = {}
    for row, trajectory in enumerate(trajectories):
        for name, value in trajectory.rewards.items():
            table.setdefault(name, np.full(len(trajectories), np.nan))[row] = _checked(float(value), trajectory)
    for row, trajectory in enumerate(trajectories):
        for step in trajectory.steps:
            for name, value in step.reward.items():
                column = table[name] = np.nan_to_num(table.get(name, np.zeros(len(trajectories))))
                column[row] += _checked(float(value), trajectory)
    return dict(sorted(table.items()))


def _parts_differ(group: Group) -> bool:
    columns = components_of(group).values()
    return any(not moments(np.nan_to_num(column)).uniform for column in columns)
