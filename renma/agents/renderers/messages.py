"""Renma's messages as the dicts that Hugging Face chat templates read."""

from __future__ import annotations

from typing import Any

from renma.agents.calls import CallError, arguments_of
from renma.errors import DataError, ModelError
from renma.types import Message


def template_message(message: Message) -> dict[str, Any]:
    """{"role", "content", …} with tool calls kept, their arguments as a dict, and thinking as `reasoning_content`.

    Content parts of type `text` are joined; parts of type `thinking` ({"type": "thinking", "thinking": …}) become the
    reasoning. Raises ModelError for an image, DataError for arguments that are no JSON object.
    """
    result: dict[str, Any] = {"role": message.role, "content": message.text}
    if not isinstance(message.content, str):
        kinds = {str(part.get("type")) for part in message.content}
        if kinds - {"text", "thinking"}:
            other = ", ".join(sorted(kinds - {"text", "thinking"}))
            raise ModelError(
                f"chat renderer: a {message.role} message holds a part of type {other}, and this renderer is for text; "
                "leave such parts out of the environment's observations"
            )
        thinking = "".join(str(p.get("thinking", "")) for p in message.content if p.get("type") == "thinking")
        if thinking:
            result["reasoning_content"] = thinking
    if message.tool_calls:
        result["tool_calls"] = [template_call(call.id, call.name, call.arguments) for call in message.tool_calls]
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        result["name"] = message.name
    return result


def template_call(id: str, name: str, arguments: Any) -> dict[str, Any]:
    """One tool call in the OpenAI form."""
    try:
        values = arguments_of(arguments)
    except CallError as error:
        raise DataError(f"the call to {name!r} in a message of the prompt cannot be rendered: {error}") from error
    return {"id": id, "type": "function", "function": {"name": name, "arguments": values}}
