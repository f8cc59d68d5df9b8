"""Arithmetic word problems with a gold expression: MAWPS (one- and two-step), SVAMP, and GSM8K without expressions.

MAWPS: Koncel-Kedziorski et al. 2016; SVAMP: Patel et al. 2021; GSM8K: Cobbe et al. 2021.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Literal

from renma.errors import DataError
from renma.rewards.numbers import number_of, same_number
from renma.tasks.base import TaskList
from renma.tasks.files import column, find_file, read_rows
from renma.tools.calculator import CalculatorError, calculate
from renma.types import Task

WordProblemSet = Literal["mawps_train", "mawps_test", "svamp", "gsm8k_train", "gsm8k_test"]
_STRENGTH = {"+": 1, "-": 1, "*": 2, "/": 2}
_ATOM = 3


class WordProblems(TaskList):
    """One published set. The prompt is the question with its spacing made regular, the answer an int or float.

    `Task.data["expression"]` is the gold expression in infix form without spaces (`8*(3+3)`), present only when it
    gives the answer: a few published ones do not (12 of MAWPS train, 2 of its test, 1 of SVAMP; some answers were
    rounded, some are errors). verified_only leaves out the problems without one: right for training, not for
    evaluation.
    shuffle_seed: a fixed shuffle, before `limit` takes the first so many. For data_dir see `tasks.files.find_file`.

    Raises DataError for a file that is missing or malformed.
    """

    def __init__(
        self,
        *,
        set: WordProblemSet = "mawps_train",
        data_dir: str | None = None,
        limit: int | None = None,
        shuffle_seed: int | None = None,
        verified_only: bool = False,
    ) -> None:
        file = find_file(f"math/{set}.jsonl", data_dir)
        tasks = [_task(row, set, file, number) for number, row in read_rows(file)]
        if verified_only:
            tasks = [task for task in tasks if "expression" in task.data]
        if shuffle_seed is not None:
            random.Random(shuffle_seed).shuffle(tasks)
        super().__init__(tasks[:limit], f"{file} ({'verified_only' if verified_only else 'all'}, limit {limit})")


def _task(row: dict[str, Any], family: str, file: Path, number: int) -> Task:
    answer = number_of(column(row, "answer", file, number))
    if answer is None:
        raise DataError(f"{file}, line {number}: column 'answer' holds no number; correct or remove the line")
    prompt = " ".join(str(column(row, "question", file, number)).split())
    gold = int(answer) if answer.denominator == 1 else float(answer)
    data: dict[str, Any] = {}
    if "equation_prefix" in row or "equation" in row:
        try:
            prefix = "equation_prefix" in row
            expression = prefix_to_infix(row["equation_prefix"]) if prefix else tidy_infix(row["equation"])
        except ValueError as error:
            raise DataError(f"{file}, line {number}: {error}; correct or remove the line") from error
        if _gives(expression, gold):
            data["expression"] = expression
    if "kind" in row:
        data["kind"] = row["kind"]
    return Task(str(row.get("id", f"{family}-{number}")), prompt, gold, family, data)


def _gives(expression: str, gold: int | float) -> bool:
    try:
        return same_number(calculate(expression), gold)
    except CalculatorError:
        return False


def prefix_to_infix(prefix: str) -> str:
    """`* 8 + 3 3` as `8*(3+3)`: no spaces, only the parentheses it needs. Raises ValueError when it is not complete."""
    stack: list[tuple[str, int]] = []
    for token in reversed(prefix.split()):
        if token not in _STRENGTH:
            stack.append(_number(token))
        elif len(stack) < 2:
            raise ValueError(f"prefix expression {prefix!r} lacks an operand")
        else:
            stack.append(_joined(token, stack.pop(), stack.pop()))
    if len(stack) != 1:
        raise ValueError(f"prefix expression {prefix!r} is not one expression")
    return stack[0][0]


def tidy_infix(infix: str) -> str:
    """`( ( 4.0 - 2.0 ) + 3.0 )`, fully parenthesised, as `4-2+3`. Raises ValueError when it is not of that form."""
    values: list[list[tuple[str, int] | str]] = [[]]
    for token in infix.split():
        if token == "(":
            values.append([])
        elif token == ")":
            if len(values) < 2:
                raise ValueError(f"expression {infix!r} closes a parenthesis too many")
            inner = _folded(values.pop(), infix)
            values[-1].append(inner)
        else:
            values[-1].append(token if token in _STRENGTH else _number(token))
    if len(values) != 1:
        raise ValueError(f"expression {infix!r} leaves a parenthesis open")
    return _folded(values[0], infix)[0]


def _folded(parts: list[tuple[str, int] | str], infix: str) -> tuple[str, int]:
    match parts:
        case [(str() as text, int() as strength)]:
            return text, strength
        case [(str() as left, int() as left_strength), str() as operator, (str() as right, int() as right_strength)]:
            return _joined(operator, (left, left_strength), (right, right_strength))
    raise ValueError(f"expression {infix!r} is not fully parenthesised")


def _number(token: str) -> tuple[str, int]:
    """A number as a problem would write it: 4.0 is 4. A negative one binds like a sum, so that it gets parentheses."""
    digits = token.removeprefix("-")
    if not digits.replace(".", "", 1).isdecimal():
        raise ValueError(f"{token!r} is neither a number nor one of + - * /")
    text = token.rstrip("0").rstrip(".") if "." in token else token
    return (text, 1) if text.startswith("-") else (text, _ATOM)


def _joined(operator: str, left: tuple[str, int], right: tuple[str, int]) -> tuple[str, int]:
    strength = _STRENGTH[operator]
    a = left[0] if left[1] >= strength else f"({left[0]})"
    keeps = right[1] > strength or (right[1] == strength and operator in "+*")
    # a+(b-c) reads the same without its parentheses, and so does a*(b/c), exactly, in fractions.
    b = right[0] if keeps and not right[0].startswith("-") else f"({right[0]})"
    return f"{a}{operator}{b}", strength
