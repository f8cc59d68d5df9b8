"""Prompts through a Hugging Face chat template, rendering only the new messages of each turn."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jinja2
from transformers import PreTrainedTokenizerBase

from renma.agents.renderers.encoding import TextEncoder
from renma.agents.renderers.messages import template_call, template_message
from renma.agents.text import BREAK
from renma.errors import ModelError, RecipeError
from renma.types import Ids, Message, ToolCall

Rendered = dict[str, Any]

_SPOKEN = "renma7placeholder"
_ASKED = "renma7question"
_OPENING: Rendered = {"role": "user", "content": "renma7opening"}
_PROBE_CALL = ToolCall("renma7tool", {}, "call_0_0")
_PROBE_TOOL: Rendered = {
    "type": "function",
    "function": {
        "name": "renma7tool",
        "description": "",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}


class ChatRenderer:
    """A chat template, applied to the whole first prompt and afterwards only to what is new.

    What follows an action is found with a fixed stand-in conversation: a user turn, an assistant turn that says a
    placeholder, the new messages and the generation prompt are rendered, and what comes after the placeholder is the
    suffix: the closing of the assistant's turn, the new messages together (so that a template that gathers tool
    results in one turn does so), and the opening of the next. A turn costs three messages, however long the episode.
    A template that writes tool results by looking at the calls before them is found out once, at the start, and then
    given those calls too.

    chat_template: a Jinja template, or the path of a `.jinja` file; None takes the tokenizer's own.
    history: "append" keeps every token of the earlier turns, also where the template would now leave some out (earlier
        thinking). "rerender" renders the whole conversation each turn; where that changes earlier text the prompt does
        not begin with the one before, and the learner starts a new row; where it does not, the sampled ids are kept.
    enable_thinking, template_options: variables given to the template.
    stop_tokens: more tokens that end an action, beside those found: the EOS token and the token that begins what the
        template writes after an assistant's turn, which may be the next role's marker.

    Content that spells a control token stays text. Raises RecipeError without a usable template, ModelError when the
    template refuses the messages.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template: str | None = None,
        history: Literal["append", "rerender"] = "append",
        enable_thinking: bool | None = None,
        template_options: Mapping[str, Any] | None = None,
        stop_tokens: Sequence[str] = (),
    ) -> None:
        if history not in ("append", "rerender"):
            raise RecipeError(f"chat renderer: history is {history!r}; choose append or rerender")
        self._tokenizer = tokenizer
        self._template = _template_text(tokenizer, chat_template)
        self._history = history
        self._options = dict(template_options or {})
        if enable_thinking is not None:
            self._options["enable_thinking"] = enable_thinking
        self._encoder = TextEncoder(tokenizer, self._template)
        self._tools_seen = False

        ends = [tokenizer.eos_token_id, *(_token_id(tokenizer, token) for token in stop_tokens)]
        self.stop_ids: tuple[int, ...] = _unique(int(i) for i in ends if i is not None)
        self.stop_strings: tuple[str, ...] = ()
        asked = self._after_text([{"role": "user", "content": _ASKED}], ())
        self._add_stop(asked.partition(_ASKED)[0])
        self._wants_calls = self._find_habit()
        if history == "append" and self._rewrites():
            warnings.warn(
                "the chat template changes what it wrote of earlier turns as a conversation goes on; with history: "
                "append the policy keeps seeing them as they were. agent.renderer.history: rerender follows the "
                "template, and a new training row then begins with each turn",
                stacklevel=2,
            )

    # The renderer's contract

    def start(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """The ids of the first prompt, the generation prompt included. Warns once if the template hides the tools."""
        rendered = [self._message(message) for message in messages]
        text = self._render(rendered, tools, generate=True)
        if tools and not self._tools_seen:
            self._tools_seen = True
            if text == self._render(rendered, (), generate=True):
                warnings.warn(
                    "the chat template does not show the tools to the model: describe them in the system message, or "
                    "give agent.renderer.chat_template one that does",
                    stacklevel=2,
                )
        return self._encoder.markup(text, first=True)

    def extend(
        self,
        history: Sequence[Message],
        prompt_ids: Sequence[int] | Ids,
        action_ids: Sequence[int] | Ids,
        new: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
    ) -> list[int]:
        """prompt_ids + action_ids + the suffix; with "rerender", the whole conversation where its text has changed."""
        suffix = self._following(history, action_ids, new, tools)
        appended = [*map(int, prompt_ids), *map(int, action_ids), *suffix]
        if self._history == "append":
            return appended
        whole = [self._message(message) for message in [*history, *new]]
        text = self._render(whole, tools, generate=True)
        if self._encoder.decode(appended) == text.replace(BREAK, ""):
            return appended
        return self._encoder.markup(text, first=True)

    def follow(
        self,
        history: Sequence[Message],
        action_ids: Sequence[int] | Ids,
        new: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
    ) -> list[int] | None:
        """The suffix; with "rerender" None: whether earlier text has changed shows in the whole conversation only."""
        return self._following(history, action_ids, new, tools) if self._history == "append" else None

    def encode_action(self, text: str) -> list[int]:
        """The ids of an action written by a demonstrator: control tokens honoured, the turn's end included."""
        return self._encoder.markup(text)

    # What follows an action

    def _following(
        self,
        history: Sequence[Message],
        action_ids: Sequence[int] | Ids,
        new: Sequence[Message],
        tools: Sequence[dict[str, Any]],
    ) -> list[int]:
        action = [int(i) for i in action_ids]
        return self._unsaid(action, self._suffix(history[-1] if history else None, new, tools))

    def _suffix(self, last: Message | None, new: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        """The ids from the end of what the assistant said to where it speaks next."""
        rendered = [self._message(message) for message in new]
        if self._wants_calls and any(message.role == "tool" for message in new):
            calls = last.tool_calls if last is not None and last.tool_calls else (_PROBE_CALL,)
            return self._after_calls(calls, rendered, tools)
        return self._encoder.markup(self._after_text(rendered, tools))

    def _after_text(self, new: Sequence[Rendered], tools: Sequence[dict[str, Any]]) -> str:
        spoken = {"role": "assistant", "content": _SPOKEN}
        return _after(_SPOKEN, self._render([_OPENING, spoken, *new], tools, generate=True))

    def _after_calls(
        self, calls: Sequence[ToolCall], new: Sequence[Rendered], tools: Sequence[dict[str, Any]]
    ) -> list[int]:
        """As `_after_text`, after an assistant's turn that made `calls` (names and ids are theirs, arguments are not).

        The placeholder is the last argument, so the end of the call itself still has to be taken off: it is what two
        renderings, with and without the new messages, have in common, less the closing of the turn.
        """
        written = [template_call(call.id, call.name, {}) for call in calls]
        written[-1]["function"]["arguments"] = {"argument": _SPOKEN}
        spoken = {"role": "assistant", "content": "", "tool_calls": self._encoder.escape_all(written)}
        before = _after(_SPOKEN, self._render([_OPENING, spoken], tools, generate=False))
        after = _after(_SPOKEN, self._render([_OPENING, spoken, *new], tools, generate=True))
        old_ids, new_ids = self._encoder.markup(before), self._encoder.markup(after)
        shared = 0
        while shared < min(len(old_ids), len(new_ids)) and old_ids[shared] == new_ids[shared]:
            shared += 1
        for index in range(shared - 1, -1, -1):
            if new_ids[index] in self.stop_ids:
                return new_ids[index:]
            if self._encoder.decode([new_ids[index]]).strip():
                break
        return new_ids[shared:]

    def _unsaid(self, action: list[int], suffix: list[int]) -> list[int]:
        """`suffix` without the part of the turn's closing that the policy sampled itself."""
        if not action:
            return suffix
        if action[-1] in self.stop_ids:
            index = self._first_control(suffix)
            return suffix[index + 1 :] if index is not None and suffix[index] == action[-1] else suffix
        said = self._encoder.decode(action).rstrip()
        for stop in self.stop_strings:
            if said.endswith(stop):
                return self._past(stop, suffix)
        return suffix

    def _past(self, stop: str, ids: list[int]) -> list[int]:
        """`ids` after the `stop` that they begin with; all of them if they begin otherwise."""
        for index in range(1, len(ids) + 1):
            text = self._encoder.decode(ids[:index]).lstrip()
            if text.startswith(stop):  # what else the last token holds is the template's, and is kept
                return self._encoder.text(text[len(stop) :]) + ids[index:]
            if not stop.startswith(text):
                break
        return ids

    def _first_control(self, ids: Sequence[int]) -> int | None:
        """Where the first control token is, if only white space stands before it."""
        for index, token in enumerate(ids):
            if token in self._encoder.control_ids:
                return index
            if self._encoder.decode([token]).strip():
                return None
        return None

    # What the template does, found out once

    def _add_stop(self, head: str) -> None:
        """`head`: what the template writes between an assistant's words and the next message's content."""
        ids = self._encoder.markup(head)
        index = self._first_control(ids)
        if index is not None:
            self.stop_ids = _unique([*self.stop_ids, ids[index]])
        elif head.strip():
            self.stop_strings = tuple(dict.fromkeys([*self.stop_strings, head.strip()]))

    def _find_habit(self) -> bool:
        """Whether tool results must be rendered after the calls that they answer. Learns what ends a calling turn."""
        answer = [{"role": "tool", "content": _ASKED, "tool_call_id": _PROBE_CALL.id, "name": _PROBE_CALL.name}]
        try:
            plain = self._after_text(answer, ())
        except ModelError:
            plain = None
        if plain is not None:
            self._add_stop(plain.partition(_ASKED)[0])
        try:
            called = self._after_calls((_PROBE_CALL,), answer, ())
        except ModelError:  # a template that knows no calls; whether it knows tool messages shows when one comes
            return False
        if plain is not None and self._encoder.markup(plain) == called:
            return False
        self._add_stop(self._encoder.decode(called).partition(_ASKED)[0])
        return True

    def _rewrites(self) -> bool:
        """Whether what stands up to an assistant's words changes once the conversation has gone on, tools shown or not.

        Thinking apart: that many templates leave out earlier thinking is what `history` is for.
        """
        turn = [_OPENING, {"role": "assistant", "content": _SPOKEN}]
        try:
            for tools in ((), (_PROBE_TOOL,)):
                early = self._render(turn, tools, generate=False).partition(_SPOKEN)[0]
                if not self._render([*turn, *turn], tools, generate=False).startswith(early):
                    return True
        except ModelError:  # it refuses a plain conversation; what it makes of a task's shows when that comes
            return False
        return False

    # Rendering

    def _message(self, message: Message) -> Rendered:
        """The template's dict, with control tokens in its content broken. Calls are content; so is what tools say."""
        rendered = template_message(message)
        calls = rendered.pop("tool_calls", None)
        role = rendered.pop("role")
        escaped: Rendered = self._encoder.escape_all(rendered, special_only=role == "assistant")
        escaped["role"] = role
        if calls is not None:
            escaped["tool_calls"] = self._encoder.escape_all(calls)
        return escaped

    def _render(self, messages: Sequence[Rendered], tools: Sequence[dict[str, Any]], *, generate: bool) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=self._encoder.escape_all(list(tools)) or None,
                chat_template=self._template,
                add_generation_prompt=generate,
                tokenize=False,
                **self._options,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            roles = ", ".join(str(message["role"]) for message in messages[-4:])
            raise ModelError(
                f"the chat template refused messages with roles {roles}: {error}; change the messages' order or give "
                "agent.renderer.chat_template one that takes them"
            ) from error
        return str(text)


def _after(placeholder: str, text: str) -> str:
    """What follows the first `placeholder`. New messages that hold the same text come later and do no harm."""
    _, found, after = text.partition(placeholder)
    if not found:
        raise ModelError("the chat template does not write what the assistant said; give it another chat_template")
    return after


def _template_text(tokenizer: PreTrainedTokenizerBase, given: str | None) -> str:
    if given is not None and given.endswith(".jinja") and "\n" not in given:
        try:
            return Path(given).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"chat renderer: chat_template {given!r} cannot be read: {error}") from error
    try:
        return str(tokenizer.get_chat_template(given))
    except ValueError as error:
        raise RecipeError(
            "chat renderer: the tokenizer has no chat template; give agent.renderer.chat_template, or use type: plain"
        ) from error


def _token_id(tokenizer: PreTrainedTokenizerBase, token: str) -> int:
    known = tokenizer.get_vocab()
    if token not in known:
        raise RecipeError(f"chat renderer: stop token {token!r} is not one of the tokenizer's; check its spelling")
    return int(known[token])


def _unique(ids: Any) -> tuple[int, ...]:
    return tuple(dict.fromkeys(ids))
