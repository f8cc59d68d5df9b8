"""The agent that is a language model: a renderer, a parser and an engine, with the exact tokens kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from renma.agents.base import ContextFull, Parser, Renderer, Turn
from renma.agents.renderers.encoding import decode
from renma.errors import ContextOverflow
from renma.inference.base import Engine, Sample, SamplingParams
from renma.types import Action, Message, Observation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@runtime_checkable
class KnowsTools(Protocol):
    """A parser that reads differently when it knows the tools' names."""

    def with_tools(self, names: Sequence[str]) -> Parser: ...


class LanguageAgent:
    """Acts in one episode.

    tools: JSON schemas in the OpenAI function form, shown by the renderer.
    seeds: the seed of each turn's request, by turn (0, 1, …).
    key: orders this agent's requests among those that wait together; the turn is added at its end.
    context: the most tokens of prompt and action; None or a larger number means the engine's own.

    The ids that the engine sampled are stored and sent again as they are; they are decoded for the parser only. The
    renderer's stop ids and strings are added to those of `sampling`. `act` leaves the agent as it was when it raises.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        renderer: Renderer,
        parser: Parser,
        sampling: SamplingParams,
        *,
        tools: Sequence[dict[str, Any]] = (),
        seeds: Callable[[int], int],
        key: tuple[Any, ...] = (),
        context: int | None = None,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._tools = tuple(tools)
        names = [str(tool.get("function", tool).get("name", "")) for tool in self._tools]
        self._parser = parser.with_tools(names) if names and isinstance(parser, KnowsTools) else parser
        self._sampling = replace(
            sampling,
            stop_ids=tuple(dict.fromkeys([*sampling.stop_ids, *renderer.stop_ids])),
            stop_strings=tuple(dict.fromkeys([*sampling.stop_strings, *renderer.stop_strings])),
        )
        self._seeds = seeds
        self._key = tuple(key)
        self._context = engine.context if context is None else min(context, engine.context)
        self._messages: tuple[Message, ...] = ()
        self._prompt: list[int] = []
        self._action: list[int] = []
        self._turn = 0

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation so far, its last action included."""
        return self._messages

    async def act(self, observation: Observation) -> Turn:
        """One action on the new messages.

        Raises ContextFull, before anything is sent, when the prompt and one token would not fit the context.
        """
        new = observation.messages
        prompt = self.next_prompt(observation)
        room = self._context - len(prompt)
        if room < 1:
            raise ContextFull(
                f"the prompt of turn {self._turn} has {len(prompt)} tokens; the context is {self._context}"
            )
        params = replace(
            self._sampling,
            max_tokens=min(self._sampling.max_tokens, room),
            seed=self._seeds(self._turn),
        )
        try:
            sample = await self._engine.sample(prompt, params, key=(*self._key, self._turn))
        except ContextOverflow as overflow:  # an engine that counts what we cannot see
            raise ContextFull(str(overflow)) from overflow
        action = self._read(sample)
        self._messages += (*new, _said(action))
        self._prompt = prompt
        self._action = [int(token) for token in sample.ids]
        self._turn += 1
        return Turn(np.asarray(prompt, dtype=np.int32), sample, action)

    def next_prompt(self, observation: Observation) -> list[int]:
        """The ids that `act` would send for this observation, whether they fit the context or not; nothing changes."""
        if self._turn == 0:
            return self._renderer.start(observation.messages, self._tools)
        return self._renderer.extend(self._messages, self._prompt, self._action, observation.messages, self._tools)

    def _read(self, sample: Sample) -> Action:
        """The sampled ids as an Action: parsed without the token that ended it, calls numbered, raw text whole."""
        ids = [int(token) for token in sample.ids]
        body = ids[:-1] if ids and ids[-1] in self._sampling.stop_ids else ids
        action = self._parser.parse(ids, decode(self._tokenizer, body))
        calls = tuple(
            call if call.id else replace(call, id=f"call_{self._turn}_{index}")
            for index, call in enumerate(action.tool_calls)
        )
        return replace(action, tool_calls=calls, raw=decode(self._tokenizer, ids))


def _said(action: Action) -> Message:
    """The assistant's message for the history: its calls kept; thinking as a part, which a template may leave out."""
    text = action.text if action.text or action.tool_calls or action.thinking else action.raw.strip()
    if not action.thinking:
        return Message("assistant", text, action.tool_calls)
    thought = {"type": "thinking", "thinking": action.thinking}
    return Message("assistant", (thought, {"type": "text", "text": text}), action.tool_calls)
