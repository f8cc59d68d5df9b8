"""Multi-turn episodes with transformers' `generate`, for the `rollout_func` of TRL's GRPOTrainer.

The environment, the parser and the renderer are Renma's own, so the episodes are the same work token by token. What a
user of TRL can do about speed without writing an engine is done:

- the header is computed once and each task's question once, then the cache is repeated for the members of the group;
- the cache is kept from turn to turn: a token's keys and values are never computed twice;
- all members generate in one batch; those whose episode is over leave it before the next turn;
- an action stops at any token whose text holds the stop (a list of end ids; `stop_strings` decodes at every token).

Within a turn a row that is done waits for the longest, as `generate` has it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig

from renma.agents.parsers.plain import PlainParser
from renma.agents.renderers.encoding import decode
from renma.agents.renderers.plain import PlainRenderer
from renma.environments.base import as_observation
from renma.environments.calculator import CalculatorEnvironment
from renma.types import StepResult, Task


@dataclass(frozen=True, slots=True)
class Format:
    """What a recipe says of its episodes; options as in the recipe. context: the most tokens of prompt and action."""

    group_size: int
    max_turns: int
    max_tokens: int
    temperature: float
    context: int
    renderer: dict[str, Any] = field(default_factory=dict)
    parser: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Episode:
    """One attempt. `completion` is all that follows the first prompt; `sampled` is 1 at the tokens the policy wrote."""

    task: Task
    environment: CalculatorEnvironment
    prompt: list[int]
    completion: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    turns: int = 0
    success: bool = False
    over: bool = False

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.completion)

    def add(self, ids: Sequence[int], sampled: bool) -> None:
        self.completion += ids
        self.sampled += [int(sampled)] * len(ids)


@dataclass(slots=True)
class Batch:
    """The episodes that go on, one row each. ids, mask [rows, columns]: mask is 0 at padding, which stands before a
    question or an observation and after an action; the last column is real in every row. cache: all columns but the
    last, or but those not computed yet."""

    episodes: list[Episode]
    ids: Tensor
    mask: Tensor
    cache: DynamicCache


class Rollout:
    """Runs groups of episodes with a causal model and its tokenizer. autocast: the compute type; None: the model's."""

    def __init__(self, model: Any, tokenizer: Any, form: Format, autocast: torch.dtype | None = None) -> None:
        self.model, self.tokenizer, self.form = model, tokenizer, form
        self.renderer = PlainRenderer(tokenizer, **form.renderer)
        self.parser = PlainParser(**form.parser)
        self.stops = torch.tensor(stop_ids(tokenizer, self.renderer), dtype=torch.int64)
        self.pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        self._autocast = autocast
        self._loop = asyncio.Runner()

    def run(self, tasks: Sequence[Task]) -> list[Episode]:
        """Episodes of `group_size` members for each task, in order of the tasks."""
        with torch.no_grad(), torch.autocast("cpu", self._autocast, enabled=self._autocast is not None):
            batch = self._opened(tasks)
            episodes = list(batch.episodes)
            for turn in range(self.form.max_turns):
                actions = self._act(batch)
                self._answer(batch, actions, last=turn == self.form.max_turns - 1)
                if not batch.episodes:
                    break
        return episodes

    def _opened(self, tasks: Sequence[Task]) -> Batch:
        episodes = [self._episode(task) for task in tasks for _ in range(self.form.group_size)]
        prompts = [episode.prompt for episode in episodes[:: self.form.group_size]]
        shared = common_prefix(prompts)
        rest, rest_mask = padded([prompt[shared:] for prompt in prompts], self.pad)
        ids = torch.cat([torch.tensor([prompt[:shared] for prompt in prompts], dtype=torch.int64), rest], dim=1)
        mask = torch.cat([torch.ones(len(prompts), shared, dtype=torch.int64), rest_mask], dim=1)
        cache = DynamicCache(config=self.model.config)
        if shared:
            self.model(input_ids=ids[:1, :shared], cache=cache, use_cache=True, logits_to_keep=1)
            cache.batch_repeat_interleave(len(prompts))
        if rest.shape[1] > 1:
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, shared:-1]
            self.model(
                input_ids=rest[:, :-1],
                attention_mask=mask[:, :-1],
                position_ids=positions,
                cache=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        size = self.form.group_size
        if cache.get_seq_length():
            cache.batch_repeat_interleave(size)
        return Batch(episodes, ids.repeat_interleave(size, 0), mask.repeat_interleave(size, 0), cache)

    def _episode(self, task: Task) -> Episode:
        environment = CalculatorEnvironment(**self.form.environment)
        observation: Any = environment.reset(task)
        return Episode(task, environment, self.renderer.start(as_observation(observation).messages))

    def _act(self, batch: Batch) -> list[list[int]]:
        """One action of every row; the batch grows by the columns that were sampled."""
        room = [self.form.context - episode.length for episode in batch.episodes]
        draws = {"do_sample": True, "temperature": self.form.temperature, "top_p": 1.0, "top_k": 0}
        settings = GenerationConfig(
            **(draws if self.form.temperature > 0 else {"do_sample": False}),
            max_new_tokens=min(self.form.max_tokens, max(room)),
            eos_token_id=self.stops.tolist(),
            pad_token_id=self.pad,
            use_cache=True,
            disable_compile=True,
        )
        before = batch.ids.shape[1]
        batch.ids = self.model.generate(
            input_ids=batch.ids, attention_mask=batch.mask, cache=batch.cache, generation_config=settings
        )
        new = batch.ids[:, before:]
        ends = torch.isin(new, self.stops)
        lengths = torch.where(ends.any(1), ends.int().argmax(1) + 1, new.shape[1]).tolist()
        lengths = [min(length, self.form.max_tokens, room[row]) for row, length in enumerate(lengths)]
        written = torch.arange(new.shape[1])[None, :] < torch.tensor(lengths)[:, None]
        batch.mask = torch.cat([batch.mask, written.long()], dim=1)
        return [row[:length] for row, length in zip(new.tolist(), lengths, strict=True)]

    def _answer(self, batch: Batch, actions: list[list[int]], last: bool) -> None:
        """The environments' answers; rows whose episode goes on stay, with what they are shown as new columns."""
        results = self._loop.run(self._stepped(batch.episodes, actions))
        going, shown = [], []
        for row, (episode, ids, result) in enumerate(zip(batch.episodes, actions, results, strict=True)):
            before = [*episode.prompt, *episode.completion]
            episode.add(ids, sampled=True)
            episode.turns += 1
            episode.success = bool(result.info.get("success", episode.success))
            episode.over = result.terminated or result.truncated or last
            if episode.over:
                continue
            messages = as_observation(result.observation).messages
            suffix = self.renderer.extend((), before, ids, messages)[len(before) + len(ids) :]
            if episode.length + len(suffix) >= self.form.context:
                episode.over = True  # the next prompt fills the context
                continue
            episode.add(suffix, sampled=False)
            going.append(row)
            shown.append(suffix)
        batch.episodes = [batch.episodes[row] for row in going]
        if not going:
            return
        if len(going) < len(batch.ids):
            chosen = torch.tensor(going)
            batch.ids, batch.mask = batch.ids[chosen], batch.mask[chosen]
            batch.cache.batch_select_indices(chosen)
        columns, mask = padded(shown, self.pad)
        batch.ids, batch.mask = torch.cat([batch.ids, columns], dim=1), torch.cat([batch.mask, mask], dim=1)

    async def _stepped(self, episodes: Sequence[Episode], actions: Sequence[list[int]]) -> list[StepResult]:
        return await asyncio.gather(*(self._step(e, ids) for e, ids in zip(episodes, actions, strict=True)))

    async def _step(self, episode: Episode, ids: list[int]) -> StepResult:
        body = ids[:-1] if ids and ids[-1] in self.renderer.stop_ids else ids
        return await episode.environment.step(self.parser.parse(ids, decode(self.tokenizer, body)))


def given_to_trl(episodes: Sequence[Episode]) -> dict[str, list[Any] | None]:
    """What a `rollout_func` returns. env_mask: 1 where the policy sampled. logprobs None: the old policy is the current
    one (one update a batch), so TRL does not look at them, and generate need not make them."""
    return {
        "prompt_ids": [episode.prompt for episode in episodes],
        "completion_ids": [episode.completion for episode in episodes],
        "env_mask": [episode.sampled for episode in episodes],
        "logprobs": None,
        "success": [float(episode.success) for episode in episodes],
    }


def stop_ids(tokenizer: Any, renderer: PlainRenderer) -> list[int]:
    """The tokens that end an action: those of the renderer, and every token whose text holds its stop."""
    if len(renderer.stop) != 1:
        raise ValueError(f"the stop {renderer.stop!r} could span several tokens; this peer takes a single character")
    texts = tokenizer.batch_decode([[index, index] for index in range(len(tokenizer))])  # twice: see StopStrings
    return sorted({index for index, text in enumerate(texts) if renderer.stop in text} | set(renderer.stop_ids))


def common_prefix(rows: Sequence[Sequence[int]]) -> int:
    """How many tokens all rows begin with, leaving at least one of each."""
    count = min(len(row) for row in rows) - 1
    for index in range(count):
        if len({row[index] for row in rows}) > 1:
            return index
    return count


def padded(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """ids and mask [rows, longest], int64, padded on the left."""
    longest = max(len(row) for row in rows)
    ids = [[pad] * (longest - len(row)) + list(row) for row in rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids, dtype=torch.int64), torch.tensor(mask, dtype=torch.int64)
