"""What every estimator shares: the contract, the statistics of a group, and what a batch's groups have to teach.

Statistics are over trajectories, one float64 value each, whatever their lengths; failed trajectories are in none.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from renma.errors import RecipeError, RunError
from renma.types import Floats, Group, Trajectory

Values = NDArray[np.float64]
PerToken = list[list[Floats]]
"""For each group, for each of its `trainable` trajectories in order, [n] float32: one number for each of the
trajectory's n sampled tokens, all steps concatenated."""

Need = Literal["values", "greedy", "teacher"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """What an estimator may look at besides the groups; the loop provides what the estimator's `needs` names.

    values: the critic's value of the state before each sampled token; a step's value is that before its first token.
    final: for each group, for each trainable trajectory, the value after its last step: 0 where the episode
    terminated, the critic's at `next_prompt_ids` where a limit cut it.
    greedy: for each group the return of a greedy trajectory of its task.
    teacher: a teacher's log-probability of each sampled token.
    penalties: a reward for each sampled token besides the environment's (the KL to a reference, negative); None: none.
    """

    values: PerToken | None = None
    final: list[list[float]] | None = None
    greedy: Sequence[float] | None = None
    teacher: PerToken | None = None
    penalties: PerToken | None = None

    def of(self, numbers: Sequence[int]) -> Evidence:
        """The evidence for some of the groups, by their numbers."""

        def some(given: Sequence[Any] | None) -> list[Any] | None:
            return None if given is None else [given[number] for number in numbers]

        return Evidence(
            some(self.values), some(self.final), some(self.greedy), some(self.teacher), some(self.penalties)
        )


@dataclass(frozen=True, slots=True)
class Credit:
    """advantages: one a sampled token. targets: what the critic's values should have been (NaN where a token has no
    target of its own), None where the estimator needs no critic. metrics: flat numbers about them."""

    advantages: PerToken
    targets: PerToken | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class Estimator(Protocol):
    """groups, evidence -> Credit. A plain function of the groups that returns the advantages is one too (`credit`).

    It may carry `name`; `min_group_size`, the fewest members it can compare (1); `needs`, a tuple of `Need`s: what
    it must find in the evidence (none).
    """

    def __call__(self, groups: Sequence[Group], evidence: Evidence = ..., /) -> Credit: ...


def credit(estimator: Callable[..., Any], groups: Sequence[Group], evidence: Evidence | None = None) -> Credit:
    """The estimator's credit for the groups. Raises RunError when it does not give one number a sampled token."""
    given = evidence or Evidence()
    found = estimator(groups, given) if takes_evidence(estimator) else estimator(groups)
    result = found if isinstance(found, Credit) else Credit(found)
    sizes = [[t.sampled_tokens for t in group.trainable] for group in groups]
    if [[len(values) for values in group] for group in result.advantages] != sizes:
        raise RunError(
            f"advantage estimator {getattr(estimator, 'name', estimator)!r} must give, for each group, one array for "
            "each trainable trajectory with one number for each of its sampled tokens"
        )
    return result


def takes_evidence(estimator: Callable[..., Any]) -> bool:
    """Whether the estimator has a second place for what lies beside the groups."""
    places = [
        p
        for p in inspect.signature(estimator).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)
    ]
    return len(places) > 1 or any(p.kind is p.VAR_POSITIONAL for p in places)


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


def returns_of(group: Group, penalties: Sequence[Floats] | None = None) -> Values:
    """[n] the returns of the group's trainable trajectories; with `penalties` (the group's part of
    `Evidence.penalties`) the sum of each one's tokens is added.

    Raises RunError when one is not a finite number of reasonable size: a reward that went wrong must not be averaged.
    """
    if penalties is None:
        return np.array([_checked(t.ret, t) for t in group.trainable], dtype=np.float64)
    sums = [float(each.sum(dtype=np.float64)) for each in penalties]
    return np.array([_checked(t.ret + own, t) for t, own in zip(group.trainable, sums, strict=True)], dtype=np.float64)


def returns_in(groups: Sequence[Group], evidence: Evidence) -> list[Values]:
    """For each group `returns_of`, the evidence's penalties counted in."""
    penalties = evidence.penalties if evidence.penalties is not None else [None] * len(groups)
    return [returns_of(group, own) for group, own in zip(groups, penalties, strict=True)]


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
    needs: tuple[Need, ...] = ()

    def values(self, groups: Sequence[Group], evidence: Evidence) -> list[Values]:
        """For each group, [n] the advantage of each trainable trajectory. Groups here have at least the minimum;
        evidence is theirs."""
        raise TypeError(f"{type(self).__name__} has no values(groups, evidence): give one array per group")

    def __call__(self, groups: Sequence[Group], evidence: Evidence = Evidence()) -> Credit:
        for group in groups:
            require_group(group, self.min_group_size, self.name)
        usable = [n for n, group in enumerate(groups) if len(group.trainable) >= max(1, self.min_group_size)]
        found = self.values([groups[n] for n in usable], evidence.of(usable))
        values = dict(zip(usable, found, strict=True))
        return Credit([spread(group, values.get(n, np.zeros(len(group.trainable)))) for n, group in enumerate(groups)])


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
    added: dict[str, list[float]] = {}
    for row, trajectory in enumerate(trajectories):
        for step in trajectory.steps:
            for name, value in step.reward.items():
                added.setdefault(name, [0.0] * len(trajectories))[row] += _checked(float(value), trajectory)
    for name, sums in added.items():
        table[name] = np.nan_to_num(table.get(name, np.zeros(len(trajectories)))) + np.array(sums)
    return dict(sorted(table.items()))


def _parts_differ(group: Group) -> bool:
    columns = components_of(group).values()
    return any(not moments(np.nan_to_num(column)).uniform for column in columns)
