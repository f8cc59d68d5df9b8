"""Reading the JSON of tool calls: hostile text in, plain values or a one-line reason out.

What is accepted: strict JSON except that control characters may stand unescaped in strings (models write raw
newlines there); NaN, infinities and values nested deeper than `MAX_DEPTH` are refused, since no tool or template
could take them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

from renma.agents.text import well_formed

MAX_DEPTH = 32


class CallError(ValueError):
    """Why a call cannot be used, in words for the agent that wrote it."""


def decode_json(text: str, start: int = 0) -> tuple[Any, int]:
    """The JSON value that begins at `text[start]` and the index just past it; what follows is not looked at.

    Raises CallError.
    """
    try:
        value, end = _DECODER.raw_decode(text, start)
        return _clean(value, MAX_DEPTH), end
    except json.JSONDecodeError as error:
        raise CallError(f"invalid JSON: {error.msg} at character {error.pos - start}") from error
    except RecursionError as error:
        raise CallError("invalid JSON: nested too deeply") from error
    except CallError:
        raise
    except ValueError as error:  # an integer longer than Python will read
        raise CallError(f"invalid JSON: {error}") from error


def arguments_of(value: Any) -> dict[str, Any]:
    """A call's arguments as a dict: given as an object, or as JSON text of one; absent, None and "" are {}.

    Raises CallError for anything else.
    """
    if value is None:
        return {}
    if isinstance(value, str):
        text = value.strip()
        if not text:
            return {}
        decoded, end = decode_json(text)
        if text[end:].strip():
            raise CallError("invalid JSON: text after the arguments' object")
        value = {} if decoded is None else decoded
    if not isinstance(value, Mapping):
        raise CallError(f"arguments must be a JSON object, not {_json_type(value)}")
    cleaned: dict[str, Any] = _clean(value, MAX_DEPTH)
    return cleaned


def call_parts(value: Any) -> tuple[str, dict[str, Any]]:
    """The name and arguments of one decoded call: {"name": …, "arguments": …}, or "parameters" for "arguments".

    Raises CallError.
    """
    if not isinstance(value, dict):
        raise CallError(f"a call must be a JSON object, not {_json_type(value)}")
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        raise CallError('the call has no "name"')
    return name.strip(), arguments_of(value.get("arguments", value.get("parameters")))


def _refuse_constant(name: str) -> NoReturn:
    raise CallError(f"invalid JSON: {name} is not a JSON number")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise CallError("invalid JSON: a number is out of range")
    return number


def _clean(value: Any, depth: int) -> Any:
    if depth < 0:
        raise CallError(f"invalid JSON: nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, str):
        return well_formed(value)
    if isinstance(value, Mapping):
        return {well_formed(str(key)): _clean(item, depth - 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item, depth - 1) for item in value]
    return value


def _json_type(value: Any) -> str:
    if isinstance(value, bool):
        return "a boolean"
    kinds: tuple[tuple[Any, str], ...] = ((str, "a string"), (list, "a list"), ((int, float), "a number"))
    return next((words for kind, words in kinds if isinstance(value, kind)), "null" if value is None else "an object")


_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse_constant, parse_float=_finite)
