"""Numeric answers: many ways to write one number, no way to be right by hedging, and nothing is ever evaluated."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import renma.rewards.numbers
from renma.rewards.numbers import number_of, parse_number, same_number
from renma.tools.calculator import format_number


def test_case_3_10_bold_markup_is_read_through() -> None:
    assert same_number("So the total is **58**", 58)
    assert same_number("**58**", "58")
    assert not same_number("So the total is **59**", 58)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"\text{19}", "19"),
        (r"12,\!345", "12345"),
        ("12{,}345", "12345"),
        ("71,250", "71250"),
        (r"3.2 \text{ km}", "3.2"),
        (r"9\mbox{ cm}^2", "9"),
        ("9 cm^2", "9"),
        ("4 m²", "4"),
        ("$1,234.50.", "1234.5"),
        ("-$5", "-5"),
        ("−5", "-5"),
        ("$19$", "19"),
        (r"\$58", "58"),
        (r"\boxed{\text{58}}", "58"),
        (r"\frac{3}{4}", "0.75"),
        ("3/4", "0.75"),
        ("1e3", "1000"),
        ("50%", "50"),
        ("5kg", "5"),
        ("58 apples.", "58"),
        ("2 million", "2000000"),
        ("The answer is 5!", "5"),
        ("7 + 25 = 32", "32"),
        ("x = .5", "0.5"),
        ("She makes $18. #### 18", "18"),
        ("12.0", "12"),
    ],
)
def test_case_3_11_surface_forms_of_numbers(text: str, value: str) -> None:
    assert parse_number(text) == Fraction(value)


@pytest.mark.parametrize(
    "text",
    [
        "(71,250)", "[1,2]", r"x \in [-1,4]", "5 or 8", "7 + 25", "3-5", "2^3", "9²", "1,2", "1.2.3", "12:30",
        "12,345,67", "1/0", "8**3", r"3\sqrt{2}", "0x1F", "1_000", "٣", "A5", "", "none", "1e400", "9" * 61,
        "5" + " " * 2000,
    ],
)  # fmt: skip
def test_case_3_11_pairs_hedges_and_formulas_state_no_number(text: str) -> None:
    assert parse_number(text) is None


def test_case_3_16_answer_text_is_never_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    hostile = r"\boxed{\pi*__import__('pathlib').Path('PWNED').touch()}"
    assert not same_number(hostile, 3)
    assert parse_number(hostile) is None
    assert list(tmp_path.iterdir()) == []
    assert same_number("3", 3)


def test_case_3_16_the_package_holds_no_eval_or_exec() -> None:
    package = Path(renma.rewards.numbers.__file__).parents[1]
    call = re.compile(r"(?<![\w.\"'])(?:eval|exec)\s*\(")
    for folder in ("tools", "tasks", "environments", "rewards"):
        for file in (package / folder).glob("*.py"):
            assert not call.search(file.read_text(encoding="utf-8")), file


def test_whole_numbers_are_compared_exactly_and_decimals_closely() -> None:
    assert same_number("12.0", 12) and same_number("12", 12.0)
    assert not same_number("12.0000001", 12)
    assert same_number("0.166667", 1 / 6) and not same_number("0.17", 1 / 6)
    assert same_number("21.333333", 21.3333) and not same_number("21.34", 21.3333)
    assert same_number("0.3", 0.1 + 0.2)
    assert not same_number("83.4", 83.33) and not same_number("0.45", 0.5)
    assert not same_number("0", 4e-7) and not same_number("-0.5", 0.5)


def test_a_gold_answer_that_is_no_number_is_said() -> None:
    for gold in (None, True, "Paris", float("nan"), float("inf"), [1]):
        assert number_of(gold) is None
        with pytest.raises(ValueError, match="not a number"):
            same_number("1", gold)


@given(st.text(max_size=1500) | st.text(r"0123456789.,-+/$\{}()^eE*=# text", max_size=300))
def test_any_text_is_read_or_refused(text: str) -> None:
    value = parse_number(text)
    assert value is None or isinstance(value, Fraction)


NUMBERS = st.fractions(-(10**9), 10**9, max_denominator=1000)
DRESSES = st.sampled_from(
    ["{}", " {} ", "{}.", "**{}**", r"\boxed{{{}}}", r"\text{{{}}}", "The answer is {}.", "x = {}", "{} apples", "$ {}"]
)


@given(NUMBERS, DRESSES)
def test_what_the_calculator_shows_is_right_however_it_is_dressed(value: Fraction, dress: str) -> None:
    gold = int(value) if value.denominator == 1 else float(value)
    assert same_number(dress.format(format_number(value)), gold)


@given(st.integers(-(10**12), 10**12), DRESSES)
def test_thousands_marks(value: int, dress: str) -> None:
    assert same_number(dress.format(f"{value:,}"), value)
    assert not same_number(dress.format(f"{value:,}"), value + 1)


@given(st.integers(0, 999), st.integers(0, 999))
def test_two_numbers_are_never_an_answer(first: int, second: int) -> None:
    for between in (" ", " or ", ", ", " and ", "; "):
        assert parse_number(f"{first}{between}{second}") is None
