"""Demonstrators write an agent's actions by rule, for supervised cold starts and for training tokenizers.

They are imperfect on purpose: a policy that has learnt the format from them is left with something to improve.
"""

from __future__ import annotations

import random
import re
from fractions import Fraction
from typing import Protocol

from renma.errors import DataError, RecipeError
from renma.rewards.numbers import number_of, parse_number
from renma.tools.calculator import format_number
from renma.types import Observation, Task

_TERM = re.compile(r"\s*([-+])?\s*([0-9]+(?:\.[0-9]+)?)")
_DIGIT = re.compile(r"[0-9]")
_OPERATOR = re.compile(r"(?<=[0-9)])[-+*/]")


class Demonstrator(Protocol):
    def write(self, task: Task, turn: int, observation: Observation, rng: random.Random) -> str:
        """The raw text of the action of a turn (from 0), its closing newline included.

        `observation` is what the agent was newly shown; all chance is drawn from `rng`.
        """
        ...


class ArithmeticDemonstrator:
    """Solves `7 + 25 - 4 =` with a pocket calculator, one operation a call, each on the last result:

        Call: calc(7+25)      Result: 32
        Call: calc(32-4)      Result: 28
        Answer: 28

    early_answer: the probability of giving up after the first call, answering with the partial result where operations
    are left; who goes on goes to the end, so that every later call is shown often enough to be learnt. slip: the
    probability, at each turn, of one mistake: another operator or a miscopied digit.
    """

    def __init__(self, *, early_answer: float = 0.35, slip: float = 0.1) -> None:
        _check_probability("early_answer", early_answer)
        _check_probability("slip", slip)
        self._early_answer = early_answer
        self._slip = slip

    def write(self, task: Task, turn: int, observation: Observation, rng: random.Random) -> str:
        terms = _terms(task)
        # Three draws at every turn, used or not: one option's value never changes what the others draw.
        early, slips = rng.random() < self._early_answer, rng.random() < self._slip
        mistakes = random.Random(rng.getrandbits(64))
        if turn == 0:
            shown = format_number(terms[0])
        else:
            # A result that cannot be read (the tool refused) is worked out in the head.
            read = parse_number(observation.messages[-1].text) if observation.messages else None
            shown = format_number(sum(terms[: turn + 1], Fraction(0)) if read is None else read)
        if turn >= len(terms) - 1 or (early and turn == 1):
            return f"Answer: {_miscopied(shown, mistakes) if slips else shown}\n"
        following = terms[turn + 1]
        operator, operand = "-" if following < 0 else "+", format_number(abs(following))
        if slips:
            kind = mistakes.randrange(3)
            if kind == 0:
                operator = "+" if operator == "-" else "-"
            elif kind == 1:
                shown = _miscopied(shown, mistakes)
            else:
                operand = _miscopied(operand, mistakes)
        return f"Call: calc({shown}{operator}{operand})\n"


class WordProblemDemonstrator:
    """Writes `Call: calc(<the gold expression>)`, then `Answer: <the result>`.

    corrupt: the probability of a call with one operator of the expression replaced by another.

    Raises DataError for a task without a gold expression.
    """

    def __init__(self, *, corrupt: float = 0.0) -> None:
        _check_probability("corrupt", corrupt)
        self._corrupt = corrupt

    def write(self, task: Task, turn: int, observation: Observation, rng: random.Random) -> str:
        if turn > 0:
            read = parse_number(observation.messages[-1].text) if observation.messages else None
            value = number_of(task.answer) if read is None else read
            if value is None:
                raise DataError(f"task {task.id!r} of {task.family!r}: the answer {task.answer!r} is no number")
            return f"Answer: {format_number(value)}\n"
        expression = task.data.get("expression")
        if not isinstance(expression, str):
            raise DataError(
                f"task {task.id!r} of {task.family!r} has no gold expression to demonstrate; "
                "take a set that has them, with verified_only: true"
            )
        corrupts, mistakes = rng.random() < self._corrupt, random.Random(rng.getrandbits(64))
        return f"Call: calc({_other_operator(expression, mistakes) if corrupts else expression})\n"


def _check_probability(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise RecipeError(f"demonstrator: {name} is a probability between 0 and 1, got {value}")


def _terms(task: Task) -> list[Fraction]:
    """The signed terms of a sum. Raises DataError for anything else."""
    text = str(task.data.get("expression", task.prompt)).replace("=", "").strip()
    terms: list[Fraction] = []
    position = 0
    while position < len(text):
        matched = _TERM.match(text, position)
        if matched is None or (terms and matched[1] is None):
            raise DataError(f"task {task.id!r}: {text!r} is not a sum of numbers; demonstrate 'arithmetic' tasks only")
        terms.append(Fraction(matched[2]) * (-1 if matched[1] == "-" else 1))
        position = matched.end()
    if not terms:
        raise DataError(f"task {task.id!r} has no expression; demonstrate 'arithmetic' tasks only")
    return terms


def _miscopied(number: str, rng: random.Random) -> str:
    """The number with one digit changed to another."""
    places = [matched.start() for matched in _DIGIT.finditer(number)]
    place = rng.choice(places)
    digit = rng.choice([d for d in "0123456789" if d != number[place]])
    return number[:place] + digit + number[place + 1 :]


def _other_operator(expression: str, rng: random.Random) -> str:
    places = [matched.start() for matched in _OPERATOR.finditer(expression)]
    if not places:
        return expression
    place = rng.choice(places)
    operator = rng.choice([o for o in "+-*/" if o != expression[place]])
    return expression[:place] + operator + expression[place + 1 :]
