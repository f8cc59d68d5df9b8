"""The engine's contract: prompt ids in, sampled ids out, with the log-probability of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from renma.types import Floats, Ids, Routing, SampleStop


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled.

    temperature 0 is greedy. The recorded log-probability is log softmax(logits / temperature) over the whole set of
    output tokens (temperature 1 when greedy), before top_k, top_p and min_p cut the set that is drawn from.
    A token in `stop_ids` ends the action and stays in it; a string in `stop_strings` ends it with the token that
    completes the string, which stays too.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 256
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """ids [A] int32, logprobs [A] float32, versions [A] int32 (the weights' version that sampled each token).

    routing [P + A, layers, k] int16: the experts chosen at each position, the prompt's included; -1 where none was,
    which the last sampled token never needs. None for a dense policy, or where the engine does not record it.
    """

    ids: Ids
    logprobs: Floats
    versions: Ids
    stop_reason: SampleStop
    routing: Routing | None = None


class Engine(Protocol):
    """Samples for any number of requests at once. One engine serves one policy.

    `context` is the most tokens (prompt and action together) one request may have.
    `version` is the version of the weights now loaded.
    """

    context: int
    version: int
    has_logprobs: bool

    async def sample(self, prompt_ids: Sequence[int] | Ids, params: SamplingParams, *, key: tuple = ()) -> Sample:
        """Sample one action. `key` orders requests that wait together (task index, member, turn).

        Raises ContextOverflow when the prompt leaves no room for a token.
        """
        ...

    async def load_weights(self, version: int) -> None:
        """The learner's weights have changed: from now on sample with them, and forget every cached prefix."""
        ...

    def episode_opened(self) -> None:
        """One more episode will send requests (see the local engine's deterministic schedule)."""
        ...

    def episode_closed(self) -> None:
        """That episode will send no more."""
        ...

    async def close(self) -> None: ...
