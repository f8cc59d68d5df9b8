"""What the engines of benchmarks/sampling.py are asked: episodes of fixed lengths, and what they must cost at least.

Every engine gets the same prompts, lengths and observations; what it samples is its own.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

OBSERVATION = 8  # tokens between two turns
TURNS = 4
GROUP = 8


@dataclass(frozen=True, slots=True)
class Episode:
    """prompt: ids. lengths [T]: tokens to sample in each turn. observations [T - 1]: ids after each but the last."""

    prompt: list[int]
    lengths: list[int]
    observations: list[list[int]]


@dataclass(frozen=True, slots=True)
class Job:
    """One scenario. allowed: the ids that may be sampled; None: all."""

    name: str
    episodes: list[Episode]
    allowed: list[int] | None = None

    @property
    def tokens(self) -> int:
        """Tokens to sample."""
        return sum(sum(episode.lengths) for episode in self.episodes)

    @property
    def longest(self) -> int:
        """Positions of the longest episode."""
        return max(
            len(e.prompt) + sum(e.lengths) + sum(len(observation) for observation in e.observations)
            for e in self.episodes
        )

    def without_limit(self) -> Job:
        return replace(self, allowed=None)

    def written(self, path: Path) -> Path:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return path


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much each scenario asks for. requests: of `full` and `tasks`, one job each."""

    requests: tuple[int, ...] = (64, 256)
    length: int = 32
    ragged: int = 192
    ragged_lengths: tuple[int, int] = (4, 400)
    groups: int = 8
    turn_lengths: tuple[int, int] = (8, 32)


QUICK = Sizes(requests=(16,), length=8, ragged=24, ragged_lengths=(4, 40), groups=2, turn_lengths=(4, 8))


def fixed(name: str, prompts: Sequence[list[int]], length: int, allowed: list[int] | None = None) -> Job:
    """One turn of `length` tokens for each prompt."""
    return Job(name, [Episode(prompt, [length], []) for prompt in prompts], allowed)


def ragged(name: str, prompts: Sequence[list[int]], bounds: tuple[int, int], seed: int = 0) -> Job:
    """One turn each; lengths spread evenly over `bounds`, both ends included, in a random order."""
    low, high = bounds
    steps = max(1, len(prompts) - 1)
    lengths = [low + round(i * (high - low) / steps) for i in range(len(prompts))]
    random.Random(seed).shuffle(lengths)
    return Job(name, [Episode(prompt, [length], []) for prompt, length in zip(prompts, lengths, strict=True)])


def turns(name: str, prompts: Sequence[list[int]], bounds: tuple[int, int], ids: Sequence[int], seed: int = 0) -> Job:
    """Groups of GROUP episodes of TURNS turns on each prompt; observations are drawn from `ids`."""
    draw = random.Random(seed)
    episodes = [
        Episode(
            prompt,
            [draw.randint(*bounds) for _ in range(TURNS)],
            [[draw.choice(ids) for _ in range(OBSERVATION)] for _ in range(TURNS - 1)],
        )
        for prompt in prompts
        for _ in range(GROUP)
    ]
    return Job(name, episodes)


def positions_needed(episodes: Iterable[tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]]]) -> int:
    """Positions of prompts that have to be computed, given each episode's (prompts, actions), turn by turn.

    A position is a prefix. Those of first prompts count once for all episodes that have them; of a later prompt only
    what follows the episode's last one and the tokens that decoding computed: of an action, all but the last, which
    goes through the model only when its successor is wanted.
    """
    first: set[int] = set()
    later = 0
    for asked, actions in episodes:
        first.update(prefix_hashes(asked[0]))
        for before, action, prompt in zip(asked, actions, asked[1:], strict=False):
            later += len(prompt) - len(before) - (len(action) - 1)
    return len(first) + later


def prefix_hashes(ids: Sequence[int]) -> list[int]:
    """A number for each prefix of `ids`, equal for equal prefixes."""
    hashes: list[int] = []
    state = 0
    for token in ids:
        state = hash((state, int(token)))
        hashes.append(state)
    return hashes


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """job -> engine -> medians over runs of tokens a second and of every number an engine reported."""
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for run in runs:
        kept = found.setdefault(run["job"], {}).setdefault(run["engine"], {})
        kept.setdefault("tokens_per_second", []).append(run["tokens"] / run["seconds"])
        for key, value in run.items():
            if isinstance(value, int | float):
                kept.setdefault(key, []).append(float(value))
    return {
        job: {
            engine: {key: statistics.median(values) for key, values in kept.items()} | {"runs": len(kept["seconds"])}
            for engine, kept in engines.items()
        }
        for job, engines in found.items()
    }


def ratio(runs: Sequence[dict[str, Any]], job: str, engine: str, over: str) -> float | None:
    """Median over rounds of how many times faster `engine` was than `over` in the same round; None without a pair."""
    rates: dict[int, dict[str, float]] = {}
    for run in runs:
        if run["job"] == job:
            rates.setdefault(run["round"], {})[run["engine"]] = run["tokens"] / run["seconds"]
    pairs = [pair[engine] / pair[over] for pair in rates.values() if engine in pair and over in pair]
    return statistics.median(pairs) if pairs else None
