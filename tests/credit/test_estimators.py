"""Estimators: the public cases, and properties over random groups."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from renma.credit import ESTIMATORS, Evidence, credit, group_signal, usable_groups
from renma.credit.group_relative import dr_grpo, grpo, per_component, rloo
from renma.credit.returns import reinforce
from renma.errors import RecipeError, RunError
from renma.parts import build
from renma.recipe import Component
from renma.types import Action, Group, Step, Task, Trajectory

few = settings(max_examples=30, deadline=None)

ALL = {
    "grpo": grpo(),
    "grpo_mean": grpo(std=False),
    "dr_grpo": dr_grpo(),
    "rloo": rloo(),
    "rloo_normalised": rloo(normalise=True),
    "per_component": per_component(),
    "reinforce": reinforce(),
    "reinforce_mean": reinforce("batch_mean"),
}
RELATIVE = [name for name in ALL if not name.startswith("reinforce")]


def step(tokens: int, **reward: float) -> Step:
    ids = np.zeros(tokens, np.int32)
    return Step(ids, ids, np.zeros(tokens, np.float32), ids, Action(""), reward=reward)


def trajectory(rewards, *, tokens=(3,), member=0, status="done", success=None, task="t") -> Trajectory:
    rewards = rewards if isinstance(rewards, dict) else {"score": rewards}
    steps = tuple(step(n) for n in tokens)
    return Trajectory(Task(task, ""), member, steps, status, "answer", success=success, rewards=rewards)


def group(*returns, **options) -> Group:
    members = tuple(trajectory(r, member=i, **options) for i, r in enumerate(returns))
    return Group(Task("t", ""), members)


def per_member(estimator, one: Group) -> list[float]:
    """One value per member; checks that it is the same on all its tokens."""
    rows = credit(estimator, [one]).advantages[0]
    assert [len(row) for row in rows] == [t.sampled_tokens for t in one.trainable]
    assert all(row.dtype == np.float32 and len(set(row.tolist())) == 1 for row in rows)
    return [float(row[0]) for row in rows]


# -- the cases -------------------------------------------------------------------------------------------------------


def test_case_2_1_leave_one_out_normalised_never_explodes():
    one = group(1.0, 0.0, 0.0, 0.0)
    assert per_member(rloo(), one) == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    assert per_member(rloo(normalise=True), one) == pytest.approx([1.0, -0.577350, -0.577350, -0.577350], abs=1e-5)


@few
@given(st.floats(1e-9, 1e-2), st.integers(3, 9), st.floats(-5, 5), st.data())
def test_case_2_1_an_outlier_among_near_equals_never_explodes(noise, n, base, data):
    """Not only equal others: nearly equal ones would blow the odd one up as well."""
    others = [base + noise * data.draw(st.floats(-1, 1)) for _ in range(n - 1)]
    values = per_member(rloo(normalise=True), group(base + 1.0, *others))
    assert max(map(abs, values)) < 100 * math.sqrt(n) + 1


@pytest.mark.parametrize("name", RELATIVE)
def test_case_2_3_rounding_is_not_a_difference(name):
    one = group(0.1 + 0.2, 0.3, 0.3, 0.3)
    assert per_member(ALL[name], one) == [0.0] * 4
    signal = group_signal([one])
    assert signal["zero_std_share"] == 1.0
    assert signal["zero_std_parts_share"] == 0.0


def test_case_2_3_uniform_in_sum_but_not_in_parts_is_reported():
    one = group({"a": -3.0, "b": 2.0}, {"a": 2.0, "b": -3.0})
    assert per_member(grpo(), one) == [0.0, 0.0]
    signal = group_signal([one, group(1.0, 0.0)])
    assert signal["zero_std_share"] == 0.5
    assert signal["zero_std_parts_share"] == 0.5


def test_case_2_4_the_group_is_the_task():
    """4 rollouts of one task: +-1 with our ddof 0 (the case's +-0.866 is ddof 1), sum 0."""
    values = per_member(grpo(), group(1.0, 1.0, 0.0, 0.0))
    assert values == pytest.approx([1, 1, -1, -1], abs=1e-5)
    assert sum(values) == 0


@pytest.mark.parametrize("name", RELATIVE)
def test_case_2_4_a_group_per_trajectory_is_refused(name):
    singles = [group(r) for r in (1.0, 1.0, 0.0, 0.0)]
    with pytest.raises(RecipeError, match=r"group_size must be >= 2 for .*group by task"):
        ALL[name](singles)


def test_case_2_16_per_component_tells_reward_mixes_apart():
    mixes = [(1, 0), (0, 1), (1, 1), (0, 0)]
    one = group(*({"correct": float(c), "format": float(f)} for c, f in mixes))
    summed = per_member(grpo(), one)
    assert summed == pytest.approx([0, 0, math.sqrt(2), -math.sqrt(2)], abs=1e-5)  # 1.2247 with ddof 1
    apart = per_member(per_component({"correct": 2.0, "format": 1.0}), one)
    assert apart == pytest.approx([1, -1, 3, -3], abs=1e-4)


@pytest.mark.parametrize("name", RELATIVE)
def test_case_2_18_a_group_of_one_is_refused_and_a_reduced_one_is_zero(name):
    estimator = ALL[name]
    with pytest.raises(RecipeError, match=f"group_size must be >= 2 for {estimator.name}"):
        estimator([group(0.7)])
    reduced = Group(Task("t", ""), (trajectory(0.7), trajectory(0.1, member=1, status="failed")))
    assert per_member(estimator, reduced) == [0.0]
    whole = group(1.0, 0.0)
    kept, dropped = usable_groups([reduced, whole])
    assert len(kept) == 1 and kept[0] is whole and dropped == 1
    assert group_signal([reduced, whole], minimum=2)["groups_dropped"] == 1


@pytest.mark.parametrize("sizes", [(2,), (5,), (2, 5), (1, 2, 5)])
def test_case_2_18_leave_one_out_equals_the_loop(sizes):
    draw = random.Random(7)
    groups = [group(*(draw.random() for _ in range(n))) for n in sizes]
    if 1 in sizes:
        with pytest.raises(RecipeError):
            rloo()(groups)
        return
    for one, rows in zip(groups, rloo()(groups).advantages, strict=True):
        r = [t.ret for t in one.trajectories]
        expected = [r[i] - sum(r[:i] + r[i + 1 :]) / (len(r) - 1) for i in range(len(r))]
        assert [float(row[0]) for row in rows] == pytest.approx(expected, abs=1e-6)


def test_case_2_19_statistics_are_over_trajectories_not_steps():
    """One step against three: the mean of [1, 0] is .5, and +-1 stays +-1 over the steps."""
    one = Group(Task("t", ""), (trajectory(1.0, tokens=(2,)), trajectory(0.0, tokens=(4, 1, 3), member=1)))
    assert per_member(dr_grpo(), one) == [0.5, -0.5]
    assert per_member(grpo(), one) == pytest.approx([1, -1], abs=1e-5)
    assert per_member(reinforce("batch_mean"), one) == [0.5, -0.5]
    assert group_signal([one])["return_mean"] == 0.5


# -- properties ------------------------------------------------------------------------------------------------------

quarters = st.integers(-40, 40).map(lambda n: n / 4)  # exact in float64, so that shifting them is exact too
returns = st.lists(quarters, min_size=2, max_size=7)


@pytest.mark.parametrize("name", list(ALL))
@few
@given(returns, st.randoms())
def test_order_of_members_changes_nothing(name, values, draw):
    order = list(range(len(values)))
    draw.shuffle(order)
    straight = per_member(ALL[name], group(*values))
    assert per_member(ALL[name], group(*(values[i] for i in order))) == [straight[i] for i in order]


@pytest.mark.parametrize("name", [*RELATIVE, "reinforce_mean"])
@few
@given(returns, quarters)
def test_a_constant_added_to_every_return_changes_nothing(name, values, shift):
    moved = per_member(ALL[name], group(*(v + shift for v in values)))
    assert moved == pytest.approx(per_member(ALL[name], group(*values)), abs=1e-5)


@pytest.mark.parametrize("name", ["grpo", "grpo_mean", "dr_grpo", "rloo", "per_component", "reinforce_mean"])
@few
@given(returns)
def test_advantages_of_a_group_sum_to_zero(name, values):
    assert sum(per_member(ALL[name], group(*values))) == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("name", list(ALL))
@few
@given(returns, st.floats(-1e6, 1e6, allow_nan=False))
def test_failed_members_enter_no_statistic(name, values, wrong):
    clean = group(*values)
    failed = trajectory(wrong, member=len(values), status="failed")
    assert per_member(ALL[name], Group(clean.task, (failed, *clean.trajectories))) == per_member(ALL[name], clean)


@few
@given(st.lists(returns, min_size=1, max_size=4))
def test_groups_do_not_touch_each_other(many):
    groups = [group(*values) for values in many]
    for name in RELATIVE:
        together = ALL[name](groups).advantages
        for one, rows in zip(groups, together, strict=True):
            assert [float(row[0]) for row in rows] == per_member(ALL[name], one)


@few
@given(st.floats(-1e9, 1e9), st.integers(2, 6))
def test_equal_returns_give_exactly_zero(value, n):
    for name in RELATIVE:
        assert per_member(ALL[name], group(*[value] * n)) == [0.0] * n


@few
@given(st.lists(st.floats(-1e29, 1e29), min_size=2, max_size=6))
def test_always_finite(values):
    for name in ALL:
        assert np.isfinite(per_member(ALL[name], group(*values))).all()


# -- single behaviours -----------------------------------------------------------------------------------------------


def test_reinforce_is_the_return_and_takes_a_group_of_one():
    steps = (step(2, shaping=0.25), step(1))
    one = Group(Task("t", ""), (Trajectory(Task("t", ""), 0, steps, "done", "answer", rewards={"s": 1.0}),))
    assert per_member(reinforce(), one) == [1.25]
    signal = group_signal([one])
    assert signal["return_mean"] == 1.25
    assert "zero_std_share" not in signal  # nothing to compare it with


def test_truncated_members_stay_in_the_statistics():
    one = Group(Task("t", ""), (trajectory(1.0), trajectory(0.0, member=1, status="truncated")))
    assert per_member(dr_grpo(), one) == [0.5, -0.5]


def test_a_group_in_which_everything_failed():
    one = group(1.0, 0.0, status="failed")
    for estimator in ALL.values():
        assert estimator([one]).advantages == [[]]
        assert estimator([]).advantages == []
    assert group_signal([one]) == {"groups_used": 0.0, "groups_dropped": 1.0}


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 1e300])
def test_a_return_that_is_no_number_names_its_trajectory(wrong):
    with pytest.raises(RunError, match="task default/t, member 1: the return is"):
        grpo()([group(0.0, wrong)])


def test_per_component_leaves_out_a_member_whose_reward_abstained():
    one = group({"a": 1.0, "b": 1.0}, {"a": 0.0}, {"a": 1.0, "b": 0.0})
    values = per_member(per_component(std=False), one)
    assert values == pytest.approx([1 / 3 + 0.5, -2 / 3, 1 / 3 - 0.5])


def test_per_component_counts_a_step_reward_that_never_came_as_zero():
    quiet, penalised = trajectory({"a": 1.0}), trajectory({"a": 1.0}, member=1)
    penalised = Trajectory(penalised.task, 1, (step(3, penalty=-1.0),), "done", "answer", rewards={"a": 1.0})
    assert per_member(per_component(std=False), Group(quiet.task, (quiet, penalised))) == [0.5, -0.5]


def test_group_signal_shares():
    groups = [
        Group(Task(str(i), ""), tuple(trajectory(float(s), success=s, member=m) for m, s in enumerate(row)))
        for i, row in enumerate([(True, True), (False, False), (True, False), (False, True)])
    ]
    signal = group_signal(groups)
    assert signal["solved_all_share"] == 0.25
    assert signal["solved_none_share"] == 0.25
    assert signal["solved_some_share"] == 0.5
    assert signal["zero_std_share"] == 0.5
    assert signal["return_mean"] == 0.5
    assert signal["return_std"] == 0.5
    assert signal["return_std_within"] == 0.25
    assert "solved_all_share" not in group_signal([group(1.0, 0.0)])  # success unknown


def test_every_registered_estimator_is_made_from_a_recipe_component():
    for name in ESTIMATORS:
        made = build(ESTIMATORS, Component(type=name), "algorithm.advantage")
        assert made.name == name
        halves = [[np.full(3, 0.5, np.float32)] * 2]
        evidence = Evidence(values=halves, final=[[0.0, 0.0]], greedy=[0.5], teacher=halves)
        assert credit(made, [group(1.0, 0.0)], evidence).advantages[0][0].shape == (3,)
    with pytest.raises(RecipeError, match=r"algorithm.advantage.sdt: 'grpo' has no option 'sdt'; did you mean 'std'"):
        build(ESTIMATORS, Component(type="grpo", sdt=False), "algorithm.advantage")
    with pytest.raises(RecipeError, match=r"algorithm.advantage.baseline"):
        build(ESTIMATORS, Component(type="reinforce", baseline="median"), "algorithm.advantage")


def test_a_running_mean_is_of_the_batches_before_and_can_be_taken_up_again():
    one = reinforce("running_mean", decay=0.5)

    def batch(*returns):
        return [group(*returns)]

    first = credit(one, batch(1.0, 3.0)).advantages[0]
    assert [float(a[0]) for a in first] == [-1.0, 1.0], "nothing came before: the batch's own mean"
    second = credit(one, batch(4.0, 8.0)).advantages[0]
    assert [float(a[0]) for a in second] == [2.0, 6.0], "minus 2, whatever this batch holds"
    again = reinforce("running_mean", decay=0.5)
    again.load_state_dict(one.state_dict())
    for estimator in (one, again):
        third = credit(estimator, batch(0.0, 0.0)).advantages[0]
        assert [float(a[0]) for a in third] == [-4.0, -4.0], "0.5 * 2 + 0.5 * 6"
    with pytest.raises(RecipeError, match="decay must be at least 0 and below 1"):
        reinforce("running_mean", decay=1.0)
