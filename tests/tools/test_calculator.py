"""The calculator: exact, and unmoved by anything a policy writes."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from renma.tools.calculator import CalculatorError, calculate, evaluate, format_number


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("7+25", "32"),
        (" 32 - 4 ", "28"),
        ("8*(3+3)", "48"),
        ("2+3*4", "14"),
        ("10-4-3", "3"),
        ("24/4/2", "3"),
        ("-2+9", "7"),
        ("3--2", "5"),
        ("-(2+3)*2", "-10"),
        ("0.1+0.2", "0.3"),
        (".5*2", "1"),
        ("5.", "5"),
        ("1/3", "0.333333"),
        ("2/3", "0.666667"),
        ("1/3+1/3+1/3", "1"),
        ("1,000+5", "1005"),
        ("6×7÷2−1", "20"),
        ("1/3000000", "0.000000333333"),
        ("-1/8", "-0.125"),
        ("0*5", "0"),
        ("1/1000000000000", "0.000000000001"),
    ],
)
def test_values(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("", "empty"),
        ("   ", "empty"),
        ("1/0", "division by zero"),
        ("1/(2-2)", "division by zero"),
        ("2**3", "unexpected"),
        ("2^3", "unexpected"),
        ("1e9", "unexpected 'e'"),
        ("__import__('os')", "unexpected '_'"),
        ("(1", "not closed"),
        ("1)", "unexpected"),
        ("3 4", "unexpected"),
        ("5+", "ends too early"),
        ("()", "unexpected"),
        ("1,00", "unexpected ','"),
        ("1.2.3", "unexpected"),
        ("9" * 41, "digits"),
        ("1+" * 200 + "1", "longer"),
        ("(" * 40 + "1" + ")" * 40, "nested"),
        ("*".join(["9" * 40] * 3), "too large"),
        ("$5+1", "unexpected '$'"),
        ("٣+1", "unexpected"),
    ],
)
def test_refusals_say_why(expression: str, reason: str) -> None:
    with pytest.raises(CalculatorError, match=reason.replace("(", r"\(").replace("$", r"\$")):
        evaluate(expression)


def test_a_pocket_calculator_takes_one_operation() -> None:
    assert evaluate("-7+25", max_operations=1) == 18
    assert evaluate("-(-7)", max_operations=0) == 7
    with pytest.raises(CalculatorError, match="only 1 operation a call"):
        evaluate("7+25-4", max_operations=1)
    assert evaluate("7+25-4", max_operations=2) == 28


def test_signs_without_end_do_not_recurse() -> None:
    assert evaluate("-" * 298 + "7") == 7


@given(st.text(max_size=400) | st.text("0123456789.,+-*/() ", max_size=400))
def test_any_text_gives_a_number_or_a_refusal_at_once(text: str) -> None:
    started = time.perf_counter()
    try:
        format_number(evaluate(text))
    except CalculatorError as error:
        assert str(error) and "\n" not in str(error)
    assert time.perf_counter() - started < 1.0


TREES = st.recursive(
    st.integers(0, 999).map(lambda n: (str(n), Fraction(n))),
    lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(
        lambda t: (
            f"({t[0][0]} {t[1]} {t[2][0]})",
            {"+": t[0][1] + t[2][1], "-": t[0][1] - t[2][1], "*": t[0][1] * t[2][1]}[t[1]],
        )
    ),
    max_leaves=8,
)


@given(TREES)
def test_agrees_with_exact_arithmetic(tree: tuple[str, Fraction]) -> None:
    assert evaluate(tree[0]) == tree[1]


@given(st.lists(st.tuples(st.sampled_from("+-*/"), st.integers(1, 99)), min_size=1, max_size=8), st.integers(0, 99))
def test_precedence_without_parentheses(rest: list[tuple[str, int]], first: int) -> None:
    # Reference: products first, then sums, both from the left.
    terms, signs = [Fraction(first)], [1]
    for operator, number in rest:
        if operator == "*":
            terms[-1] *= number
        elif operator == "/":
            terms[-1] /= number
        else:
            terms.append(Fraction(number))
            signs.append(1 if operator == "+" else -1)
    expected = sum((sign * term for sign, term in zip(signs, terms, strict=True)), Fraction(0))
    assert evaluate(str(first) + "".join(f"{o}{n}" for o, n in rest)) == expected


@given(st.fractions(max_denominator=10**6))
def test_what_is_shown_is_within_half_a_millionth_and_reads_back(value: Fraction) -> None:
    shown = format_number(value)
    assert abs(evaluate(shown) - value) <= Fraction(1, 2 * 10**6)
    assert (shown.strip("-0.") == "") == (value == 0)
    assert not ("." in shown and shown.endswith("0")) and shown != "-0"
