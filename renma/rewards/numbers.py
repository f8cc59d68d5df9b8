"""Is this text that number? One reading of numeric answers, shared by environments and rewards.

A text is read only when it states exactly one number; what hedges ("5 or 8"), a pair ("(71,250)") or a formula that is
not worked out ("7 + 25") is no answer. Nothing is evaluated: a number is recognised or the text is refused.
"""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any

MAX_CHARACTERS = 1000
MAX_DIGITS = 60
RELATIVE_TOLERANCE = Fraction(1, 10**6)
ROUNDING = Fraction(1, 2 * 10**6)  # the calculator shows 6 places, so it is off by at most half of the last one

_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9}
_WRAPPED = re.compile(r"\\(?:boxed|fbox|text|textbf|mathbf|mathrm|mbox|operatorname)\s*\{([^{}]*)\}")
_FRACTION = re.compile(r"\\[dt]?frac\s*\{\s*([0-9.,]+)\s*\}\s*\{\s*([0-9.,]+)\s*\}")
_GROUP_MARK = re.compile(r"(?<=[0-9])(?:\{,\}|,?\\[!,;: ])(?=[0-9]{3}(?![0-9]))")
_UNIT_POWER = re.compile(r"(?<=[A-Za-z}])\s*\^\s*(?:\{[0-9-]+\}|-?[0-9])|(?<=[A-Za-z])[²³]|(?<![A-Za-z])[ckm]?m[23]\b")
_PAIR = re.compile(r"[(\[{][^()\[\]{}]*[0-9]\s*[,;][^()\[\]{}]*[)\]}]")
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_NUMBER = re.compile(
    rf"(?<![A-Za-z0-9_.^])(?P<sign>[-+]?)\s*(?:[$€£¥]\s*)?(?P<whole>{_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)"
    r"(?:[eE](?P<exponent>[-+]?[0-9]{1,3})(?![A-Za-z0-9]))?"
    rf"(?:\s*/\s*(?P<under>{_DIGITS}(?:\.[0-9]+)?))?"
    rf"(?:\s+(?P<scale>{'|'.join(_SCALES)})s?\b)?",
    re.IGNORECASE,
)
# Between or after numbers these make a formula, an exponent, a range or a time of it.
_OPERATES = re.compile(
    r"[0-9)]\s*(?:\^|\*|×|÷|:\s*[0-9]|!\s*[0-9]|\\times|\\cdot|\\div)|\\(?:sqrt|pi|sin|cos|log|ln|infty)|[√π∞]"
)


def parse_number(text: str) -> Fraction | None:
    """The one number a text states, exactly; None when it states none or several.

    Read through: $ and other currency signs, thousands marks (71,250, 12,\\!345), units (9 cm^2, 3.2 \\text{ km}, 50%),
    bold and LaTeX wrapping (**58**, \\boxed{58}, \\text{19}), a final period, fractions (3/4, \\frac{3}{4}), exponents
    (1e3), "thousand" and the like, a sentence around it, what precedes the last "=", and GSM8K's "#### ". Percent is
    read as a unit: 50% is 50.
    """
    if len(text) > MAX_CHARACTERS:
        text = text[-MAX_CHARACTERS:] if "####" in text[-MAX_CHARACTERS:] else ""
    return _stated(text)


@lru_cache(4096)  # a group's answers and its task's number are the same few again and again
def _stated(text: str) -> Fraction | None:
    text = text.rpartition("####")[2].replace("−", "-").replace("\u00a0", " ")
    text = _GROUP_MARK.sub("", text)
    text = _FRACTION.sub(r" \1/\2 ", text)
    text = _UNIT_POWER.sub("", text)
    for _ in range(4):  # \boxed{\text{19}}: a bounded depth of wrapping
        unwrapped = _WRAPPED.sub(r" \1 ", text)
        if unwrapped == text:
            break
        text = _UNIT_POWER.sub("", unwrapped)
    text = re.sub(r"\\[()\[\]!,;: ]|\\%|\*\*|__|`", " ", text.replace("\\$", "$")).rpartition("=")[2]
    # A wrapped unit has left its power behind: "9  cm ^2".
    text = re.sub(r"(?<=[A-Za-z])\s*\^\s*\{?[0-9]\}?", "", text)
    if _PAIR.search(text) or _OPERATES.search(text):
        return None
    found = list(_NUMBER.finditer(text))
    if len(found) != 1 or any(character.isdigit() for character in text[: found[0].start()] + text[found[0].end() :]):
        return None
    return _value(found[0])


def _value(matched: re.Match[str]) -> Fraction | None:
    whole, under = matched["whole"].replace(",", ""), (matched["under"] or "1").replace(",", "")
    exponent = int(matched["exponent"] or 0)
    if len(whole) + len(under) > MAX_DIGITS or abs(exponent) > MAX_DIGITS or Fraction(under) == 0:
        return None
    value = Fraction(whole) * Fraction(10) ** exponent / Fraction(under)
    if matched["scale"]:
        value *= _SCALES[matched["scale"].lower()]
    return -value if matched["sign"] == "-" else value


def number_of(value: Any) -> Fraction | None:
    """The exact number a gold answer means (int, float, Fraction, Decimal or text); None when it means none."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | Fraction):
        return Fraction(value)
    if isinstance(value, float | Decimal):
        # A float means the decimal that it prints as: 0.1 is a tenth.
        text = str(value)
        return Fraction(text) if value == value and value not in (float("inf"), float("-inf")) else None
    return parse_number(value) if isinstance(value, str) else None


def same_number(answer: str, gold: Any) -> bool:
    """Does the text state the gold number?

    A whole gold number is compared exactly. A decimal one within 1e-6 relative, or the rounding of the side that shows
    fewer places: the calculator's six, or the gold's own when it was itself rounded to four or more. Raises ValueError
    when the gold answer is not a number.
    """
    expected = number_of(gold)
    if expected is None:
        raise ValueError(f"the gold answer {gold!r} is not a number")
    stated = parse_number(answer)
    if stated is None:
        return False
    if expected.denominator == 1:
        return stated == expected
    rounding = max(ROUNDING, _gold_rounding(expected))
    # Tiny numbers keep a tolerance below their own size: 0 is not 0.0000004.
    tolerance = max(RELATIVE_TOLERANCE * abs(expected), min(rounding, abs(expected) / 1000))
    return abs(stated - expected) <= tolerance


def _gold_rounding(expected: Fraction) -> Fraction:
    """Half a unit of a decimal gold answer's last place when it shows four places or more (21.3333), else 0."""
    for places in range(1, 7):
        if (expected * 10**places).denominator == 1:
            return Fraction(1, 2 * 10**places) if places >= 4 else Fraction(0)
    return Fraction(0)
