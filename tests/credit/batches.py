"""Random batches of groups: unequal lengths, observations between actions, steps without a token, every status."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from renma.credit import Evidence
from renma.types import Action, Group, Step, Task, Trajectory

quarters = st.integers(-8, 8).map(lambda n: n / 4)  # exact in float64, and equal often enough to tie
statuses = st.sampled_from(["done", "done", "done", "truncated", "failed"])
drawn_step = st.tuples(
    st.lists(st.integers(0, 1), max_size=3),  # the action's tokens
    st.integers(1, 3),  # tokens observed before it
    st.dictionaries(st.sampled_from(["format", "progress"]), quarters, max_size=2),
    st.sampled_from([None, "a", "b"]),
)
drawn_trajectory = st.tuples(
    st.lists(drawn_step, min_size=1, max_size=4),
    st.dictionaries(st.sampled_from(["correct", "format"]), quarters, max_size=2),
    statuses,
)
drawn_group = st.tuples(st.lists(drawn_trajectory, min_size=2, max_size=4), st.sampled_from(["easy", "hard"]))


@dataclass(frozen=True)
class Batch:
    groups: list[Group]
    evidence: Evidence


@st.composite
def batches(draw, penalties=None):
    """Groups with all the evidence; with penalties, without (True, False) or either (None)."""
    groups = []
    for number, (members, family) in enumerate(draw(st.lists(drawn_group, min_size=1, max_size=3))):
        task = Task(str(number), "", family=family)
        groups.append(Group(task, tuple(trajectory(task, i, *member) for i, member in enumerate(members))))
    noise = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    with_penalties = draw(st.booleans()) if penalties is None else penalties
    return Batch(groups, evidence(groups, noise, with_penalties))


def trajectory(task, member, drawn, rewards, status):
    steps, context = [], []
    for number, (action, observed, reward, key) in enumerate(drawn):
        prompt = np.array([*context, *[7] * observed], np.int32)
        ids = np.array(action, np.int32)
        logprobs = -np.linspace(0.1, 1.0 + member, len(ids), dtype=np.float32) - np.float32(number)
        steps.append(Step(prompt, ids, logprobs, ids, Action(""), reward=reward, state_key=key))
        context = [*prompt, *ids]
    reason = {"done": "answer", "truncated": "step_limit", "failed": "environment_error"}[status]
    return Trajectory(task, member, tuple(steps), status, reason, rewards=rewards)


def evidence(groups, noise, penalties):
    def per_token(scale):
        return [
            [noise.normal(0, scale, t.sampled_tokens).astype(np.float32) for t in group.trainable] for group in groups
        ]

    return Evidence(
        values=per_token(1.0),
        final=[[float(noise.normal()) * (t.status == "truncated") for t in group.trainable] for group in groups],
        greedy=[float(noise.integers(-4, 4)) / 4 for _ in groups],
        teacher=per_token(2.0),
        penalties=per_token(0.1) if penalties else None,
    )


def with_groups(batch, groups):
    """The same evidence for groups whose trainable members are as they were."""
    return replace(batch, groups=groups)


def reordered(batch, order_of_groups, order_of_members):
    """Groups, and within each its members, in another order; the evidence with them.

    order_of_members: for each group (by its old number) the old numbers of all its members.
    """
    groups, rows = [], []
    for g in order_of_groups:
        old = batch.groups[g]
        chosen = [old.trajectories[i] for i in order_of_members[g]]
        groups.append(Group(old.task, tuple(chosen)))
        place = {id(t): n for n, t in enumerate(old.trainable)}
        rows.append([place[id(t)] for t in chosen if t.trainable])

    def moved(given):
        if given is None:
            return None
        return [[given[g][m] for m in row] for g, row in zip(order_of_groups, rows, strict=True)]

    old = batch.evidence
    greedy = [old.greedy[g] for g in order_of_groups]
    own = Evidence(moved(old.values), moved(old.final), greedy, moved(old.teacher), moved(old.penalties))
    return Batch(groups, own), rows
