"""What the engine must not compute twice, and the slots that must not stand empty."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from renma.inference import SamplingParams
from renma.inference.local import LocalEngine
from tests.inference.tiny_models import SIZES, VOCABULARY, make

OBSERVATION = 8


@dataclass
class Played:
    """One episode: the prompt of each turn and what was sampled in it."""

    opening: list[int]
    lengths: list[int]
    prompts: list[list[int]] = field(default_factory=list)
    actions: list[list[int]] = field(default_factory=list)

    @property
    def decoded(self) -> int:
        """Positions that went through the model to sample a successor; the first token's comes from the prompt."""
        return sum(len(action) - 1 for action in self.actions)


def words(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(4, VOCABULARY) for _ in range(count)]


def groups(
    draw: random.Random, count: int, size: int, turns: int, longest: int = 4, header: int = 40, question: int = 6
) -> list[Played]:
    """`count` groups of `size` episodes: a header common to all, a question common to the group, whose first token no
    other group has."""
    opening = words(draw, header)
    starts = draw.sample(range(4, VOCABULARY), count)
    prompts = [[*opening, start, *words(draw, question - 1)] for start in starts]
    return [Played(prompt, [draw.randint(1, longest) for _ in range(turns)]) for prompt in prompts for _ in range(size)]


def play(engine: LocalEngine, episodes: Sequence[Played], open_at_once: int) -> None:
    """Run the episodes as a rollout does: a worker for each that may be open, which opens the next itself."""
    waiting = list(enumerate(episodes))[::-1]

    async def worker() -> None:
        engine.episode_opened()
        try:
            while waiting:
                i, episode = waiting.pop()
                prompt = list(episode.opening)
                for turn, length in enumerate(episode.lengths):
                    seed = 1000 * i + turn
                    sample = await engine.sample(prompt, SamplingParams(max_tokens=length, seed=seed), key=(i, turn))
                    episode.prompts.append(prompt)
                    episode.actions.append(sample.ids.tolist())
                    prompt = [*prompt, *episode.actions[-1], *words(random.Random(seed), OBSERVATION)]
        finally:
            engine.episode_closed()

    async def main() -> None:
        await asyncio.gather(*(worker() for _ in range(min(open_at_once, len(episodes)))))

    asyncio.run(main())


def needed(episodes: Sequence[Played]) -> int:
    """How many positions of prompts have to be computed, a position being a prefix: those of first prompts, once for
    all who share them; of an episode's later prompts those that are in no earlier one and were not decoded (an action's
    last token never is: nobody asked for its successor)."""
    openings: set[tuple[int, ...]] = set()
    later = 0
    for episode in episodes:
        known = prefixes(episode.prompts[0])
        openings |= known
        for prompt, action, following in zip(episode.prompts, episode.actions, episode.prompts[1:], strict=False):
            known |= prefixes(prompt + action[:-1])
            later += len(prefixes(following) - known)
            known |= prefixes(following)
    return len(openings) + later


def least(episodes: Sequence[Played]) -> int:
    """The same without any that some other episode happened to decode: no engine can do with fewer."""
    wanted: set[tuple[int, ...]] = set()
    decoded: set[tuple[int, ...]] = set()
    for episode in episodes:
        for prompt, action in zip(episode.prompts, episode.actions, strict=True):
            wanted |= prefixes(prompt)
            decoded |= prefixes(prompt + action[:-1]) - prefixes(prompt)
    return len(wanted - decoded)


def prefixes(ids: Sequence[int]) -> set[tuple[int, ...]]:
    return {tuple(ids[:end]) for end in range(1, len(ids) + 1)}


def test_needed_counts_each_prefix_once_and_none_that_was_decoded() -> None:
    # 1, 12, 123 as prompt; 1237 by decoding; 12378 and 123789 as prompt.
    one = Played([1, 2, 3], [2, 1], prompts=[[1, 2, 3], [1, 2, 3, 7, 8, 9]], actions=[[7, 8], [5]])
    assert needed([one]) == least([one]) == 5
    other = Played([1, 2, 4], [1], prompts=[[1, 2, 4]], actions=[[7]])
    assert needed([one, other]) == least([one, other]) == 6
    twice = Played([1, 2, 3], [1, 1], prompts=[[1, 2, 3], [1, 2, 3, 7, 9]], actions=[[7], [6]])
    assert (needed([one, twice]), least([one, twice])) == (7, 6)  # 1237 is decoded by the one, prompt of the other
    assert (one.decoded, other.decoded) == (1, 0)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_episodes_of_several_turns_compute_each_position_once(name: str, deterministic: bool, tokenizer: Any) -> None:
    episodes = groups(random.Random(1), count=4, size=4, turns=3)
    engine = LocalEngine(make(name), tokenizer, slots=len(episodes), deterministic=deterministic)
    play(engine, episodes, open_at_once=len(episodes))
    assert least(episodes) <= engine.stats["computed_positions"] <= needed(episodes)
    assert engine.stats["prompt_positions"] == sum(len(prompt) for e in episodes for prompt in e.prompts)
    assert engine.stats["reused_positions"] + engine.stats["computed_positions"] == engine.stats["prompt_positions"]
    sampled = sum(len(action) for e in episodes for action in e.actions)
    assert engine.stats["sampled_tokens"] == sampled


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 999), count=st.integers(1, 5), size=st.integers(1, 5), turns=st.integers(1, 3))
def test_any_groups_compute_each_position_once(seed: int, count: int, size: int, turns: int, tokenizer: Any) -> None:
    episodes = groups(random.Random(seed), count, size, turns)
    engine = LocalEngine(make("llama"), tokenizer, slots=count * size + 3)
    play(engine, episodes, open_at_once=len(episodes))
    assert least(episodes) <= engine.stats["computed_positions"] <= needed(episodes)


@pytest.mark.parametrize("slots", [2, 3, 5, 8])
def test_with_few_slots_an_open_episode_keeps_what_is_computed(slots: int, tokenizer: Any) -> None:
    """Of a prompt that is cached whole, the last position is computed again: its logits are wanted and not kept."""
    episodes = groups(random.Random(2), count=5, size=4, turns=3)
    engine = LocalEngine(make("llama"), tokenizer, slots=slots)
    play(engine, episodes, open_at_once=slots)
    late = len(episodes) - 5  # members that may have come after the prompt was computed
    assert least(episodes) <= engine.stats["computed_positions"] <= needed(episodes) + late


def test_the_prompt_of_a_group_goes_through_the_model_once_however_large_the_group(tokenizer: Any) -> None:
    counts = []
    for size in (1, 2, 16):
        episodes = groups(random.Random(3), count=1, size=size, turns=1)
        engine = LocalEngine(make("qwen3"), tokenizer, slots=16)
        play(engine, episodes, open_at_once=16)
        counts.append(engine.stats["computed_positions"])
    assert counts == [46, 46, 46]


def test_new_weights_compute_every_position_once_more(tokenizer: Any) -> None:
    engine = LocalEngine(make("llama"), tokenizer, slots=8)
    first = groups(random.Random(4), count=2, size=4, turns=2)
    play(engine, first, open_at_once=8)
    before = engine.stats["computed_positions"]
    asyncio.run(engine.load_weights(1))
    second = [Played(list(e.opening), list(e.lengths)) for e in first]
    play(engine, second, open_at_once=8)
    assert engine.stats["computed_positions"] - before >= least(second)


@pytest.mark.parametrize(("deterministic", "workers", "longest"), [(True, 5, 400), (False, 60, 100)])
def test_slots_are_busy_when_lengths_differ_a_hundredfold(
    deterministic: bool, workers: int, longest: int, tokenizer: Any
) -> None:
    """Lengths from 4 to 400 (or 100), many more requests than slots; the end, when slots run empty, counts too."""
    draw, slots = random.Random(5), 5
    model = LlamaForCausalLM(LlamaConfig(**SIZES | {"num_hidden_layers": 1, "max_position_embeddings": 420}))
    episodes = [Played(words(draw, 3), [draw.randint(4, longest)]) for _ in range(60)]
    engine = LocalEngine(model, tokenizer, slots=slots, context=420, deterministic=deterministic)
    play(engine, episodes, open_at_once=workers)
    assert [len(e.actions[0]) for e in episodes] == [e.lengths[0] for e in episodes]
    assert engine.stats["busy_slot_rounds"] == sum(e.decoded for e in episodes)
    assert engine.stats["busy_slot_rounds"] / (engine.stats["rounds"] * slots) > 0.9
