"""The agent's contract: act on observations, keep the exact tokens.

An agent is made of a renderer (messages -> token ids, incremental), a parser (ids -> text + tool calls) and a context
rule (what happens when the history grows). `LanguageAgent` in agent.py puts them together over an engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from renma.inference.base import Sample
from renma.types import Action, Ids, Message, Observation


@dataclass(frozen=True, slots=True)
class Turn:
    """One act of the agent: what the policy saw, what it sampled, what that means."""

    prompt_ids: Ids
    sample: Sample
    action: Action


class Renderer(Protocol):
    """Messages to token ids, without ever encoding again what was sampled. Holds no episode's state.

    `stop_ids` and `stop_strings` end an action in this format.
    """

    stop_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]

    def start(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """The ids of the first prompt, up to where the policy begins to write."""
        ...

    def extend(
        self,
        history: Sequence[Message],
        prompt_ids: Sequence[int] | Ids,
        action_ids: Sequence[int] | Ids,
        new: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
    ) -> list[int]:
        """The ids of the next prompt. `history` are all messages so far (the assistant's last action included), `new`
        the observation after it. In the append form the result begins with prompt_ids + action_ids."""
        ...


class Continues(Protocol):
    """A renderer that can say what is new alone, so that a turn costs what is new in it, however long the episode."""

    def follow(
        self,
        history: Sequence[Message],
        action_ids: Sequence[int] | Ids,
        new: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
    ) -> list[int] | None:
        """What `extend` puts after prompt_ids + action_ids; None where the earlier text may have to change."""
        ...


class Parser(Protocol):
    """Sampled ids to an Action. Never raises on what a model wrote: a bad call becomes a ToolCall with `error`."""

    def parse(self, ids: Sequence[int], text: str) -> Action: ...


class KnowsTools(Protocol):
    """A parser that reads differently when it knows the tools' names."""

    def with_tools(self, names: Sequence[str]) -> Parser: ...


class Agent(Protocol):
    """Acts in one episode. An outside agent (behind the engine's server) is one too."""

    async def act(self, observation: Observation) -> Turn:
        """Raises ContextFull when the next prompt leaves no room: the episode then ends, truncated."""
        ...


class ContextFull(Exception):
    """The next prompt leaves no room in the context. Not an error: the episode ends with stop_reason 'context'."""
