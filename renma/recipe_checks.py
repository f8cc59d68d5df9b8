"""Checks that need to know the parts a recipe names, and the numbers that follow from it, before anything starts."""

from __future__ import annotations

from renma.agents import PARSERS, RENDERERS
from renma.environments import DEMONSTRATORS, ENVIRONMENTS
from renma.errors import RecipeError
from renma.inference import ENGINES
from renma.learning.losses import traits
from renma.learning.objective import Objective
from renma.parts import checked_options
from renma.preferences import PREFERENCES, SUPPLIED
from renma.recipe import Recipe
from renma.rewards.base import build_rewards
from renma.tasks import TASKS
from renma.training.algorithms import Algorithm, resolve
from renma.training.mismatch import samples_with_int8
from renma.training.reward_stage import check_reward_model


def check_recipe(recipe: Recipe) -> None:
    """Raise RecipeError for the first contradiction found, with the fix."""
    checked_options(TASKS, recipe.tasks, "tasks")
    checked_options(ENVIRONMENTS, recipe.environment, "environment")
    checked_options(RENDERERS, recipe.agent.renderer, "agent.renderer", {"tokenizer"})
    checked_options(PARSERS, recipe.agent.parser, "agent.parser", {"tokenizer"})
    checked_options(ENGINES, recipe.rollout.engine, "rollout.engine", {"policy", "model", "rollout"})
    check_reward_model(recipe.reward_model, build_rewards(recipe.rewards))
    for i, chosen in enumerate(recipe.evaluation.sets):
        checked_options(TASKS, chosen.source, f"evaluation.sets.{i}.source")
    names = [chosen.name for chosen in recipe.evaluation.sets]
    if len(set(names)) != len(names):
        raise RecipeError(f"evaluation.sets: names must differ, got {names}")
    if recipe.cold_start is not None:
        checked_options(DEMONSTRATORS, recipe.cold_start.demonstrator, "cold_start.demonstrator")
    if recipe.preferences is not None:
        if recipe.preferences.type == "sampled":
            raise RecipeError(
                "preferences: 'sampled' pairs are the policy's own, and a resumed run would sample others: leave the "
                "section out, dpo makes a pair of each sampled group; for recorded pairs take type run or jsonl"
            )
        checked_options(PREFERENCES, recipe.preferences, "preferences", set(SUPPLIED))
    if recipe.training.steps:
        _check_training(recipe)


def _check_training(recipe: Recipe) -> None:
    algorithm = resolve(recipe.algorithm)
    rollout, sampling, learner = recipe.rollout, recipe.sampling, recipe.learner
    if rollout.group_size < algorithm.min_group_size:
        raise RecipeError(
            f"rollout.group_size must be >= {algorithm.min_group_size} for {algorithm.name}, got {rollout.group_size}"
        )
    if sampling.temperature == 0:
        raise RecipeError("sampling.temperature 0 is greedy: every member of a group would be the same; use 1.0")
    cut = [name for name, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)) if getattr(sampling, name) != off]
    if cut:
        raise RecipeError(
            f"sampling.{cut[0]}={getattr(sampling, cut[0])}: the learner normalises over all tokens: a cut set would "
            f"make every ratio wrong; leave {cut[0]} at its default for training (evaluation may set it)"
        )
    total = rollout.tasks_per_step * rollout.group_size
    if learner.mini_batch is not None and total % learner.mini_batch:
        divisors = ",".join(str(d) for d in range(1, total + 1) if total % d == 0)
        raise RecipeError(
            f"{total} trajectories per step; mini_batch {learner.mini_batch} does not divide {total}; use {divisors}"
        )
    _check_ratio(recipe, algorithm)
    if samples_with_int8(recipe):
        _check_int8(algorithm)
    _check_experience(recipe, algorithm)


def _check_ratio(recipe: Recipe, algorithm: Algorithm) -> None:
    """Old samples need a ratio, or a correction, that sees their age."""
    objective = Objective(
        algorithm.loss,
        algorithm.aggregate,
        old_logprobs=algorithm.old_logprobs,
        correction=algorithm.correction,
    )
    cross = recipe.rollout.cross_policy
    try:
        objective.check(staleness=max(recipe.training.staleness, cross.refresh_every if cross else 0))
    except RecipeError as error:
        raise RecipeError(f"algorithm: {error}") from None
    if algorithm.old_logprobs == "on_policy" and updates_per_step(recipe) > 1:
        raise RecipeError(
            f"algorithm.old_logprobs=on_policy is for one optimiser step a batch, and there are "
            f"{updates_per_step(recipe)}; leave learner.mini_batch out and learner.epochs at 1"
        )


def _check_int8(algorithm: Algorithm) -> None:
    """Tokens drawn from 8-bit weights are another policy's: the loss must see whose, or a correction make up for it."""
    loss = traits(algorithm.loss)
    sees = loss.against == "behaviour" or (loss.against == "old" and algorithm.old_logprobs == "behaviour")
    if loss.supervised or sees or algorithm.correction is not None:
        return
    how = "or set algorithm.old_logprobs: behaviour, " if loss.against == "old" else ""
    raise RecipeError(
        f"rollout.engine.weights: int8 samples from another policy than the learner's, and {algorithm.name} would take "
        f"the tokens for the learner's own; add algorithm.correction: {{type: token_tis}}, {how}or sample with "
        "weights: own"
    )


def _check_experience(recipe: Recipe, algorithm: Algorithm) -> None:
    """What the algorithm learns from must be there."""
    demonstrations = algorithm.learns_from in ("demonstrations", "samples_and_demonstrations")
    if demonstrations and recipe.cold_start is None:
        raise RecipeError(
            f"algorithm {algorithm.name} learns from demonstrations and the recipe has no demonstrator; "
            "add cold_start.demonstrator (cold_start.demonstrations may be 0: no cold start)"
        )
    if (algorithm.learns_from == "preferences") != (recipe.preferences is not None):
        raise RecipeError(
            "recorded preferences need both the section `preferences` and algorithm.learns_from: preferences; "
            f"this recipe has learns_from: {algorithm.learns_from} and "
            f"{'no' if recipe.preferences is None else 'a'} preferences section"
        )
    if "teacher" in algorithm.needs and recipe.teacher is None:
        raise RecipeError(f"algorithm {algorithm.name} needs a teacher; add teacher: {{source: …}} to the recipe")
    if algorithm.refills and recipe.training.staleness:
        raise RecipeError(
            f"algorithm.refills={algorithm.refills} with training.staleness={recipe.training.staleness}: which tasks "
            "refill a batch would depend on timing; set one of them to 0"
        )
    if algorithm.learns_from == "samples_and_demonstrations" and not traits(algorithm.loss).takes_demonstrations:
        raise RecipeError(
            "learns_from: samples_and_demonstrations needs a loss for both; use loss: {type: hybrid} or preset sft_rl"
        )


def updates_per_step(recipe: Recipe) -> int:
    """Optimiser steps of one training step."""
    total = recipe.rollout.tasks_per_step * recipe.rollout.group_size
    return recipe.learner.epochs * (total // recipe.learner.mini_batch if recipe.learner.mini_batch else 1)


def derived_facts(recipe: Recipe, parameters: int | None = None) -> list[tuple[str, str]]:
    """What the recipe's numbers come to, for the start of a run."""
    rollout, training = recipe.rollout, recipe.training
    total = rollout.tasks_per_step * rollout.group_size
    updates = updates_per_step(recipe)
    facts = [
        ("algorithm", recipe.algorithm.preset),
        ("trajectories per step", f"{rollout.tasks_per_step} tasks x {rollout.group_size} members = {total}"),
        ("optimiser steps per step", str(updates)),
        ("training steps", f"{training.steps} ({training.steps * total} trajectories)"),
        ("sampled tokens per action", f"at most {recipe.sampling.max_tokens}"),
        ("staleness bound", str(training.staleness)),
    ]
    if rollout.engine.type == "vllm":
        facts.append(("engine", "vllm: what is sampled depends on timing in its last bits (docs/engines.md)"))
    if recipe.cold_start is not None:
        cold = recipe.cold_start
        steps = cold.epochs * -(-cold.demonstrations // cold.batch)
        facts.insert(0, ("cold start", f"{cold.demonstrations} demonstrations x {cold.epochs} = {steps} steps"))
    if parameters is not None:
        facts.insert(0, ("parameters", f"{parameters / 1e6:.1f} M"))
    return facts
