"""A batch laid flat: its trajectories, steps and sampled tokens as arrays, with every reward in its place.

What the policy chose is all there is here. A step without a sampled token (an empty action) is no decision: it has no
place of its own, and its reward is folded onto the last sampled token before it (the first one where none comes
before). A step's reward lies on its last sampled token, the outcome's on the trajectory's last, and a penalty of
`Evidence.penalties` on its own token; a step's sum and a trajectory's contain them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from renma.credit.base import LARGEST_RETURN, Credit, Evidence, Need, PerToken, Values, require_group
from renma.errors import RunError
from renma.types import Group, Step, Trajectory

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Layout:
    """G groups with T trainable trajectories in all, S steps that hold sampled tokens, N tokens; in the batch's order.

    groups; members [G]: trainable trajectories of each. trajectories; lengths [T]: sampled tokens of each.
    steps; tokens [S]: sampled tokens of each. steps_of [T]: how many of the S steps are each trajectory's.
    process [S]: the steps' own rewards. outcome [T]: the trajectories'. penalties [N]. Rewards are float64.
    """

    groups: tuple[Group, ...]
    trajectories: tuple[Trajectory, ...]
    steps: tuple[Step, ...]
    members: Integers
    lengths: Integers
    steps_of: Integers
    tokens: Integers
    process: Values
    outcome: Values
    penalties: Values

    @cached_property
    def ends(self) -> Integers:
        """[T] the last step of each trajectory, among the S."""
        return np.cumsum(self.steps_of) - 1

    @cached_property
    def first_tokens(self) -> Integers:
        """[S] the first token of each step, among the N."""
        return np.cumsum(self.tokens) - self.tokens

    @cached_property
    def group_of_step(self) -> Integers:
        """[S] the number of each step's group."""
        return np.repeat(np.repeat(np.arange(len(self.groups)), self.members), self.steps_of)

    @cached_property
    def process_rewards(self) -> Values:
        """[S] each step's own reward with its tokens' penalties, without the outcome."""
        return self.process + (np.add.reduceat(self.penalties, self.first_tokens) if len(self.tokens) else 0.0)

    @cached_property
    def step_rewards(self) -> Values:
        """[S] R_k: `process_rewards` with the outcome on each trajectory's last step."""
        rewards = self.process_rewards.copy()
        rewards[self.ends] += self.outcome
        return rewards

    @cached_property
    def token_rewards(self) -> Values:
        """[N] r_t: penalties token by token, the rest of a step's reward on its last token."""
        rewards = self.penalties.copy()
        rewards[self.first_tokens + self.tokens - 1] += self.process
        rewards[np.cumsum(self.lengths) - 1] += self.outcome
        return rewards

    def over_steps(self, values: Values) -> Values:
        """One number a trajectory [T] -> [S]."""
        return np.repeat(values, self.steps_of)

    def over_tokens(self, values: Values) -> Values:
        """One number a step [S] -> [N]."""
        return np.repeat(values, self.tokens)

    def flat(self, per_token: PerToken | None, what: str) -> Values:
        """[N] float64 of something given for each sampled token. Raises RunError when it is missing or malformed."""
        if per_token is None:
            raise RunError(f"credit: {what} is missing from the evidence; the estimator's `needs` names it")
        arrays = [array for group in per_token for array in group]
        if [len(array) for array in arrays] != self.lengths.tolist() or len(per_token) != len(self.groups):
            raise RunError(f"credit: {what} must hold one number for each sampled token of each trainable trajectory")
        values = np.concatenate(arrays).astype(np.float64) if arrays else np.zeros(0)
        return self.finite(values, what)

    def finite(self, values: Values, what: str) -> Values:
        """The values [N] or [T], or RunError naming the trajectory of one that is no finite number."""
        bad = ~(np.abs(values) <= LARGEST_RETURN)
        if bad.any():
            first = int(np.argmax(bad))
            counts = np.ones_like(self.lengths) if len(values) == len(self.lengths) else self.lengths
            wrong = self.trajectories[int(np.searchsorted(np.cumsum(counts), first, side="right"))]
            raise RunError(
                f"task {wrong.task.family}/{wrong.task.id}, member {wrong.member}: {what} is {values[first]}, which no "
                "advantage can be made of; check what gave it"
            )
        return values

    def split(self, values: Values) -> PerToken:
        """[N] -> float32 for each group, for each of its trajectories."""
        parts = iter(np.split(values.astype(np.float32), np.cumsum(self.lengths)[:-1]) if len(self.lengths) else [])
        return [[next(parts) for _ in range(count)] for count in self.members]


def lay_out(groups: Sequence[Group], evidence: Evidence | None = None) -> Layout:
    """The groups' trainable trajectories, flat. Raises RunError naming the trajectory of a reward that is no number."""
    trajectories: list[Trajectory] = []
    steps: list[Step] = []
    members, lengths, steps_of, tokens = [], [], [], []
    process: list[float] = []
    for group in groups:
        trainable = group.trainable
        members.append(len(trainable))
        for trajectory in trainable:
            before = len(steps)
            held = 0.0  # rewards of steps before the first sampled token
            length = 0
            for step in trajectory.steps:
                reward = float(sum(step.reward.values())) if step.reward else 0.0
                count = len(step.action_ids)
                if count:
                    steps.append(step)
                    tokens.append(count)
                    process.append(reward + held)
                    held = 0.0
                    length += count
                elif len(steps) > before:
                    process[-1] += reward
                else:
                    held += reward
            trajectories.append(trajectory)
            lengths.append(length)
            steps_of.append(len(steps) - before)
    layout = Layout(
        groups=tuple(groups),
        trajectories=tuple(trajectories),
        steps=tuple(steps),
        members=np.array(members, dtype=np.int64),
        lengths=np.array(lengths, dtype=np.int64),
        steps_of=np.array(steps_of, dtype=np.int64),
        tokens=np.array(tokens, dtype=np.int64),
        process=np.array(process, dtype=np.float64),
        outcome=np.array([float(sum(t.rewards.values())) for t in trajectories], dtype=np.float64),
        penalties=np.zeros(sum(lengths)),
    )
    layout.finite(layout.outcome, "the sum of the outcome's rewards")
    if len(tokens):
        starts = layout.ends - layout.steps_of + 1
        layout.finite(np.add.reduceat(np.abs(layout.process), starts), "the sum of the steps' rewards")
    if evidence is not None and evidence.penalties is not None:
        return replace(layout, penalties=layout.flat(evidence.penalties, "a penalty"))
    return layout


@dataclass(frozen=True, slots=True)
class FlatCredit:
    """advantages, targets [N] float64 over a layout's tokens."""

    advantages: Values
    targets: Values | None = None
    metrics: dict[str, float] | None = None


@dataclass(frozen=True, slots=True)
class TokenEstimator:
    """An estimator that looks inside trajectories, at their steps or tokens.

    A subclass gives `flat`. A group that failures reduced below `min_group_size` enters no statistic: its advantages
    are exactly 0 and it has no targets; the loop drops it (`usable_groups`).
    """

    name: str = "estimator"
    min_group_size: int = 1
    needs: tuple[Need, ...] = ()

    def flat(self, layout: Layout, evidence: Evidence) -> FlatCredit:
        """The credit of the layout's tokens. Groups here have at least the minimum; evidence is theirs."""
        raise TypeError(f"{type(self).__name__} has no flat(layout, evidence): give one that returns a FlatCredit")

    def __call__(self, groups: Sequence[Group], evidence: Evidence = Evidence()) -> Credit:
        for group in groups:
            require_group(group, self.min_group_size, self.name)
        usable = [n for n, group in enumerate(groups) if len(group.trainable) >= max(1, self.min_group_size)]
        some = evidence.of(usable)
        layout = lay_out([groups[n] for n in usable], some)
        found = self.flat(layout, some)
        metrics = found.metrics or {}
        advantages = _placed(layout.split(found.advantages), usable, groups, 0.0)
        if found.targets is None:
            return Credit(advantages, None, metrics)
        return Credit(advantages, _placed(layout.split(found.targets), usable, groups, np.nan), metrics)


def _placed(parts: PerToken, usable: Sequence[int], groups: Sequence[Group], otherwise: float) -> PerToken:
    given = dict(zip(usable, parts, strict=True))
    return [
        given[number]
        if number in given
        else [np.full(t.sampled_tokens, otherwise, dtype=np.float32) for t in group.trainable]
        for number, group in enumerate(groups)
    ]
