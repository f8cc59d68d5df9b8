"""Rewards: weights, abstention, and what the built-in ones say."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from renma.errors import RecipeError
from renma.recipe import Component
from renma.rewards import REWARDS
from renma.rewards.base import Judgement, NamedReward, RewardError, average, build_rewards, combine, combine_rows
from renma.rewards.outcome import AnswerNumber, Format, Overlong, Success, Turns
from renma.types import Action, Step, Task, ToolCall, Trajectory

CALL = Action("", (ToolCall("calc", {"expression": "1+1"}),))
BAD_CALL = Action("", (ToolCall("calc", error="no closing ')'"),))
NOTHING = Action("")


def trajectory(
    actions: Sequence[Action] = (CALL, Action("2")), *, member: int = 0, answer: Any = 2, **fields: Any
) -> Trajectory:
    ids = np.zeros(1, np.int32)
    steps = tuple(Step(ids, ids, np.zeros(1, np.float32), ids, action) for action in actions)
    fields = {"status": "done", "stop_reason": "answer"} | fields
    return Trajectory(Task("t", "1 + 1 =", answer), member, steps, **fields)


def row(values: list[float | None], name: str) -> NamedReward:
    return NamedReward(name, lambda one: values[one.member])


def rows(rewards: Sequence[NamedReward], members: int) -> list[dict[str, float]]:
    return [one.outcome for one in judgements(rewards, members)]


def judgements(rewards: Sequence[NamedReward], members: int) -> list[Judgement]:
    return asyncio.run(combine_rows(rewards, [trajectory(member=m) for m in range(members)]))


def test_case_2_12_no_opinion_counts_in_no_sum_and_no_average() -> None:
    nan = math.nan
    for missing in (None, nan):
        first, second = row([1, missing, 0, 1], "f1"), row([missing, 1, 1, missing], "f2")
        assert [sum(one.values()) for one in rows([first, second], 4)] == [1, 1, 1, 1]
        assert [set(one) for one in rows([first, second], 4)] == [{"f1"}, {"f2"}, {"f1", "f2"}, {"f1"}]
    assert average([0.5, nan, 0.8]) == pytest.approx(0.65)
    assert average([0.5, None, 0.8]) == pytest.approx(0.65)
    assert average([None, nan]) is None


def test_case_2_12_rows_on_which_every_reward_abstains_are_named() -> None:
    with pytest.raises(RewardError) as caught:
        rows([row([None] * 4, "only")], 4)
    message = str(caught.value)
    assert "only" in message and "\n" not in message
    assert all(f"member {m}" in message for m in range(4))
    with pytest.raises(RewardError, match=r"on task 't' member 2;"):
        rows([row([1, 0, None], "a"), row([None, None, math.nan], "b")], 3)


def test_weights_multiply_and_async_rewards_are_awaited() -> None:
    async def slow(one: Trajectory) -> float:
        await asyncio.sleep(0)
        return 3.0

    made = asyncio.run(combine([NamedReward("slow", slow, 0.5), NamedReward("on", lambda _: True, -2)], trajectory()))
    assert made.outcome == {"slow": 1.5, "on": -2.0}
    assert made.steps == ({}, {})
    assert asyncio.run(combine([], trajectory())) == Judgement({}, ({}, {}))


@pytest.mark.parametrize("value", ["yes", math.inf, [1.0], {"a": 1.0}, [1.0, "two"], [[1.0, 2.0], 1.0]])
def test_what_is_no_finite_number_is_an_error(value: Any) -> None:
    with pytest.raises(RewardError, match="'odd' gave"):
        asyncio.run(combine([NamedReward("odd", lambda _: value)], trajectory()))


def test_case_3_25_done_is_not_won() -> None:
    success = Success()
    assert success(trajectory(success=False, status="truncated", stop_reason="step_limit")) == 0.0
    assert success(trajectory(success=None, status="truncated", stop_reason="step_limit")) == 0.0
    assert success(trajectory(success=True, status="truncated", stop_reason="step_limit")) == 1.0
    assert success(trajectory(success=False)) == 0.0
    assert success(trajectory(success=True)) == 1.0
    assert success(trajectory(success=None)) is None


def test_answer_number() -> None:
    reward = AnswerNumber()
    assert reward(trajectory()) == 1.0
    assert reward(trajectory([CALL, Action("**2.0** apples")])) == 1.0
    assert reward(trajectory([CALL, Action("3")])) == 0.0
    assert reward(trajectory([CALL])) == 0.0
    assert reward(trajectory([])) == 0.0
    assert reward(trajectory(answer="Paris")) is None


def test_format_is_the_share_of_well_formed_actions() -> None:
    reward = Format()
    assert reward(trajectory()) == 1.0
    assert reward(trajectory([BAD_CALL, CALL, NOTHING, Action("2")])) == 0.5
    assert reward(trajectory([Action("", (*CALL.tool_calls, *BAD_CALL.tool_calls))])) == 0.0
    assert reward(trajectory([])) is None


def test_turns_cost_past_the_free_ones() -> None:
    assert Turns(cost=0.1, free=2)(trajectory([CALL] * 5)) == pytest.approx(-0.3)
    assert Turns(cost=0.1, free=2)(trajectory([CALL])) == 0.0
    with pytest.raises(RecipeError, match="turns"):
        Turns(cost=-1)


@pytest.mark.parametrize(("tokens", "penalty"), [(0, 0.0), (6, 0.0), (7, -0.125), (8, -0.25), (10, -0.5), (30, -0.5)])
def test_overlong_falls_in_the_buffer_before_the_limit_and_no_further(tokens: int, penalty: float) -> None:
    reward = Overlong(limit=10, buffer=4, factor=0.5)
    one = trajectory([Action("")] * tokens)
    assert one.sampled_tokens == tokens
    assert reward(one) == pytest.approx(penalty)
    limit, buffer = 10, 4
    assert reward(one) == pytest.approx(max(-0.5, min(0, -0.5 * (tokens - (limit - buffer)) / buffer)))


@pytest.mark.parametrize("options", [{"limit": 4, "buffer": 5}, {"limit": 4, "buffer": 0}, {"factor": -1}])
def test_overlong_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="overlong"):
        Overlong(**({"limit": 10, "buffer": 4} | options))


@pytest.mark.parametrize("kind", [list, tuple, lambda values: np.array(values, np.float64), torch.tensor])
def test_case_10_7_one_number_a_step_lands_on_its_step(kind: Any) -> None:
    whole, parts = NamedReward("whole", lambda _: 5.0), NamedReward("parts", lambda _: kind([1.0, 2.0]), -0.5)
    one = trajectory()
    made = asyncio.run(combine([whole, parts], one))
    assert (made.outcome, made.steps) == ({"whole": 5.0}, ({"parts": -0.5}, {"parts": -1.0}))
    scored = made.on(one)
    assert scored.step_rewards == [-0.5, 4.0]
    assert scored.ret == 3.5


def test_case_2_12_a_step_without_an_opinion_has_no_component() -> None:
    parts = NamedReward("parts", lambda _: [None, 2.0])
    assert asyncio.run(combine([parts], trajectory())).steps == ({}, {"parts": 2.0})
    mute = NamedReward("mute", lambda _: [None, math.nan])
    with pytest.raises(RewardError, match=r"every reward \(mute\) abstained on task 't' member 0"):
        asyncio.run(combine([mute], trajectory()))
    assert asyncio.run(combine([mute, parts], trajectory())).steps == ({}, {"parts": 2.0})


def test_case_2_12_where_nothing_was_sampled_there_is_nothing_to_judge() -> None:
    empty = trajectory([], status="truncated", stop_reason="context")
    assert asyncio.run(combine([NamedReward("mute", lambda _: None)], empty)) == Judgement({}, ())


@pytest.mark.parametrize("values", [[], [1.0], [1.0, 2.0, 3.0]])
def test_a_wrong_number_of_steps_names_the_reward_and_the_row(values: list[float]) -> None:
    wrong = NamedReward("parts", lambda _: values)
    message = rf"reward 'parts' gave {len(values)} numbers for the 2 steps of task 't' member 3"
    with pytest.raises(RewardError, match=message):
        asyncio.run(combine([wrong], trajectory(member=3)))


def bonus(one: Trajectory, *, size: float = 1.0) -> float:
    return size * len(one.steps)


def test_rewards_are_built_from_a_recipe() -> None:
    made = build_rewards(
        [
            Component(type="success", weight=2),  # type: ignore[call-arg]
            Component(type="turns", cost=0.5, name="brevity"),  # type: ignore[call-arg]
            Component(type="success", name="again"),  # type: ignore[call-arg]
        ]
    )
    assert [(one.name, one.weight) for one in made] == [("success", 2.0), ("brevity", 1.0), ("again", 1.0)]
    given = asyncio.run(combine(made, trajectory(success=True)))
    assert given.outcome == {"success": 2.0, "brevity": -0.5, "again": 1.0}
    assert {"answer_number", "format", "overlong", "success", "turns"} < set(REWARDS)
    assert all(callable(REWARDS[name]) for name in REWARDS)


def test_a_function_is_a_reward_and_its_other_parameters_are_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REWARDS._entries, "bonus", bonus)
    made = build_rewards([Component(type="bonus", size=0.25)])  # type: ignore[call-arg]
    assert asyncio.run(combine(made, trajectory())).outcome == {"bonus": 0.5}


@pytest.mark.parametrize(
    ("component", "message"),
    [
        ({"type": "sucess"}, "rewards.0: unknown reward 'sucess': did you mean 'success'"),
        ({"type": "turns", "costs": 1}, "rewards.0.costs: .*'cost'"),
        ({"type": "turns", "cost": "dear"}, "rewards.0.cost: "),
        ({"type": "success", "weight": "big"}, "rewards.0.weight: "),
        ({"type": "success", "weight": math.nan}, "rewards.0.weight: "),
        ({"type": "success", "name": 3}, "rewards.0.name: "),
        ({"type": "bonus", "sise": 1}, "rewards.0.sise: .*'size'"),
    ],
)
def test_mistakes_in_a_recipe_name_the_place(
    component: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(REWARDS._entries, "bonus", bonus)
    with pytest.raises(RecipeError, match=message):
        build_rewards([Component(**component)])


def test_two_rewards_of_one_name_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"rewards\.1\.name: 'success' is used twice"):
        build_rewards([Component(type="success"), Component(type="success")])
