"""From a checked recipe to the parts that run it: policy, engine, runner, tasks, evaluation sets."""

from __future__ import annotations

import copy
import functools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from renma.agents import PARSERS, RENDERERS
from renma.agents.agent import LanguageAgent
from renma.agents.base import Agent
from renma.environments import DEMONSTRATORS, ENVIRONMENTS
from renma.environments.base import Environment
from renma.environments.demonstrators import Demonstrator
from renma.environments.transcripts import transcripts
from renma.errors import DataError, RecipeError
from renma.event_loop import as_coroutine, run_to_end
from renma.inference import ENGINES
from renma.inference.base import Engine, SamplingParams
from renma.inference.pool import PolicyPool
from renma.learning.lora import apply_lora
from renma.models.policy import Policy, load_policy
from renma.parts import build, checked_options
from renma.recipe import PretrainedModel, Recipe, SamplingSection
from renma.rewards.base import NamedReward, build_rewards
from renma.rollout.demonstrations import ScriptedEngine, demonstrating
from renma.rollout.episode import EpisodeRules
from renma.rollout.runner import MakeAgent, Runner
from renma.seeding import seed_for
from renma.tasks import TASKS
from renma.tasks.base import TaskSource
from renma.tasks.order import TaskOrder
from renma.types import Group, Message, Task

T = TypeVar("T")
TRANSCRIPTS = 2000  # enough text for a small tokenizer, and for the tokens a policy may need


@dataclass(frozen=True, slots=True)
class EvaluationTasks:
    name: str
    tasks: Sequence[Task]


@dataclass(slots=True)
class Parts:
    """What a recipe's run is made of. `runner` samples for training, `evaluator` for evaluation, `greedy` the single
    greedy trajectory a baseline needs; all over one engine, but that a `pool` with older policies may sample instead
    for training. preferences: recorded pairs, where the recipe has any."""

    recipe: Recipe
    policy: Policy
    engine: Engine
    tasks: TaskSource
    order: TaskOrder
    evaluation: list[EvaluationTasks]
    runner: Runner
    evaluator: Runner
    greedy: Runner
    renderer: Any
    max_turns: int
    pool: PolicyPool | None = None
    preferences: Sequence[Group] | None = None

    def task_at(self, position: int) -> Task:
        """The task at a position of the run's endless order."""
        return self.tasks[self.order.index_at(position)]

    async def closing(self, work: Awaitable[T]) -> T:
        """The result of `work`; the engine is closed after it, and with it the processes that an engine started."""
        try:
            return await work
        finally:
            await self.engine.close()

    def demonstrator(self) -> Runner:
        """A runner whose actions a demonstrator writes (the recipe's cold start)."""
        section = self.recipe.cold_start
        assert section is not None
        demonstrator: Demonstrator = build(DEMONSTRATORS, section.demonstrator, "cold_start.demonstrator")
        agents = demonstrating(self.runner.make_agent, demonstrator, self.renderer.encode_action)
        quiet: Engine = ScriptedEngine(self.renderer.encode_action, context=self.engine.context)
        return Runner(quiet, self.runner.make_environment, agents, self.runner.rules, run_seed=self.recipe.seed)


def assemble(recipe: Recipe, *, policy_folder: Path | None = None) -> Parts:
    """Make every part. `policy_folder`: take the policy, adapters merged, from this folder (a checkpoint's) instead of
    the recipe's.

    Data and parts are made before the model is loaded, so that a mistake in them costs no waiting.
    """
    tasks = build_tasks(recipe)
    evaluation = build_evaluation(recipe)
    make_environment = environment_maker(recipe)
    max_turns = check_environment(make_environment(), recipe)
    rewards = build_rewards(recipe.rewards)
    model = recipe.model
    if policy_folder is not None:
        model = PretrainedModel(source=str(policy_folder), dtype=model.dtype, device=model.device)
    policy = load_policy(model, texts=lambda: training_texts(recipe, tasks), seed=seed_for(recipe.seed, "model"))
    if model.lora is not None:
        policy.model = apply_lora(policy.model, model.lora)
    return assemble_with(recipe, policy, tasks, evaluation, make_environment, max_turns, rewards)


def assemble_with(
    recipe: Recipe,
    policy: Policy,
    tasks: TaskSource,
    evaluation: list[EvaluationTasks],
    make_environment: Callable[[], Environment],
    max_turns: int,
    rewards: Sequence[NamedReward],
) -> Parts:
    rollout = recipe.rollout

    def engine_of(model: Any) -> Engine:
        engine: Engine = build(ENGINES, rollout.engine, "rollout.engine", policy=policy, model=model, rollout=rollout)
        return engine

    engine = engine_of(policy.model)
    pool = cross_policy_pool(recipe, engine, policy.model, engine_of)
    renderer = build(RENDERERS, recipe.agent.renderer, "agent.renderer", tokenizer=policy.tokenizer)
    rules = EpisodeRules(rollout.max_turns, rollout.retries, rollout.episode_seconds)

    latest: Engine = engine if pool is None else pool.latest

    def runner(sampling: SamplingSection, sampler: Engine) -> Runner:
        agents = agent_maker(recipe, policy, renderer, sampling)
        return Runner(
            sampler,
            make_environment,
            agents,
            rules,
            rewards,
            recipe.seed,
            concurrency=rollout.slots,
            reward_workers=rollout.reward_workers,
        )

    check_prompts(recipe, tasks, renderer, engine.context)
    longest = recipe.sampling.max_tokens
    measured = SamplingSection(temperature=recipe.evaluation.temperature, max_tokens=longest)
    return Parts(
        recipe=recipe,
        policy=policy,
        engine=pool or engine,
        tasks=tasks,
        order=TaskOrder(len(tasks), recipe.seed),
        evaluation=evaluation,
        runner=runner(recipe.sampling, pool or engine),
        evaluator=runner(measured, latest),
        greedy=runner(SamplingSection(temperature=0.0, max_tokens=longest), latest),
        renderer=renderer,
        max_turns=max_turns,
        pool=pool,
    )


def cross_policy_pool(
    recipe: Recipe, current: Engine, model: Any, engine_of: Callable[[Any], Engine]
) -> PolicyPool | None:
    """The current policy and a snapshot of an older one behind one engine, where the recipe asks for it."""
    section = recipe.rollout.cross_policy
    if section is None:
        return None
    snapshot = copy.deepcopy(model).requires_grad_(False)
    return PolicyPool(
        current,
        engine_of(snapshot),
        model,
        snapshot,
        seed=recipe.seed,
        mode=section.mode,
        stale_share=section.stale_share,
        refresh_every=section.refresh_every,
    )


def check_prompts(recipe: Recipe, tasks: TaskSource, renderer: Any, context: int) -> None:
    """Raise RecipeError when the first tasks' prompts leave no room for an action: every episode would end at once."""
    count = min(len(tasks), 16)
    lengths = [len(renderer.start([Message("user", tasks[i].prompt)])) for i in range(count)]
    long = sum(length >= context for length in lengths)
    if long:
        raise RecipeError(
            f"{long / count:.0%} of the first {count} tasks have a prompt that fills the context: up to {max(lengths)} "
            f"tokens, the model's context is {context}; shorten the prompt or header, or take a longer context"
        )


def check_environment(environment: Environment, recipe: Recipe) -> int:
    """The most turns of an episode, from an environment made for this one look and closed again.

    Raises RecipeError when episodes would run side by side in an environment that does not bear it.
    """
    closing = environment.close()
    if closing is not None:
        run_to_end(as_coroutine(closing))
    if not environment.thread_safe and (recipe.rollout.slots > 1 or recipe.training.staleness):
        raise RecipeError(
            f"environment {recipe.environment.type!r} is not thread-safe: two of its episodes in one process would "
            "disturb each other; set rollout.slots=1 and training.staleness=0, so that one runs at a time"
        )
    return recipe.rollout.max_turns or environment.max_turns


def build_tasks(recipe: Recipe) -> TaskSource:
    tasks: TaskSource = build(TASKS, recipe.tasks, "tasks")
    if len(tasks) == 0:
        raise DataError("tasks: the source has no task; check its path and filters")
    return tasks


def build_evaluation(recipe: Recipe) -> list[EvaluationTasks]:
    sets = []
    for position, section in enumerate(recipe.evaluation.sets):
        source: TaskSource = build(TASKS, section.source, f"evaluation.sets.{position}.source")
        count = len(source) if section.limit is None else min(section.limit, len(source))
        if count == 0:
            raise DataError(f"evaluation.sets.{position}: the source has no task; check its path and filters")
        sets.append(EvaluationTasks(section.name, [source[i] for i in range(count)]))
    return sets


def environment_maker(recipe: Recipe) -> Callable[[], Environment]:
    """Makes a fresh environment each time; the options are checked once, here."""
    factory: Callable[..., Environment] = ENVIRONMENTS[recipe.environment.type]
    options = checked_options(ENVIRONMENTS, recipe.environment, "environment")
    return functools.partial(factory, **options)


def agent_maker(recipe: Recipe, policy: Policy, renderer: Any, sampling: SamplingSection) -> MakeAgent:
    parser = build(PARSERS, recipe.agent.parser, "agent.parser", tokenizer=policy.tokenizer)
    params = SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=sampling.max_tokens,
    )

    def make(
        engine: Engine, task: Task, member: int, tools: list[dict[str, Any]], seeds: Callable[[int], int], key: tuple
    ) -> Agent:
        return LanguageAgent(engine, policy.tokenizer, renderer, parser, params, tools=tools, seeds=seeds, key=key)

    return make


def training_texts(recipe: Recipe, tasks: TaskSource) -> list[str]:
    """Text of the recipe's own tasks: what a tokenizer is trained on, and what names the tokens a policy may need."""
    count = min(len(tasks), TRANSCRIPTS)
    header = [str(text) for name, text in recipe.agent.renderer.options.items() if name == "header"]
    if recipe.cold_start is None:
        return header + [tasks[i].prompt + "\n" for i in range(count)]
    demonstrator: Demonstrator = build(DEMONSTRATORS, recipe.cold_start.demonstrator, "cold_start.demonstrator")
    return header + transcripts([tasks[i] for i in range(count)], environment_maker(recipe), demonstrator, recipe.seed)
