"""Tool calls as JSON between tags: `<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from renma.agents.calls import CallError, call_parts, decode_json
from renma.agents.text import well_formed
from renma.errors import RecipeError
from renma.types import Action, ToolCall

_NAME = re.compile(r'"name"\s*:\s*"([^"\\]{1,64})"')
_FENCE = re.compile(r"```(?:json)?\s*```")
_SPACE = re.compile(r"\s*")
_BARE_TRIES = 64


class JsonTagsParser:
    """Reads calls between `open` and `close`, thinking between the two `think` tags, and takes the rest as text.

    - A call ends where its JSON value ends, so an argument may hold the closing tag. A list is several calls. The last
      closing tag may be missing. Arguments may be an object or JSON text of one; absent or empty is {}.
    - A call that cannot be read is a ToolCall with `error`, at its place among the others, which stand on their own.
    - Calls inside thinking are not calls. Thinking that is not closed reaches to the end; a closing tag without an
      opening one (the prompt opened it) makes all before it thinking. `starts_thinking` says that the prompt always
      opens it, so that an action cut short is thinking too. `think=None` switches this off.
    - JSON without tags is text. With `bare_json`, and no tagged call in the action, an object whose name is one of the
      known tools is a call (`with_tools` makes them known).
    """

    def __init__(
        self,
        *,
        open: str = "<tool_call>",
        close: str = "</tool_call>",
        think: tuple[str, str] | None = ("<think>", "</think>"),
        starts_thinking: bool = False,
        bare_json: bool = False,
        tools: Sequence[str] = (),
    ) -> None:
        tags = [open, close, *(think or ())]
        if not all(tag.strip() for tag in tags) or len(set(tags)) != len(tags):
            raise RecipeError(f"json_tags parser: open, close and think {tags} must be different, non-empty tags")
        self.open, self.close, self.think = open, close, think
        self.starts_thinking = starts_thinking and think is not None
        self.bare_json = bare_json
        self.tools = frozenset(tools)
        openers = [open, *(think or ())]
        self._opener = re.compile("|".join(re.escape(tag) for tag in sorted(openers, key=len, reverse=True)))

    def with_tools(self, names: Sequence[str]) -> JsonTagsParser:
        """The same parser, knowing which tools there are."""
        return JsonTagsParser(
            open=self.open,
            close=self.close,
            think=self.think,
            starts_thinking=self.starts_thinking,
            bare_json=self.bare_json,
            tools=tuple(names),
        )

    def parse(self, ids: Sequence[int], text: str) -> Action:
        """Never raises. `ids` are not used: control tokens are in `text` as they are spelled."""
        clean = well_formed(text)
        thoughts: list[str] = []
        prose: list[str] = []
        calls: list[ToolCall] = []
        position = 0
        if self.starts_thinking:
            position = self._think_end(clean, 0, thoughts)
        while (match := self._opener.search(clean, position)) is not None:
            prose.append(clean[position : match.start()])
            if match.group() == self.open:
                found, position = self._calls_at(clean, match.end())
                calls += found
            elif self.think is not None and match.group() == self.think[0]:
                position = self._think_end(clean, match.end(), thoughts)
            else:  # thinking that the prompt had opened: nothing before was meant as text or call
                position = match.end()
                if not thoughts:
                    thoughts.append(clean[: match.start()])
                    prose, calls = [], []
        prose.append(clean[position:])
        said = "".join(prose)
        if self.bare_json and not calls:
            calls, said = self._bare_calls(said)
        return Action(said.strip(), tuple(calls), "\n".join(t.strip() for t in thoughts).strip(), text)

    def _think_end(self, text: str, start: int, thoughts: list[str]) -> int:
        """Keeps the thinking that begins at `start`; gives the index after its closing tag."""
        assert self.think is not None
        end = text.find(self.think[1], start)
        if end < 0:
            thoughts.append(text[start:])
            return len(text)
        thoughts.append(text[start:end])
        return end + len(self.think[1])

    def _calls_at(self, text: str, start: int) -> tuple[list[ToolCall], int]:
        """The calls of the tag that opened before `start`, and where to go on."""
        begin = _SPACE.match(text, start).end()  # type: ignore[union-attr]
        try:
            value, end = decode_json(text, begin)
        except CallError as error:
            after, limit = self._tag_end(text, start)
            name = _NAME.search(text, start, limit)
            return [ToolCall(name.group(1) if name else "", error=str(error))], after
        after, limit = self._tag_end(text, end)
        calls = calls_of(value)
        if text[end:limit].strip():
            calls = [ToolCall(call.name, error="unexpected text after the call's JSON") for call in calls]
        return calls, after

    def _tag_end(self, text: str, start: int) -> tuple[int, int]:
        """Where to go on after a call whose JSON is over (or unreadable) at `start`, and where its text ends."""
        close, again = text.find(self.close, start), text.find(self.open, start)
        if again >= 0 and (close < 0 or again < close):
            return again, again
        return (close + len(self.close), close) if close >= 0 else (len(text), len(text))

    def _bare_calls(self, text: str) -> tuple[list[ToolCall], str]:
        """Calls to known tools written without tags, and the text without them. Tries are counted: text is hostile."""
        calls: list[ToolCall] = []
        kept: list[str] = []
        position = 0
        search = 0
        for _ in range(_BARE_TRIES):
            begin = text.find("{", search)
            if begin < 0:
                break
            search = begin + 1
            try:
                value, end = decode_json(text, begin)
            except CallError:  # braces in prose: text
                continue
            search = end
            name = value.get("name") if isinstance(value, dict) else None
            if isinstance(name, str) and name in self.tools:
                calls += calls_of(value)
                kept.append(text[position:begin])
                position = end
        kept.append(text[position:])
        return calls, _FENCE.sub("", "".join(kept)) if calls else text


def calls_of(value: Any) -> list[ToolCall]:
    """One ToolCall for each call in a decoded JSON value, in order, with `error` where it cannot be used."""
    calls = []
    for item in value if isinstance(value, list) else [value]:
        try:
            name, arguments = call_parts(item)
            calls.append(ToolCall(name, arguments))
        except CallError as error:
            known = item.get("name") if isinstance(item, dict) else None
            calls.append(ToolCall(known if isinstance(known, str) else "", error=str(error)))
    return calls
