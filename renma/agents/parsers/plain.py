"""Call lines and answer lines in plain text, as few-shot transcripts have them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from renma.agents.text import well_formed
from renma.errors import RecipeError
from renma.types import Action, ToolCall

_NAME = re.compile(r"[A-Za-z_][\w.\-]*")


class PlainParser:
    """Reads `Call: calc(3*4)` as a tool call and `Answer: 12` as the final answer.

    What an environment finds in the Action:

    - an answer: `text` is what stands after the prefix on that line, and there are no calls;
    - a call: `text` is "", and `tool_calls` holds it; directly following call lines are further calls of the turn. All
      that stands between the first "(" and the last ")" is the one argument; nothing there means no arguments;
    - neither (no prefix, or an empty answer): `text` is "", there are no calls, and only `raw` holds what was written.

    So `text` is non-empty exactly when there is an answer. Lines before the first call or answer are `thinking`; lines
    after it are ignored (a policy may go on to invent the result). A call that cannot be read is a ToolCall with
    `error` set. Spaces before a prefix do not matter; letter case does.
    """

    def __init__(
        self, *, call_prefix: str = "Call:", answer_prefix: str = "Answer:", argument: str = "expression"
    ) -> None:
        if not call_prefix.strip() or not answer_prefix.strip() or call_prefix.strip() == answer_prefix.strip():
            raise RecipeError(
                f"plain parser: call_prefix {call_prefix!r} and answer_prefix {answer_prefix!r} must be two different "
                "texts; give each its own word"
            )
        self.call_prefix = call_prefix.strip()
        self.answer_prefix = answer_prefix.strip()
        self.argument = argument

    def parse(self, ids: Sequence[int], text: str) -> Action:
        """Never raises. `ids` are not used: this format has no control tokens."""
        lines = well_formed(text).split("\n")
        thinking: list[str] = []
        for index, line in enumerate(lines):
            line = line.strip()
            if line.startswith(self.call_prefix):
                calls = []
                for later in lines[index:]:
                    if not later.strip().startswith(self.call_prefix):
                        break
                    calls.append(self._call(later.strip().removeprefix(self.call_prefix)))
                return Action("", tuple(calls), "\n".join(thinking).strip(), text)
            if line.startswith(self.answer_prefix):
                answer = line.removeprefix(self.answer_prefix).strip()
                return Action(answer, (), "\n".join(thinking).strip(), text)
            thinking.append(line)
        return Action("", (), "", text)

    def _call(self, written: str) -> ToolCall:
        written = written.strip()
        match = _NAME.match(written)
        if match is None:
            return ToolCall("", error=f"no tool name after {self.call_prefix!r}; write {self._form}")
        name, rest = match.group(), written[match.end() :].strip()
        if not rest.startswith("("):
            return ToolCall(name, error=f"no '(' after the tool's name; write {self._form}")
        close = rest.rfind(")")
        if close < 0:
            return ToolCall(name, error=f"no closing ')'; write {self._form}")
        if rest[close + 1 :].strip():
            return ToolCall(name, error=f"text after the closing ')'; write {self._form}")
        value = rest[1:close].strip()
        return ToolCall(name, {self.argument: value} if value else {})

    @property
    def _form(self) -> str:
        return f"{self.call_prefix} tool({self.argument})"
