"""A calculator that a policy may write anything into: its own tokenizer and parser, exact fractions, bounded work.

Grammar (left-associative, usual precedence):

    sum     = product (("+" | "-") product)*
    product = signed (("*" | "/") signed)*
    signed  = ("-" | "+") signed | "(" sum ")" | number
    number  = digits, groups of three after commas allowed, with an optional decimal part

There are no names, no calls and no powers, so a result is never larger than its text allows; every limit below answers
with a CalculatorError, and the time is linear in the text.
"""

from __future__ import annotations

import re
from decimal import ROUND_HALF_EVEN, Decimal, localcontext
from fractions import Fraction
from functools import lru_cache

from renma.tools.base import ToolError

MAX_CHARACTERS = 300
MAX_DEPTH = 32
MAX_DIGITS = 40  # of a number written down
MAX_SIZE = 10**60  # of a result's numerator and denominator
PLACES = 6

_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)|(?P<symbol>[-+*/()]))"
)
_SAME_SIGN = str.maketrans({"−": "-", "–": "-", "×": "*", "·": "*", "÷": "/"})


class CalculatorError(ToolError):
    """The expression cannot be evaluated; the message says why, for the policy to read."""


def evaluate(expression: str, max_operations: int | None = None) -> Fraction:
    """The exact value of an arithmetic expression.

    `max_operations` limits the binary operations (a sign in front of a number is none): 1 makes a pocket calculator.
    Raises CalculatorError for anything that is not an expression of the grammar above, for division by zero, and for
    an expression or a result past the limits.
    """
    if len(expression) > MAX_CHARACTERS:
        raise CalculatorError(f"expression longer than {MAX_CHARACTERS} characters")
    return _value(expression, max_operations)


@lru_cache(4096)  # a group asks the same few sums again and again
def _value(expression: str, max_operations: int | None) -> Fraction:
    tokens = _tokens(expression.translate(_SAME_SIGN))
    if not tokens:
        raise CalculatorError("empty expression")
    return _Parser(tokens, max_operations).parse()


def format_number(value: Fraction) -> str:
    """An integer as it is; else a decimal rounded (half to even) to 6 places, trailing zeros cut.

    Below 0.001 six significant digits are kept, so that a value that is not zero never reads as zero.
    """
    if value.denominator == 1:
        return str(value.numerator)
    with localcontext() as context:
        context.prec = 150
        exact = Decimal(value.numerator) / Decimal(value.denominator)
        places = PLACES if abs(value) >= Fraction(1, 1000) else PLACES - 1 - exact.adjusted()
        text = f"{exact.quantize(Decimal(1).scaleb(-places), rounding=ROUND_HALF_EVEN):f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def calculate(expression: str, max_operations: int | None = None) -> str:
    """`evaluate`, as text. Raises CalculatorError."""
    return format_number(evaluate(expression, max_operations))


def _tokens(text: str) -> list[str]:
    tokens, position, end = [], 0, len(text.rstrip())
    while position < end:
        matched = _TOKEN.match(text, position, end)
        if matched is None:
            rest = text[position:end].lstrip()
            raise CalculatorError(f"unexpected {rest[0]!r}")
        token = matched["number"] or matched["symbol"]
        if matched["number"] and sum(character.isdigit() for character in token) > MAX_DIGITS:
            raise CalculatorError(f"a number has more than {MAX_DIGITS} digits")
        tokens.append(token.replace(",", ""))
        position = matched.end()
    return tokens


class _Parser:
    def __init__(self, tokens: list[str], max_operations: int | None) -> None:
        self._tokens = tokens
        self._position = 0
        self._depth = 0
        self._operations = 0
        self._max_operations = max_operations

    def parse(self) -> Fraction:
        value = self._sum()
        if self._position < len(self._tokens):
            raise CalculatorError(f"unexpected {self._tokens[self._position]!r}")
        return value

    def _next(self) -> str | None:
        return self._tokens[self._position] if self._position < len(self._tokens) else None

    def _take(self) -> str:
        token = self._next()
        if token is None:
            raise CalculatorError("the expression ends too early")
        self._position += 1
        return token

    def _sum(self) -> Fraction:
        value = self._product()
        while self._next() in ("+", "-"):
            operator = self._operator()
            right = self._product()
            value = _bounded(value + right if operator == "+" else value - right)
        return value

    def _product(self) -> Fraction:
        value = self._signed()
        while self._next() in ("*", "/"):
            operator = self._operator()
            right = self._signed()
            if operator == "/" and right == 0:
                raise CalculatorError("division by zero")
            value = _bounded(value * right if operator == "*" else value / right)
        return value

    def _operator(self) -> str:
        self._operations += 1
        if self._max_operations is not None and self._operations > self._max_operations:
            allowed = self._max_operations
            raise CalculatorError(f"only {allowed} operation{'' if allowed == 1 else 's'} a call")
        return self._take()

    def _signed(self) -> Fraction:
        sign = 1
        while self._next() in ("-", "+"):
            sign = -sign if self._take() == "-" else sign
        token = self._take()
        if token == "(":
            self._depth += 1
            if self._depth > MAX_DEPTH:
                raise CalculatorError(f"parentheses nested deeper than {MAX_DEPTH}")
            value = self._sum()
            if self._next() != ")":
                raise CalculatorError("a parenthesis is not closed")
            self._take()
            self._depth -= 1
        elif token in "*/)":
            raise CalculatorError(f"unexpected {token!r}")
        else:
            value = Fraction(token)
        return sign * value


def _bounded(value: Fraction) -> Fraction:
    if abs(value.numerator) > MAX_SIZE or value.denominator > MAX_SIZE:
        raise CalculatorError("the result is too large")
    return value
