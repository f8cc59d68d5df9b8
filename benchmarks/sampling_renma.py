"""Renma's side of benchmarks/sampling.py: the recipe's policy and prompts, and its engine given a job's episodes."""

from __future__ import annotations

import asyncio
import inspect
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.sampling_jobs import Job, Sizes, fixed, positions_needed, ragged, turns
from renma.environments.base import as_observation
from renma.event_loop import as_coroutine, run_to_end
from renma.inference.base import SamplingParams
from renma.inference.local import LocalEngine
from renma.models.policy import Policy, save_policy
from renma.recipe import Recipe, ScratchModel
from renma.recipe_load import load_recipe
from renma.recipes import find_recipe
from renma.seeding import seed_for
from renma.training.setup import Parts, assemble

# The ragged lengths need 400 positions more than the longest prompt; the quickstart's own context is for its episodes.
SCRATCH = ("model.context=512",)


def parts_of(recipe_name: str) -> Parts:
    """The recipe's parts. A policy made from scratch gets a context that the ragged lengths fit in."""
    recipe: Recipe = load_recipe(find_recipe(recipe_name))
    if isinstance(recipe.model, ScratchModel):
        recipe = load_recipe(find_recipe(recipe_name), SCRATCH)
    return assemble(recipe)


def all_tokens(policy: Policy) -> Policy:
    """The same policy without a limit to what it can emit."""
    return replace(policy, output_ids=None)


def model_folder(parts: Parts, folder: Path) -> Path:
    """The policy as a folder that transformers and vllm open."""
    place = folder / f"{parts.recipe.name}-{str(parts.policy.compute_dtype).removeprefix('torch.')}"
    if not place.exists():
        save_policy(all_tokens(parts.policy), place)
    return place


def prompts_of(parts: Parts, count: int) -> list[list[int]]:
    """First prompts of the recipe's first `count` tasks, as its agent would send them."""
    prompts = []
    for position in range(count):
        environment = parts.runner.make_environment()
        began = environment.reset(parts.task_at(position))
        observation = as_observation(run_to_end(as_coroutine(began)) if inspect.isawaitable(began) else began)
        prompts.append([int(token) for token in parts.renderer.start(observation.messages, environment.tools)])
    return prompts


def jobs_of(parts: Parts, sizes: Sizes) -> list[Job]:
    """Every scenario for this recipe's policy; `tasks` only where the recipe limits what the policy can emit."""
    prompts = prompts_of(parts, max(*sizes.requests, sizes.ragged))
    limit = parts.policy.output_ids
    writable = range(parts.policy.model.config.get_text_config().vocab_size) if limit is None else limit.tolist()
    jobs = [fixed(f"full-{count}", prompts[:count], sizes.length) for count in sizes.requests]
    if limit is not None:
        jobs += [fixed(f"tasks-{count}", prompts[:count], sizes.length, limit.tolist()) for count in sizes.requests]
    jobs.append(ragged("ragged", prompts[: sizes.ragged], sizes.ragged_lengths))
    jobs.append(turns("turns", prompts[: sizes.groups], sizes.turn_lengths, list(writable)))
    return jobs


class RenmaSampler:
    """Renma's engine over `policy`, its buffers kept between jobs, its cache forgotten before each.

    Episodes run as in a rollout: as many workers as slots, each with one episode open at a time.
    """

    def __init__(self, policy: Policy, slots: int, context: int, deterministic: bool = True) -> None:
        self.slots = slots
        self.engine = LocalEngine(
            policy.model,
            policy.tokenizer,
            output_ids=policy.output_ids,
            slots=slots,
            context=context,
            deterministic=deterministic,
        )
        self._version = 0

    def run(self, job: Job) -> dict[str, Any]:
        """seconds, tokens, mean_logprob; occupancy: share of slots busy in a round of decoding; occupancy_waiting:
        the same as long as an episode waited for a slot; computed, needed, whole: positions of prompts that went
        through the model, that had to (sampling_jobs.positions_needed), and all; prompts: different first prompts.
        """
        return asyncio.run(self._run(job))

    def close(self) -> None:
        asyncio.run(self.engine.close())

    async def _run(self, job: Job) -> dict[str, Any]:
        engine = self.engine
        self._version += 1
        await engine.load_weights(self._version)
        before = dict(engine.stats)
        full: dict[str, int | float] = {}
        waiting = list(enumerate(job.episodes))[::-1]
        asked: list[list[list[int]]] = [[] for _ in job.episodes]
        sampled: list[list[list[int]]] = [[] for _ in job.episodes]
        logprobs = 0.0

        async def worker() -> None:
            nonlocal logprobs
            engine.episode_opened()
            try:
                while waiting:
                    i, episode = waiting.pop()
                    if not waiting:
                        full.update(engine.stats)
                    prompt = list(episode.prompt)
                    for turn, length in enumerate(episode.lengths):
                        params = SamplingParams(max_tokens=length, seed=seed_for(self._version, i, turn))
                        sample = await engine.sample(prompt, params, key=(i, turn))
                        action = sample.ids.tolist()
                        asked[i].append(prompt)
                        sampled[i].append(action)
                        logprobs += float(sample.logprobs.sum())
                        if turn < len(episode.observations):
                            prompt = [*prompt, *action, *episode.observations[turn]]
            finally:
                engine.episode_closed()

        began = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(min(self.slots, len(job.episodes)))))
        seconds = time.perf_counter() - began
        tokens = sum(len(action) for actions in sampled for action in actions)
        return {
            "seconds": seconds,
            "tokens": tokens,
            "mean_logprob": logprobs / tokens,
            "occupancy": occupancy(before, engine.stats, self.slots),
            "occupancy_waiting": occupancy(before, full, self.slots),
            "computed": engine.stats["computed_positions"] - before["computed_positions"],
            "needed": positions_needed(zip(asked, sampled, strict=True)),
            "prompts": len({tuple(episode.prompt) for episode in job.episodes}),
            "whole": sum(len(prompt) for prompts in asked for prompt in prompts),
        }


def occupancy(before: dict[str, int | float], after: dict[str, int | float], slots: int) -> float:
    """Share of slots that were busy, over the rounds of decoding between two readings of the engine's counters; NaN
    without one."""
    rounds = after["rounds"] - before["rounds"]
    busy = after["busy_slot_rounds"] - before["busy_slot_rounds"]
    return busy / (rounds * slots) if rounds else float("nan")
