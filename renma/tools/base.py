"""Tools: a method marked `@tool` becomes an OpenAI function schema, and `run_calls` runs what a policy asked for.

    class Shop(ToolEnvironment):
        @tool
        def price(self, item: str) -> float:
            '''The price of an item, in euros.'''
            return self.prices[item]

What a policy wrote is hostile: a call that is unknown, malformed, wrongly typed or that makes the tool raise is
answered with a message that says so, and the other calls of the turn still run.
"""

from __future__ import annotations

import inspect
import json
import re
import typing
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, overload

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from renma.types import Message, ToolCall

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__renma_tool__"
_ERROR_CHARACTERS = 300
_NAME_CHARACTERS = 60
# Found once a class: an arguments model costs a millisecond, and environments are made by the thousand.
_TOOLS: weakref.WeakKeyDictionary[type, dict[str, Tool]] = weakref.WeakKeyDictionary()


class ToolError(Exception):
    """Raised by a tool to tell the policy what it did wrong; the message is shown as it is, after `error: `."""


@dataclass(frozen=True)
class Tool:
    """A marked method: its name, its JSON schema in the OpenAI function form, and the model its arguments must fit."""

    name: str
    function: Callable[..., Any]
    arguments: type[BaseModel]
    schema: dict[str, Any]

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments, converted to the method's types. Raises ToolError naming every argument that does not fit."""
        try:
            model = self.arguments.model_validate(dict(arguments))
        except ValidationError as error:
            wrong = [
                f"{'.'.join(str(place) for place in fault['loc']) or 'arguments'}: {fault['msg']}"
                for fault in error.errors(include_url=False, include_context=False, include_input=False)
            ]
            raise ToolError(f"{self.name}: {'; '.join(wrong)}") from error
        # Fields not given are left out, so that the method's own defaults hold.
        return {
            str(field.alias): getattr(model, key)
            for key, field in self.arguments.model_fields.items()
            if key in model.model_fields_set
        }


@overload
def tool(function: F) -> F: ...
@overload
def tool(*, name: str) -> Callable[[F], F]: ...
def tool(function: F | None = None, *, name: str | None = None) -> F | Callable[[F], F]:
    """Mark a method as a tool. Its name, type hints and docstring make the schema; the method stays as it is.

    The docstring's first paragraph describes the tool; lines `argument: text` under `Args:` describe arguments.
    `@tool(name="search")` gives another name than the method's. The method may be `async`.
    """

    def mark(target: F) -> F:
        setattr(target, _MARK, name or target.__name__)
        return target

    return mark if function is None else mark(function)


def tools_of(owner: object) -> Mapping[str, Tool]:
    """The tools of an object, by name, in the order in which its classes define them (base classes first).

    Raises TypeError for a marked method that cannot be a tool, and for two tools of one name.
    """
    cls = type(owner)
    tools = _TOOLS.get(cls)
    if tools is None:
        tools = _TOOLS[cls] = _find_tools(cls)
    return tools


def _find_tools(cls: type) -> dict[str, Tool]:
    found: dict[str, Tool] = {}
    # A dict, not a set: the order of definition stays. What the class itself resolves a name to decides.
    for attribute in dict.fromkeys(name for base in reversed(cls.__mro__) for name in vars(base)):
        member = getattr(cls, attribute, None)
        if not inspect.isfunction(member) or not hasattr(member, _MARK):
            continue
        described = _describe(member)
        if described.name in found:
            raise TypeError(f"{cls.__name__} has two tools named {described.name!r}: rename one")
        found[described.name] = described
    return found


def schemas_of(owner: object) -> list[dict[str, Any]]:
    """The JSON schemas (OpenAI function form) of an object's tools."""
    return [found.schema for found in tools_of(owner).values()]


async def run_calls(owner: object, calls: Sequence[ToolCall], *, limit: int | None = None) -> list[Message]:
    """Run the calls of one action on the owner's tools: one tool message a call, in the order of the calls.

    Each call stands alone: whatever is wrong with one becomes its own `error: …` message, with its call id, and the
    next runs. Calls past `limit` are not run and say so. Results that are not text are written as JSON. Never raises an
    Exception for what a call did; what is not an Exception (KeyboardInterrupt, a cancelled task) passes.
    """
    tools = tools_of(owner)
    messages = []
    for position, call in enumerate(calls):
        if limit is not None and position >= limit:
            content = f"not run: limit of {limit} call{'' if limit == 1 else 's'} a turn"
        else:
            content = await _run(owner, tools, call)
        named = clean_text(call.name) if isinstance(call.name, str) else ""
        messages.append(Message("tool", clean_text(content), tool_call_id=call.id or None, name=named or None))
    return messages


def truncate_text(text: str, limit_characters: int, side: Literal["left", "right"] = "right") -> str:
    """Text cut to `limit_characters` characters (Unicode code points, not tokens), with a marker where it was cut.

    `side` is the side that is dropped: "left" drops the head and keeps the end, "right" drops the tail and keeps the
    beginning. The marker, which names the number of characters cut, comes on top of the limit.
    """
    if limit_characters < 0:
        raise ValueError(f"limit_characters must be at least 0, got {limit_characters}")
    if side not in ("left", "right"):
        raise ValueError(f"side must be 'left' or 'right', got {side!r}")
    cut = len(text) - limit_characters
    if cut <= 0:
        return text
    marker = f"[{cut} characters cut]"
    return marker + text[cut:] if side == "left" else text[:limit_characters] + marker


def clean_text(text: str) -> str:
    """Text that can be encoded as UTF-8: surrogate pairs are joined, a lone surrogate becomes U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


async def _run(owner: object, tools: Mapping[str, Tool], call: ToolCall) -> str:
    if call.error is not None:
        return _error(call.error)
    if not isinstance(call.name, str) or not call.name:
        return _error(f"a call needs a name; available: {_listed(tools)}")
    found = tools.get(call.name)
    if found is None:
        shown = truncate_text(call.name, _NAME_CHARACTERS)
        return _error(f"unknown tool {shown!r}; available: {_listed(tools)}")
    if not isinstance(call.arguments, Mapping):
        return _error(f"{found.name}: arguments must be an object of names and values")
    try:
        result = found.function(owner, **found.validate(call.arguments))
        if inspect.isawaitable(result):
            result = await result
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
    except ToolError as error:
        return _error(str(error))
    except Exception as error:  # the tool ran on what a policy wrote: the policy is told, the episode goes on
        return _error(f"{type(error).__name__}: {error}")


def _error(text: str) -> str:
    return "error: " + truncate_text(" ".join(text.split()), _ERROR_CHARACTERS)


def _listed(tools: Mapping[str, Tool]) -> str:
    return ", ".join(tools) or "none"


def _describe(function: Callable[..., Any]) -> Tool:
    """The tool a marked function makes."""
    name = str(getattr(function, _MARK))
    where = f"tool {name!r} ({function.__qualname__})"
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise TypeError(f"{where}: a type hint cannot be resolved: {error}; import the type at module level") from error
    description, described = _read_docstring(inspect.getdoc(function) or "")
    fields: dict[str, Any] = {}
    for position, parameter in enumerate(list(inspect.signature(function).parameters.values())[1:]):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise TypeError(f"{where}: parameter {parameter.name!r} must be a plain named one")
        if parameter.name not in hints:
            raise TypeError(f"{where}: give parameter {parameter.name!r} a type hint")
        default = ... if parameter.default is parameter.empty else parameter.default
        # The alias carries the name: a field called `schema` or `copy` would shadow pydantic's own.
        about = Field(default, alias=parameter.name, description=described.get(parameter.name))
        fields[f"argument_{position}"] = (hints[parameter.name], about)
    config = ConfigDict(extra="forbid", arbitrary_types_allowed=False)
    try:
        arguments: type[BaseModel] = create_model(f"{name}_arguments", __config__=config, **fields)
        parameters = arguments.model_json_schema(by_alias=True)
    except (PydanticSchemaGenerationError, PydanticUserError) as error:
        raise TypeError(f"{where}: a type hint has no JSON schema: {str(error).splitlines()[0]}") from error
    parameters.pop("title", None)
    for one in parameters.get("properties", {}).values():
        one.pop("title", None)
    parameters.setdefault("properties", {})
    schema = {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
    return Tool(name, function, arguments, schema)


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """(first paragraph, {argument: description}) of a docstring with an optional `Args:` section."""
    head, _, tail = text.partition("Args:")
    description = " ".join(head.strip().split("\n\n")[0].split())
    described: dict[str, str] = {}
    current = None
    for line in tail.splitlines()[1:]:
        if not line.strip() or not line.startswith(" "):
            break
        matched = re.match(r"\s+(\w+)(?:\s*\([^)]*\))?:\s*(.*)", line)
        if matched:
            current = matched[1]
            described[current] = matched[2].strip()
        elif current is not None:
            described[current] += " " + line.strip()
    return description, described
