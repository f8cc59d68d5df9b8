"""Tool environments: calls are answered, an answer ends the episode, and ending is not winning."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from renma.agents.parsers.plain import PlainParser
from renma.environments import DEMONSTRATORS, ENVIRONMENTS
from renma.environments.base import Environment
from renma.environments.calculator import CalculatorEnvironment
from renma.environments.tool_environment import ToolEnvironment
from renma.errors import DataError, RecipeError
from renma.parts import build
from renma.recipe import Component
from renma.tools.base import tool
from renma.types import Action, Message, StepResult, Task, ToolCall

SUM = Task("s", "7 + 25 - 4 =", 28)


def act(environment: Environment, written: str) -> StepResult:
    """A step with an action in the plain format."""
    result = environment.step(PlainParser().parse((), written))
    assert not isinstance(result, StepResult)
    return asyncio.run(result)  # type: ignore[arg-type]


def started(task: Task = SUM, **options: Any) -> CalculatorEnvironment:
    environment = CalculatorEnvironment(**options)
    assert environment.reset(task) == task.prompt
    return environment


def test_an_episode_with_a_pocket_calculator() -> None:
    environment = started(max_operations=1)
    first = act(environment, "Call: calc(7+25)\n")
    assert first.observation.messages == (Message("tool", "32", name="calc"),)  # type: ignore[union-attr]
    assert first.reward == {} and not first.terminated and not first.truncated and "success" not in first.info
    assert act(environment, "Call: calc(32-4)\n").observation.messages[0].text == "28"  # type: ignore[union-attr]
    last = act(environment, "Answer: 28\n")
    assert last.terminated and last.reward == {"success": 1.0}
    assert last.info == {"success": True, "stop": "answer"}
    assert last.observation.messages == ()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("Call: calc(7+25-4)\n", "error: only 1 operation a call"),
        ("Call: calc(1/0)\n", "error: division by zero"),
        ("Call: calc()\n", "error: calc: expression: Field required"),
        ("Call: solve(1+1)\n", "error: unknown tool 'solve'; available: calc"),
        ("Call: calc(1\n", "error: no closing ')'; write Call: tool(expression)"),
    ],
)
def test_a_bad_call_is_an_observation_and_the_episode_goes_on(written: str, shown: str) -> None:
    environment = started(max_operations=1)
    result = act(environment, written)
    assert result.observation.messages[0].text == shown  # type: ignore[union-attr]
    assert not result.terminated
    assert act(environment, "Answer: 28\n").info["success"] is True


def test_case_3_25_terminated_truncated_and_success_are_apart() -> None:
    wrong = act(started(), "Answer: 27\n")
    assert (wrong.terminated, wrong.truncated, wrong.info["success"], wrong.reward) == (
        True,
        False,
        False,
        {"success": 0},
    )
    neither = act(started(), "I think so\n")
    assert (neither.terminated, neither.truncated) == (True, False)
    assert neither.info == {"success": False, "stop": "stop"} and neither.reward == {"success": 0.0}
    environment = started(max_turns=2)
    for _ in range(2):  # out of turns: the environment claims neither an end nor success
        result = act(environment, "Call: calc(1+1)\n")
    assert not result.terminated and "success" not in result.info


def test_max_turns_is_the_instances_own() -> None:
    assert CalculatorEnvironment(max_turns=3).max_turns == 3
    assert CalculatorEnvironment().max_turns == 8
    for options in ({"max_turns": 0}, {"max_operations": 0}):
        with pytest.raises(RecipeError, match="at least 1"):
            CalculatorEnvironment(**options)


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("**58**", 58, True),
        ("$12.00", 12, True),
        ("0.333333", 1 / 3, True),
        ("59", 58, False),
        ("18", "so\n#### 18", True),
    ],
)
def test_answers_are_compared_as_numbers(answer: str, gold: Any, right: bool) -> None:
    assert act(started(Task("t", "?", gold)), f"Answer: {answer}\n").info["success"] is right


def test_a_task_without_a_number_is_a_data_error() -> None:
    with pytest.raises(DataError, match="task 't' of 'default': .*'Paris'"):
        act(started(Task("t", "?", "Paris")), "Answer: 3\n")


def test_calls_past_the_limit_of_a_turn_are_answered() -> None:
    environment = started()
    environment.max_calls_per_turn = 1
    shown = act(environment, "Call: calc(1+1)\nCall: calc(2+2)\n").observation
    assert [message.text for message in shown.messages] == ["2", "not run: limit of 1 call a turn"]  # type: ignore[union-attr]


class Library(ToolEnvironment):
    @tool
    async def find(self, title: str, copies: int = 1) -> dict[str, int]:
        """Find a book."""
        await asyncio.sleep(0)
        return {title: copies}

    async def check(self, task: Task, answer: str) -> float:  # type: ignore[override]
        return 0.5 if answer == "half" else float(answer == task.answer)


def test_case_10_8_an_own_environment_needs_a_tool_and_a_check() -> None:
    environment = Library()
    assert environment.reset(Task("l", "Which?", "坊っちゃん")) == "Which?"
    assert [schema["function"]["name"] for schema in environment.tools] == ["find"]
    found = asyncio.run(environment.step(Action("", (ToolCall("find", {"title": "坊っちゃん"}, "c1"),))))
    assert found.observation.messages == (Message("tool", '{"坊っちゃん": 1}', tool_call_id="c1", name="find"),)  # type: ignore[union-attr]
    assert asyncio.run(environment.step(Action("坊っちゃん"))).info["success"] is True
    partly = asyncio.run(environment.step(Action("half")))
    assert partly.reward == {"success": 0.5} and partly.info["success"] is False


def test_case_10_8_three_lines_are_an_environment() -> None:
    class Parrot(Environment):
        def reset(self, task: Task) -> str:
            return task.prompt

        def step(self, action: Action) -> StepResult:
            return StepResult(reward=float(action.text == "hello"), terminated=True)

    environment = Parrot()
    assert environment.reset(SUM) == SUM.prompt and environment.tools == []
    assert environment.step(Action("hello")).reward == 1.0


def test_a_tool_environment_without_check_says_so() -> None:
    environment = ToolEnvironment()
    environment.reset(SUM)
    with pytest.raises(TypeError, match="ToolEnvironment has no check"):
        asyncio.run(environment.step(Action("28")))


def test_environments_and_demonstrators_are_built_from_a_recipe() -> None:
    component = Component(type="calculator", max_operations=1, max_turns=5)  # type: ignore[call-arg]
    assert build(ENVIRONMENTS, component, "environment").max_turns == 5
    with pytest.raises(RecipeError, match=r"environment\.max_turn.*'max_turns'"):
        build(ENVIRONMENTS, Component(type="calculator", max_turn=5), "environment")  # type: ignore[call-arg]
    assert list(DEMONSTRATORS) == ["arithmetic", "word_problems"]
    assert all(callable(DEMONSTRATORS[name]) for name in DEMONSTRATORS)


@given(st.text(max_size=80) | st.text("Cal:nswer()0123456789+-*/. \n", max_size=60))
def test_any_action_is_answered(written: str) -> None:
    result = act(started(max_operations=2), written)
    assert result.terminated != bool(result.observation.messages)  # type: ignore[union-attr]
    assert not (result.info.get("success") and not result.terminated)
