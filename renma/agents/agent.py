"""The agent that is a language model: a renderer, a parser and an engine, with the exact tokens kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from renma.agents.base import ContextFull, Continues, KnowsTools, Parser, Renderer, Turn
from renma.agents.renderers.encoding import decode
from renma.errors import ContextOverflow
from renma.inference.base import Engine, Sample, SamplingParams
from renma.profiling import span
from renma.tape import Tape
from renma.types import Action, Message, Observation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
        # Looked up by name: isinstance of a protocol costs ten times this, and agents are made by the thousand.
        self._continues: Continues | None = cast(Continues, renderer) if hasattr(renderer, "follow") else None
        self._tools = tuple(tools)
        names = [str(tool.get("function", tool).get("name", "")) for tool in self._tools]
        knows = bool(names) and hasattr(parser, "with_tools")
        self._parser = cast(KnowsTools, parser).with_tools(names) if knows else parser
        self._sampling = replace(
            sampling,
            stop_ids=tuple(dict.fromkeys([*sampling.stop_ids, *renderer.stop_ids])),
            stop_strings=tuple(dict.fromkeys([*sampling.stop_strings, *renderer.stop_strings])),
        )
        self._seeds = seeds
        self._key = tuple(key)
        self._context = engine.context if context is None else min(context, engine.context)
        self._messages: list[Message] = []
        self._tape = Tape()  # the last prompt and its action
        self._prompt = self._action = self._tape.view()
        self._turn = 0

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation so far, its last action included."""
        return tuple(self._messages)

    async def act(self, observation: Observation) -> Turn:
        """One action on the new messages.

        Raises ContextFull, before anything is sent, when the prompt and one token would not fit the context.
        """
        with span("render"):
            tape, following = self._following(observation)
        before = len(tape)
        length = before + len(following)
        room = self._context - length
        if room < 1:
            raise ContextFull(f"the prompt of turn {self._turn} has {length} tokens; the context is {self._context}")
        params = replace(
            self._sampling,
            max_tokens=min(self._sampling.max_tokens, room),
            seed=self._seeds(self._turn),
        )
        tape.extend(following)
        prompt = tape.view()
        try:
            sample = await self._engine.sample(prompt, params, key=(*self._key, self._turn))
            with span("parse"):
                action = self._read(sample)
        except BaseException as error:
            tape.cut(before)
            if isinstance(error, ContextOverflow):  # an engine that counts what we cannot see
                raise ContextFull(str(error)) from error
            raise
        self._messages += (*observation.messages, _said(action))
        tape.extend(sample.ids)
        self._tape, self._prompt, self._action = tape, prompt, sample.ids
        self._turn += 1
        return Turn(prompt, sample, action)

    def next_prompt(self, observation: Observation) -> list[int]:
        """The ids that `act` would send for this observation, whether they fit the context or not; nothing changes."""
        tape, following = self._following(observation)
        return [*tape.view().tolist(), *following]

    def _following(self, observation: Observation) -> tuple[Tape, list[int]]:
        """The tape that the next prompt goes on from, and what comes new on it: an empty one where it begins anew."""
        new = observation.messages
        if self._turn == 0:
            return Tape(), self._renderer.start(new, self._tools)
        if self._continues is not None:
            following = self._continues.follow(self._messages, self._action, new, self._tools)
            if following is not None:
                return self._tape, following
        whole = self._renderer.extend(self._messages, self._prompt, self._action, new, self._tools)
        size = len(self._tape)
        if whole[:size] == self._tape.view().tolist():
            return self._tape, whole[size:]
        return Tape(), whole

    def _read(self, sample: Sample) -> Action:
        """The sampled ids as an Action: parsed without the token that ended it, calls numbered, raw text whole."""
        ids: list[int] = sample.ids.tolist()
        raw = text = decode(self._tokenizer, ids)
        if ids and ids[-1] in self._sampling.stop_ids:
            text = decode(self._tokenizer, ids[:-1])
        action = self._parser.parse(ids, text)
        calls = tuple(
            call if call.id else replace(call, id=f"call_{self._turn}_{index}")
            for index, call in enumerate(action.tool_calls)
        )
        return Action(action.text, calls, action.thinking, raw)


def _said(action: Action) -> Message:
    """The assistant's message for the history: its calls kept; thinking as a part, which a template may leave out."""
    text = action.text if action.text or action.tool_calls or action.thinking else action.raw.strip()
    if not action.thinking:
        return Message("assistant", text, action.tool_calls)
    thought = {"type": "thinking", "thinking": action.thinking}
    return Message("assistant", (thought, {"type": "text", "text": text}), action.tool_calls)
