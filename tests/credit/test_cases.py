"""The public cases about advantages with their own numbers, and neighbours of the same kind."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from renma.credit import ESTIMATORS, Evidence, credit
from renma.credit.gae import gae_step, gae_token
from renma.credit.group_relative import dr_grpo, grpo
from renma.credit.recursions import compress, discounted, gae, masked_gae, masked_returns
from renma.credit.returns import reinforce_pp, remax
from renma.credit.turn_level import turn_level
from renma.credit.whitening import task_normalised
from renma.errors import RecipeError, RunError
from renma.types import Action, Group, Step, Task, Trajectory

few = settings(max_examples=30, deadline=None)


def step(tokens: int, reward: float = 0.0, key: str | None = None, logprob: float = 0.0) -> Step:
    ids = np.zeros(tokens, np.int32)
    logprobs = np.full(tokens, logprob, np.float32)
    return Step(np.zeros(3, np.int32), ids, logprobs, ids, Action(""), reward={"r": reward}, state_key=key)


def trajectory(*steps: Step, outcome: float = 0.0, status: str = "done", family: str = "default") -> Trajectory:
    return Trajectory(Task("t", "", family=family), 0, steps, status, "answer", rewards={"s": outcome})


def group(*members: Trajectory) -> Group:
    return Group(members[0].task, members)


def rows(estimator, *groups: Group, evidence: Evidence | None = None) -> list[list[float]]:
    """The advantages of all members of all groups."""
    return [row.tolist() for own in credit(estimator, groups, evidence).advantages for row in own]


def arrays(*values: list[float]) -> list[list[np.ndarray]]:
    """One group's evidence."""
    return [[np.array(v, np.float32) for v in values]]


# -- 2.6, 2.7: observations and padding ------------------------------------------------------------------------------


def test_case_2_6_gae_skips_an_observation_between():
    found = masked_gae([0, 0, 1], [0.2, 9, 0.5], [1, 0, 1], 0.0, 1.0, 0.9)
    assert found == pytest.approx([0.75, 0.0, 0.5])


def test_case_2_6_a_reward_on_a_trailing_masked_token_is_not_lost():
    rewards, mask = [0, 0, 0, 2.0], [1, 1, 0, 0]
    assert compress(rewards, mask).tolist() == [0.0, 2.0]
    assert masked_returns(rewards, mask, 0.9) == pytest.approx([1.8, 2.0, 0.0, 0.0])


def test_case_2_6_a_reward_between_belongs_to_the_action_before_it():
    assert compress([0, 1.5, 0, 0.5], [1, 0, 1, 0]).tolist() == [1.5, 0.5]
    assert compress([0.25, 0, 1], [0, 1, 1]).tolist() == [0.25, 1.0]  # before anything was sampled: the first
    with pytest.raises(ValueError, match="without a sampled token"):
        compress([0.0, 1.0], [0, 0])
    assert compress([0.0, 0.0], [0, 0]).tolist() == []


def test_case_2_6_in_a_trajectory():
    """The literal numbers through the estimators: an observation between two actions, a last turn without a token."""
    two = trajectory(step(1), step(1, 1.0))
    critic = Evidence(values=arrays([0.2, 0.5]), final=[[0.0]])
    assert rows(gae_token(1.0, 0.9, whiten=False), group(two), evidence=critic)[0] == pytest.approx([0.75, 0.5])
    assert rows(gae_step(1.0, 0.9, whiten=False), group(two), evidence=critic)[0] == pytest.approx([0.75, 0.5])
    silent = trajectory(step(2), step(0), outcome=2.0)
    critic = Evidence(values=arrays([0.0, 0.0]), final=[[0.0]])
    assert rows(gae_token(0.9, 1.0, whiten=False), group(silent), evidence=critic)[0] == pytest.approx([1.8, 2.0])


@pytest.mark.parametrize("place", [0, 1, 2])
def test_case_2_6_a_turn_without_a_token_loses_no_reward(place: int):
    """Wherever the empty turn stands, its reward is in the returns of every estimator."""
    steps = [step(2), step(2)]
    steps.insert(place, step(0, 2.0))
    one, other = trajectory(*steps), trajectory(step(2), step(2))
    critic = Evidence(values=arrays([0.0] * 4, [0.0] * 4), final=[[0.0, 0.0]])
    for make in (gae_token(1.0, 1.0, whiten=False), gae_step(1.0, 1.0, whiten=False)):
        assert rows(make, group(one, other), evidence=critic)[0][:2] == [2.0, 2.0]
    assert rows(dr_grpo(), group(one, other))[0] == [1.0] * 4
    assert rows(turn_level(std=False), group(one, other))[0][:2] == [3.0, 3.0]


def test_case_2_6_gamma_does_not_decay_over_observations():
    """The same tokens in one action, in two, or with an idle turn between: the same discounted returns."""
    layouts = [(step(4, 1.0),), (step(2), step(2, 1.0)), (step(2), step(0), step(1), step(1, 1.0))]
    critic = Evidence(values=arrays([0.0] * 4), final=[[0.0]])
    for steps in layouts:
        found = rows(gae_token(0.5, 1.0, whiten=False), group(trajectory(*steps)), evidence=critic)[0]
        assert found == [0.125, 0.25, 0.5, 1.0]


def test_case_2_7_the_value_of_a_padded_slot_plays_no_part():
    found = masked_gae([0, 1, 0], [0, 0, 50], [1, 1, 0], 0.0, 1.0, 0.95)
    assert found == pytest.approx([0.95, 1.0, 0.0])


@few
@given(
    st.lists(st.floats(-5, 5), min_size=1, max_size=6),
    st.integers(0, 4),
    st.floats(-1e6, 1e6),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_case_2_7_no_width_of_padding_does(rewards, width, garbage, gamma, lam):
    values = [0.1 * i for i in range(len(rewards))]
    mask = [1] * len(rewards) + [0] * width
    padded = masked_gae(rewards + [0] * width, values + [garbage] * width, mask, 0.0, gamma, lam)
    assert padded[: len(rewards)] == pytest.approx(gae(rewards, values, 0.0, gamma, lam))
    left = masked_gae([0] * width + rewards, [garbage] * width + values, mask[::-1], 0.0, gamma, lam)
    assert left[width:] == pytest.approx(gae(rewards, values, 0.0, gamma, lam))


# -- 2.3, 2.4, 2.18, 2.19: groups ------------------------------------------------------------------------------------

RELATIVE = [name for name in ESTIMATORS if getattr(ESTIMATORS[name](), "min_group_size", 1) > 1]


def test_the_estimators_that_need_a_group():
    assert sorted(RELATIVE) == ["dr_grpo", "gigpo", "grpo", "pairs", "per_component", "rloo", "turn_level"]


@pytest.mark.parametrize("name", sorted(set(RELATIVE) - {"turn_level"}))
def test_case_2_3_rounding_is_not_a_difference(name: str):
    one = group(*(trajectory(step(2), outcome=r) for r in (0.1 + 0.2, 0.3, 0.3, 0.3)))
    assert rows(ESTIMATORS[name](), one) == [[0.0, 0.0]] * 4


def test_case_2_3_nor_is_it_between_steps_in_the_same_state():
    one = group(*(trajectory(step(1, r, key="a")) for r in (0.1 + 0.2, 0.3, 0.3)))
    assert rows(ESTIMATORS["gigpo"](), one) == [[0.0]] * 3


@pytest.mark.parametrize("name", RELATIVE)
def test_case_2_4_and_2_18_a_group_of_one_is_refused(name: str):
    with pytest.raises(RecipeError, match=f"group_size must be >= 2 for {name}.*group by task"):
        credit(ESTIMATORS[name](), [group(trajectory(step(2), outcome=0.7))])


@pytest.mark.parametrize(
    ("name", "options"), [*((n, {}) for n in RELATIVE), ("reinforce_pp", {"baseline": "group_mean"})]
)
def test_case_2_18_a_group_that_failures_reduced_to_one_teaches_nothing(name: str, options: dict):
    alive, dead = trajectory(step(2, 0.3), outcome=0.7), trajectory(step(2), outcome=0.1, status="failed")
    whole = [trajectory(step(1), outcome=1.0), trajectory(step(1), outcome=0.0)]
    reduced, apart = group(alive, dead), group(*whole)
    estimator = ESTIMATORS[name](**options)
    together = rows(estimator, reduced, apart)
    assert together[0] == [0.0, 0.0]
    assert together[1:] == rows(estimator, apart)


def test_case_2_18_the_same_rule_at_every_size():
    """Leave-one-out of 2 and 5 members, and the remedies for a group of one."""
    for n in (2, 5):
        outcomes = [0.1 * i * i for i in range(n)]
        found = rows(ESTIMATORS["rloo"](), group(*(trajectory(step(1), outcome=r) for r in outcomes)))
        rest = [(sum(outcomes) - r) / (n - 1) for r in outcomes]
        assert [row[0] for row in found] == pytest.approx(
            [r - b for r, b in zip(outcomes, rest, strict=True)], abs=1e-6
        )
    single = group(trajectory(step(2), outcome=0.7))
    assert rows(ESTIMATORS["reinforce"](), single)[0] == pytest.approx([0.7, 0.7])  # compares with nothing: raw
    assert rows(remax(), single, evidence=Evidence(greedy=[0.2]))[0] == pytest.approx([0.5, 0.5])


def test_case_2_19_group_relative_advantages_are_not_whitened_over_steps():
    """Episodes of 1 and 3 steps: +1 and -1 stay +1 and -1; the group's mean of [1, 0] is .5, not .25."""
    one = group(trajectory(step(2), outcome=1.0), trajectory(step(2), step(2), step(2), outcome=0.0))
    assert rows(grpo(), one) == [pytest.approx([1] * 2, abs=1e-5), pytest.approx([-1] * 6, abs=1e-5)]
    assert rows(dr_grpo(), one) == [[0.5] * 2, [-0.5] * 6]
    assert rows(ESTIMATORS["gigpo"](), one) == [[0.5] * 2, [-0.5] * 6]
    assert rows(turn_level(process_weight=0.0, std=False), one) == [[0.5] * 2, [-0.5] * 6]


def test_case_2_19_step_credit_weighs_steps_alike_whatever_their_tokens():
    one = group(trajectory(step(1), step(9, 1.0)))
    critic = Evidence(values=arrays([0.0] * 10), final=[[0.0]])
    assert rows(gae_step(0.0, 1.0), one, evidence=critic)[0] == [-1.0] + [1.0] * 9


# -- 10.7: rewards of steps ------------------------------------------------------------------------------------------


def test_case_10_7_returns_to_go():
    assert discounted([0, 1, 0.5], 0.5).tolist() == [0.625, 1.25, 0.5]


def test_case_10_7_each_lands_on_its_own_steps_tokens():
    one = trajectory(step(2), step(1, 1.0), step(3, 0.5))
    other = trajectory(step(1))
    found = rows(turn_level(gamma=0.5, outcome_weight=0.0), group(one, other))
    assert found == [[0.625, 0.625, 1.25, 0.5, 0.5, 0.5], [0.0]]
    critic = Evidence(values=arrays([0.0] * 6, [0.0]), final=[[0.0, 0.0]])
    found = rows(gae_step(0.5, 1.0, whiten=False), group(one, other), evidence=critic)
    assert found[0] == [0.625, 0.625, 1.25, 0.5, 0.5, 0.5]


def test_case_10_7_a_penalty_is_a_reward_of_its_own_token():
    one = trajectory(step(2, 1.0), step(1), outcome=2.0)
    penalties = arrays([-0.25, 0.0, -0.5])
    critic = Evidence(values=arrays([0.0] * 3), final=[[0.0]], penalties=penalties)
    assert rows(gae_token(0.0, 1.0, whiten=False), group(one), evidence=critic)[0] == [-0.25, 1.0, 1.5]
    assert rows(gae_step(0.0, 1.0, whiten=False), group(one), evidence=critic)[0] == [0.75, 0.75, 1.5]
    assert rows(ESTIMATORS["reinforce"](), group(one), evidence=critic)[0] == [2.25] * 3


# -- truncation, bootstrapping, anchors, teachers, families ----------------------------------------------------------


def test_a_truncated_trajectory_is_bootstrapped():
    cut, ended = trajectory(step(1), status="truncated"), trajectory(step(1))
    critic = Evidence(values=arrays([0.5], [0.5]), final=[[1.0, 0.0]])
    for make in (gae_token(0.9, 1.0, whiten=False), gae_step(0.9, 1.0, whiten=False)):
        found = credit(make, [group(cut, ended)], critic)
        assert [row.tolist() for row in found.advantages[0]] == [pytest.approx([0.4]), [-0.5]]
        assert found.targets is not None
        assert [row.tolist() for row in found.targets[0]] == [pytest.approx([0.9]), [0.0]]


def test_targets_are_taken_before_whitening_and_lie_on_the_first_token():
    one = trajectory(step(2), step(3, 1.0))
    critic = Evidence(values=arrays([0.5, 9, 0.25, 9, 9]), final=[[0.0]])
    found = credit(gae_step(1.0, 0.0), [group(one)], critic)
    np.testing.assert_allclose(found.targets[0][0], [0.25, np.nan, 1.0, np.nan, np.nan])
    assert found.advantages[0][0].tolist() == [-1, -1, 1, 1, 1]


def test_anchor_states_are_compared_within_a_group_only():
    gigpo = ESTIMATORS["gigpo"](gamma=1.0)
    first = group(trajectory(step(1, key="a"), step(1, 1.0, key="b")), trajectory(step(1, key="a"), step(1, key="c")))
    second = group(trajectory(step(1, 5.0, key="a")), trajectory(step(1, key=None)), trajectory(step(1, key=None)))
    found = rows(gigpo, first, second)
    # a: returns-to-go 1 and 0, mean .5; b and c are alone. Episode part +-.5.
    assert found[:2] == [[1.0, 0.5], [-1.0, -0.5]]
    assert found[2:] == [pytest.approx([10 / 3]), pytest.approx([-5 / 3]), pytest.approx([-5 / 3])]
    assert credit(gigpo, [first]).metrics["anchored_share"] == 0.5


def test_distillation_is_the_gap_to_the_teacher():
    one = trajectory(step(2, logprob=-1.0))
    found = credit(ESTIMATORS["distillation"](0.5), [group(one)], Evidence(teacher=arrays([-0.5, -3.0])))
    assert found.advantages[0][0].tolist() == [0.25, -1.0]
    assert found.metrics["teacher_kl"] == 0.75


def test_pairs_are_the_best_and_the_worst():
    members = [trajectory(step(2), outcome=r) for r in (0.5, 1.0, 0.0, 1.0)]
    found = credit(ESTIMATORS["pairs"](), [group(*members), group(members[1], members[1])])
    assert [row.tolist() for row in found.advantages[0]] == [[0, 0], [1, 1], [-1, -1], [0, 0]]
    assert not any(row.any() for row in found.advantages[1])
    assert found.metrics == {"pairs": 1.0, "groups_without_pair": 1.0, "pair_margin": 1.0}


def test_pairs_from_where_they_part():
    same, changed = step(2), step(2)
    changed = Step(same.prompt_ids, np.ones(2, np.int32), same.logprobs, same.versions, Action(""))
    good, bad = trajectory(same, changed, step(1), outcome=1.0), trajectory(same, same, outcome=0.0)
    pairs = ESTIMATORS["pairs"](from_divergence=True)
    assert rows(pairs, group(good, bad)) == [[0, 0, 1, 1, 1], [0, 0, -1, -1]]
    twin = trajectory(same, same, outcome=1.0)
    assert rows(pairs, group(twin, bad)) == [[0, 0, 0, 0], [0, 0, 0, 0]]  # nothing was done differently


def test_best_takes_rounding_for_the_threshold_itself():
    members = [trajectory(step(1, 0.7), step(1, 0.2), step(1, 0.1)), trajectory(step(1), outcome=0.99)]
    assert members[0].ret < 1.0
    assert rows(ESTIMATORS["best"](threshold=1.0), group(*members)) == [[1, 1, 1], [0]]
    full = [trajectory(step(1), outcome=r) for r in (1.0, 3.0, 2.0, 3.0)]
    assert rows(ESTIMATORS["best"](threshold=1.0, per_group=2), group(*full)) == [[0], [1], [0], [1]]
    equals = [trajectory(step(1), outcome=1.0)] * 40
    assert rows(ESTIMATORS["best"](per_group=5), group(*equals)) == [[1]] * 5 + [[0]] * 35


def test_families_are_normalised_apart():
    easy = [trajectory(step(1), outcome=r, family="easy") for r in (10.0, 0.0)]
    hard = [trajectory(step(1), outcome=r, family="hard") for r in (0.1, 0.0)]
    lone = trajectory(step(1), outcome=0.3, family="lone")
    groups = [group(*easy), group(*hard), group(lone)]
    found = task_normalised(credit(ESTIMATORS["reinforce"](), groups).advantages, groups)
    assert [row.tolist() for own in found for row in own][:4] == [pytest.approx([v]) for v in (1, -1, 1, -1)]
    assert found[2][0].tolist() == pytest.approx([0.3])  # one token alone stays as it is


# -- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gae_token", "gae_step", "remax", "distillation"])
def test_missing_evidence_is_named(name: str):
    with pytest.raises(RunError, match="credit: the|no greedy returns"):
        credit(ESTIMATORS[name](), [group(trajectory(step(1)))])


@pytest.mark.parametrize("name", ["gae_token", "gae_step"])
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_broken_critic_is_no_advantage(name: str, wrong: float):
    whole, broken = trajectory(step(1)), trajectory(step(1))
    members = group(whole, broken)
    with pytest.raises(RunError, match="task default/t, member 0: the critic's value is"):
        credit(ESTIMATORS[name](), [members], Evidence(values=arrays([0.0], [wrong]), final=[[0.0, 0.0]]))
    with pytest.raises(RunError, match="the critic's value after the last step is"):
        credit(ESTIMATORS[name](), [members], Evidence(values=arrays([0.0], [0.0]), final=[[wrong, 0.0]]))


def test_evidence_of_another_shape_is_refused():
    with pytest.raises(RunError, match="one number for each sampled token"):
        credit(gae_token(), [group(trajectory(step(2)))], Evidence(values=arrays([0.0]), final=[[0.0]]))
    with pytest.raises(RunError, match="final must hold one value"):
        credit(gae_token(), [group(trajectory(step(1)))], Evidence(values=arrays([0.0]), final=[[]]))


@pytest.mark.parametrize("name", ["reinforce_pp", "gae_token", "turn_level", "gigpo"])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_step_reward_that_is_no_number_names_its_trajectory(name: str, wrong: float):
    members = group(trajectory(step(1, 1.0)), trajectory(step(1), step(1, wrong)))
    critic = Evidence(values=arrays([0.0], [0.0, 0.0]), final=[[0.0, 0.0]])
    with pytest.raises(RunError, match="task default/t, member 0: the sum of the steps' rewards is"):
        credit(ESTIMATORS[name](), [members], critic)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gae_token", {"gamma": 1.5}, "gae_token: gamma must be from 0 to 1; got 1.5"),
        ("gae_step", {"lam": -0.1}, "gae_step: lam must be from 0 to 1"),
        ("gigpo", {"omega": float("nan")}, "gigpo: omega must be a finite number"),
        ("reinforce_pp", {"gamma": 0.9, "baseline": "group_mean"}, "leave gamma at 1"),
        ("best", {"per_group": 0}, "per_group must be at least 1"),
    ],
)
def test_options_that_mean_nothing_are_refused(name: str, options: dict, message: str):
    with pytest.raises(RecipeError, match=message):
        ESTIMATORS[name](**options)


def test_an_estimator_of_the_old_kind_is_one_too():
    def mine(groups):
        return [[np.ones(t.sampled_tokens, np.float32) for t in g.trainable] for g in groups]

    assert rows(mine, group(trajectory(step(2)))) == [[1.0, 1.0]]
    with pytest.raises(RunError, match="one number for each of its sampled tokens"):
        credit(lambda groups: [[np.ones(1)]], [group(trajectory(step(2)))])


def test_reinforce_pp_whitens_over_tokens():
    """Tokens, not trajectories: 1 token at +.5 and 3 at -.5 have mean -.25."""
    one = group(trajectory(step(1), outcome=1.0), trajectory(step(3), outcome=0.0))
    found = rows(reinforce_pp(baseline="group_mean"), one)
    assert found[0] == pytest.approx([np.sqrt(3)])
    assert found[1] == pytest.approx([-1 / np.sqrt(3)] * 3)
