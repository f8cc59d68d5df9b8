"""Few-shot transcripts in plain text: the format for models without a chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from renma.agents.calls import arguments_of
from renma.agents.renderers.encoding import TextEncoder
from renma.errors import ModelError, RecipeError
from renma.types import Ids, Message, ToolCall


class PlainRenderer:
    """Writes each message by its role's line, and lets the policy write one action up to `stop`.

    header, header_file: text that opens every first prompt (instructions, worked examples); one of the two. It gets a
        closing newline if it has none. Tools are described here: this format shows no schemas.
    system, user, tool, assistant: the text of a message of that role; `{content}` stands for what it says.
    call: the text of a tool call in an assistant message that is part of a prompt (a worked example); `{name}` and
        `{arguments}` (the value of a single argument, else JSON).
    cue: what stands before each action ("A:", say); not trained.
    stop: the text that ends an action. The token that completes it is kept as sampled ("\\n\\n" for "\\n", say).
    add_bos: begin with the tokenizer's BOS token; None does what the tokenizer does by default.

    Everything is encoded as plain text: special tokens spelled in a message are not honoured. The header and the
    first messages are encoded in one piece; later messages in one piece that begins after the action's stop. With a
    stop and lines that end in a newline, pieces meet at line ends, where a model's pretraining text was cut as well.

    Raises RecipeError for a format that cannot work, a header file that cannot be read, or BOS without a BOS token.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        header: str = "",
        header_file: str | None = None,
        system: str = "{content}\n",
        user: str = "Question: {content}\n",
        tool: str = "Result: {content}\n",
        assistant: str = "{content}\n",
        call: str = "Call: {name}({arguments})\n",
        cue: str = "",
        stop: str = "\n",
        add_bos: bool | None = None,
    ) -> None:
        if header and header_file:
            raise RecipeError("plain renderer: both header and header_file are given; keep one")
        if header_file:
            header = _read(header_file)
        self.header = header if not header or header.endswith("\n") else header + "\n"
        self.formats = {"system": system, "user": user, "tool": tool, "assistant": assistant}
        for role, form in self.formats.items():
            if "{content}" not in form:
                raise RecipeError(f"plain renderer: the {role} text {form!r} has no {{content}}; put it where it goes")
        if not stop:
            raise RecipeError("plain renderer: stop is empty, so no action would end; the default is a newline")
        self.call = call
        self.cue = cue
        self.stop = stop
        self._encoder = TextEncoder(tokenizer)
        bos = _bos_id(tokenizer, add_bos)
        self._bos = [] if bos is None else [bos]
        eos = tokenizer.eos_token_id
        self.stop_ids: tuple[int, ...] = () if eos is None else (int(eos),)
        self.stop_strings: tuple[str, ...] = (stop,)

    def start(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """The ids of the first prompt: BOS where due, header, messages, cue. `tools` are not shown."""
        text = self.header + self._written(messages) + self.cue
        return self._bos + self._encoder.text(text, first=True)

    def extend(
        self,
        history: Sequence[Message],
        prompt_ids: Sequence[int] | Ids,
        action_ids: Sequence[int] | Ids,
        new: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
    ) -> list[int]:
        """prompt_ids + action_ids + the ids of the new messages and the cue."""
        return [*map(int, prompt_ids), *map(int, action_ids), *self.follow(history, action_ids, new, tools)]

    def follow(
        self,
        history: Sequence[Message],
        action_ids: Sequence[int] | Ids,
        new: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
    ) -> list[int]:
        """The ids of the new messages and the cue.

        An action that does not end in the stop (cut by its length, or ended by EOS) is closed with it first.
        """
        closing = "" if self._encoder.decode(action_ids).endswith(self.stop) else self.stop
        return self._encoder.text(closing + self._written(new) + self.cue)

    def encode_action(self, text: str) -> list[int]:
        """The ids of an action written by a demonstrator, its stop included in `text`."""
        return self._encoder.text(text)

    def _written(self, messages: Sequence[Message]) -> str:
        return "".join(self._message(message) for message in messages)

    def _message(self, message: Message) -> str:
        parts = message.content
        if not isinstance(parts, str) and any(part.get("type") == "image_url" for part in parts):
            raise ModelError(
                f"plain renderer: a {message.role} message holds an image, and this format is text; "
                "leave images out of the environment's observations"
            )
        calls = "".join(self._call(call) for call in message.tool_calls)
        if calls and not message.text:
            return calls
        return self.formats[message.role].replace("{content}", message.text) + calls

    def _call(self, call: ToolCall) -> str:
        arguments = arguments_of(call.arguments)
        values = list(arguments.values())
        if not values:
            written = ""
        elif len(values) == 1 and isinstance(values[0], str):
            written = values[0]
        else:
            written = json.dumps(arguments, ensure_ascii=False)
        before, slot, after = self.call.replace("{name}", call.name).partition("{arguments}")
        return before + written + after if slot else before


def _read(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"plain renderer: header_file {file!r} cannot be read: {error}; give a UTF-8 file") from error


def _bos_id(tokenizer: PreTrainedTokenizerBase, add_bos: bool | None) -> int | None:
    bos = tokenizer.bos_token_id
    if add_bos and bos is None:
        raise RecipeError("plain renderer: add_bos is on, but the tokenizer has no BOS token; leave add_bos out")
    if bos is None or add_bos is False:
        return None
    return int(bos) if add_bos or tokenizer.encode("a")[:1] == [bos] else None
