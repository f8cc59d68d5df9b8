"""Arithmetic and word problems with a calculator at hand: one tool, `calc`, and a number as the answer."""

from __future__ import annotations

from typing import ClassVar

from renma.environments.tool_environment import ToolEnvironment
from renma.errors import DataError, RecipeError
from renma.rewards.numbers import same_number
from renma.tools.base import tool
from renma.tools.calculator import calculate
from renma.types import Task


class CalculatorEnvironment(ToolEnvironment):
    """`Task.answer` is a number (or text that states one, such as GSM8K's `#### 18`).

    max_operations: the binary operations one call may hold; 1 makes a pocket calculator, which a sum of n terms must be
    fed n - 1 times. None: no such limit. max_turns: actions an episode may take when the recipe does not say.
    """

    blocking: ClassVar[bool] = False

    def __init__(self, *, max_operations: int | None = None, max_turns: int = 8) -> None:
        if max_operations is not None and max_operations < 1:
            raise RecipeError(f"environment.max_operations must be at least 1, got {max_operations}")
        if max_turns < 1:
            raise RecipeError(f"environment.max_turns must be at least 1, got {max_turns}")
        self._max_operations = max_operations
        self.max_turns = max_turns

    @tool
    def calc(self, expression: str) -> str:
        """The value of an arithmetic expression.

        Args:
            expression: numbers, + - * / and parentheses, for example 8*(3+3)
        """
        return calculate(expression, self._max_operations)

    def check(self, task: Task, answer: str) -> bool:
        try:
            return same_number(answer, task.answer)
        except ValueError as error:
            raise DataError(f"task {task.id!r} of {task.family!r}: {error}; correct the data") from error
