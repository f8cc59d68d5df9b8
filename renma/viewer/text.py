"""Text from models and tools, made safe to show; numbers, made easy to read."""

from __future__ import annotations

import math
import unicodedata

HIDDEN = {"Cc", "Cs", "Cf", "Co", "Cn", "Zl", "Zp"}  # controls, lone surrogates, direction overrides, ...
JOINERS = "\u200c\u200d"  # format characters that ordinary words and emoji need


def printable(text: str, limit: int | None = None) -> str:
    """The text with every character that could steer a terminal or a page shown as its escape (`\\x1b`, `\\u202e`).

    Newlines and tabs stay. Past `limit` characters the rest is cut, and how much is said.
    """
    rest = len(text) - limit if limit is not None else 0
    if rest > 0:
        text = text[:limit]
    shown = "".join(c if c in "\n\t" + JOINERS or unicodedata.category(c) not in HIDDEN else _escape(c) for c in text)
    return f"{shown} … ({rest:,} more characters)" if rest > 0 else shown


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def percent(value: float, digits: int = 1) -> str:
    """0.2417 -> '24.2 %'."""
    return f"{100 * value:.{digits}f} %"


def points(value: float) -> str:
    """A difference of shares in percentage points, signed: 0.251 -> '+25.1'. The minus is a real one."""
    return f"{100 * value:+.1f}".replace("-", "−")


def number(value: float) -> str:
    """Three significant digits, thousands as k, millions as M: 4218 -> '4.22k'."""
    if not math.isfinite(value):
        return "–"
    size = abs(value)
    for scale, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= scale:
            return f"{value / scale:.3g}{unit}"
    return f"{value:.3g}"


def p_text(p_value: float) -> str:
    return "p < 0.001" if p_value < 0.001 else f"p = {p_value:.3f}" if p_value < 0.1 else f"p = {p_value:.2f}"


def duration(seconds: float) -> str:
    """'48 s', '12 min 30 s', '3 h 05 min'."""
    whole = int(max(0.0, seconds) + 0.5)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
