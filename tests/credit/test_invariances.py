"""What must not change an advantage, as properties over random batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from renma.credit import ESTIMATORS, Evidence, credit
from renma.types import Group, Task, Trajectory
from tests.credit.batches import Batch, batches, evidence, quarters, reordered, trajectory, with_groups
from tests.credit.test_reference import CONFIGURATIONS, CRITICS

few = settings(max_examples=30, deadline=None)
EVERYTHING = CONFIGURATIONS + CRITICS


def advantages(name: str, options: dict[str, Any], batch: Batch) -> list[list[np.ndarray]]:
    return credit(ESTIMATORS[name](**options), batch.groups, batch.evidence).advantages


def close(found: Any, expected: Any, of: Any = "", exactly: bool = False) -> None:
    assert [len(group) for group in found] == [len(group) for group in expected]
    for group, others in zip(found, expected, strict=True):
        for member, other in zip(group, others, strict=True):
            if exactly:
                np.testing.assert_array_equal(member, other, err_msg=str(of))
            else:
                np.testing.assert_allclose(member, other, rtol=1e-5, atol=1e-5, err_msg=str(of))


@few
@given(batch=batches(penalties=True), draw=st.randoms())  # penalties: no two returns tie, so an order decides nothing
def test_order_of_members_and_of_groups(batch: Batch, draw: Any) -> None:
    order = list(range(len(batch.groups)))
    draw.shuffle(order)
    inside = [list(range(len(group.trajectories))) for group in batch.groups]
    for places in inside:
        draw.shuffle(places)
    moved, rows = reordered(batch, order, inside)
    for name, options in EVERYTHING:
        straight = advantages(name, options, batch)
        expected = [[straight[g][m] for m in row] for g, row in zip(order, rows, strict=True)]
        close(advantages(name, options, moved), expected, (name, options))


@few
@given(batch=batches(), wrong=st.floats(-1e6, 1e6), data=st.data())
def test_a_failed_member_and_one_without_a_token_change_nothing(batch: Batch, wrong: float, data: Any) -> None:
    def more(group: Group) -> Group:
        first = group.trajectories[0]
        failed = replace(first, status="failed", stop_reason="engine_error", rewards={"correct": wrong})
        silent = replace(first, status="done", steps=(), rewards={"correct": wrong})
        members = list(group.trajectories)
        for extra in (failed, silent):
            members.insert(data.draw(st.integers(0, len(members))), extra)
        return Group(group.task, tuple(members))

    larger = with_groups(batch, [more(group) for group in batch.groups])
    for name, options in EVERYTHING:
        found, expected = advantages(name, options, larger), advantages(name, options, batch)
        close(found, expected, (name, options), exactly=True)


SHIFTED = [
    ("grpo", {}),
    ("grpo", {"std": False}),
    ("dr_grpo", {}),
    ("rloo", {}),
    ("rloo", {"normalise": True}),
    ("reinforce_pp", {"baseline": "group_mean"}),
    ("gigpo", {"gamma": 1.0}),
    ("turn_level", {}),
    ("distillation", {"reward": 1.0}),
    ("pairs", {}),
    ("remax", {}),
]


@few
@given(batch=batches(), data=st.data())
def test_a_constant_added_to_the_rewards_of_a_group(batch: Batch, data: Any) -> None:
    shifts = [data.draw(quarters) for _ in batch.groups]

    def moved(group: Group, shift: float) -> Group:
        members = (replace(t, rewards={**t.rewards, "shift": shift}) for t in group.trajectories)
        return Group(group.task, tuple(members))

    old = batch.evidence
    greedy = [value + shift for value, shift in zip(old.greedy or [], shifts, strict=True)]
    groups = [moved(group, shift) for group, shift in zip(batch.groups, shifts, strict=True)]
    shifted = Batch(groups, replace(old, greedy=greedy))
    for name, options in SHIFTED:
        close(advantages(name, options, shifted), advantages(name, options, batch), (name, options))


def test_a_constant_does_change_what_compares_with_nothing() -> None:
    """The property above can fail: the plain return moves with the constant."""
    batch = _example()
    shifted = [Group(g.task, tuple(replace(t, rewards={"shift": 1.0}) for t in g.trajectories)) for g in batch.groups]
    with pytest.raises(AssertionError):
        close(advantages("reinforce", {}, with_groups(batch, shifted)), advantages("reinforce", {}, batch))


@few
@given(batch=batches(), extra=st.integers(1, 5))
def test_observations_play_no_part(batch: Batch, extra: int) -> None:
    """Longer observations between the same actions: the same advantages, undiscounted."""

    def longer(trajectory: Trajectory) -> Trajectory:
        steps = tuple(
            replace(s, prompt_ids=np.concatenate([np.full(extra, 9, np.int32), s.prompt_ids])) for s in trajectory.steps
        )
        return replace(trajectory, steps=steps)

    groups = [Group(g.task, tuple(longer(t) for t in g.trajectories)) for g in batch.groups]
    other = with_groups(batch, groups)
    for name, options in EVERYTHING:
        found, expected = advantages(name, options, other), advantages(name, options, batch)
        close(found, expected, (name, options), exactly=True)


@few
@given(batch=batches(), data=st.data())
def test_an_empty_action_with_no_reward_plays_no_part(batch: Batch, data: Any) -> None:
    def idle(trajectory: Trajectory) -> Trajectory:
        first = trajectory.steps[0]
        nothing = replace(
            first, action_ids=first.action_ids[:0], logprobs=first.logprobs[:0], versions=first.versions[:0], reward={}
        )
        steps = list(trajectory.steps)
        steps.insert(data.draw(st.integers(0, len(steps))), nothing)
        return replace(trajectory, steps=tuple(steps))

    groups = [Group(g.task, tuple(idle(t) for t in g.trajectories)) for g in batch.groups]
    other = with_groups(batch, groups)
    for name, options in EVERYTHING:
        if not options.get("from_divergence"):  # there an idle turn at another place is something done differently
            close(advantages(name, options, other), advantages(name, options, batch), (name, options))


@few
@given(batch=batches(), noise=st.integers(0, 1000))
def test_step_advantages_read_the_critic_once_a_step(batch: Batch, noise: int) -> None:
    """The critic's values at the later tokens of a step are never looked at."""
    rough = np.random.default_rng(noise)

    def changed(values: np.ndarray, trajectory: Trajectory) -> np.ndarray:
        own = rough.normal(0, 100, len(values)).astype(np.float32)
        sizes = [len(s.action_ids) for s in trajectory.steps if len(s.action_ids)]
        firsts = np.cumsum([0, *sizes[:-1]])
        own[firsts] = values[firsts]
        return own

    values = [
        [changed(v, t) for v, t in zip(own, group.trainable, strict=True)]
        for own, group in zip(batch.evidence.values or [], batch.groups, strict=True)
    ]
    other = Batch(batch.groups, replace(batch.evidence, values=values))
    close(advantages("gae_step", {}, other), advantages("gae_step", {}, batch))


@few
@given(batch=batches())
def test_evidence_it_does_not_need_plays_no_part(batch: Batch) -> None:
    old = batch.evidence
    for name, options in EVERYTHING:
        needs = ESTIMATORS[name](**options).needs
        bare = Evidence(
            values=old.values if "values" in needs else None,
            final=old.final if "values" in needs else None,
            greedy=old.greedy if "greedy" in needs else None,
            teacher=old.teacher if "teacher" in needs else None,
            penalties=old.penalties,
        )
        expected = advantages(name, options, batch)
        close(advantages(name, options, Batch(batch.groups, bare)), expected, (name, options), exactly=True)


def test_groups_that_do_not_differ_teach_nothing_step_by_step() -> None:
    """Equal rewards: exactly zero from every estimator that compares within a group and looks at steps."""
    one = _example().groups[0]
    equal = Group(one.task, (one.trajectories[0],) * 4)
    for name, options in (("gigpo", {}), ("reinforce_pp", {"baseline": "group_mean"})):
        assert not any(row.any() for row in credit(ESTIMATORS[name](**options), [equal]).advantages[0])


def _example() -> Batch:
    task = Task("0", "")
    drawn = [([0, 1], 1, {"progress": 0.1}, "a"), ([1], 2, {"progress": 0.2}, "b")]
    members = tuple(trajectory(task, i, drawn, {"correct": float(i)}, "done") for i in range(3))
    groups = [Group(task, members)]
    return Batch(groups, evidence(groups, np.random.default_rng(0), False))
