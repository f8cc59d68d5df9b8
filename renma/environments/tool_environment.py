"""An environment whose actions are tool calls and, at the end, an answer.

class Shop(ToolEnvironment):
    @tool
    def price(self, item: str) -> float:
        '''The price of an item.'''
        return PRICES[item]

    def check(self, task, answer):
        return answer == task.answer
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable

from renma.environments.base import Environment
from renma.tools.base import run_calls
from renma.types import Action, Observation, StepResult, Task


class ToolEnvironment(Environment):
    """Mark methods `@tool` and give `check`; `reset` shows the task's prompt unless replaced.

    An action with calls is answered with one tool message a call. One without calls is the final answer when it has
    text, and ends the episode without success (info["stop"] "stop") when it has none: the parser found neither.

    Terminated means that the episode is over, never that it is won: `info["success"]` says that, and running out of
    turns is neither (the runner then marks the trajectory truncated).

    max_calls_per_turn: calls of one action past this are answered `not run`.
    """

    max_calls_per_turn: int = 8
    task: Task

    def reset(self, task: Task) -> Observation | str | Awaitable[Observation | str]:
        self.task = task
        return task.prompt

    def check(self, task: Task, answer: str) -> bool | float | Awaitable[bool | float]:
        """Is the answer right? True or False, or a score in [0, 1] of which 1 is success."""
        raise TypeError(f"{type(self).__name__} has no check(task, answer): give one that says if it is right")

    async def step(self, action: Action) -> StepResult:
        if action.tool_calls:
            messages = await run_calls(self, action.tool_calls, limit=self.max_calls_per_turn)
            return StepResult(Observation(tuple(messages)), reward={})
        if not action.text.strip():
            return StepResult(reward={"success": 0.0}, terminated=True, info={"success": False, "stop": "stop"})
        return await self.answer(action.text.strip())

    async def answer(self, text: str) -> StepResult:
        """The result of a final answer: reward component "success" with the score of `check`."""
        checked = self.check(self.task, text)
        score = float(await checked if inspect.isawaitable(checked) else checked)
        info = {"success": score >= 1.0, "stop": "answer"}
        return StepResult(reward={"success": score}, terminated=True, info=info)
