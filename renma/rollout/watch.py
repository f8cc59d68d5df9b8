"""`renma rollout`: watch an agent act in the terminal, what it wrote (trained) apart from what it saw (observed)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from renma.errors import RecipeError
from renma.learning.rows import rows_of
from renma.rollout.store import trajectory_json
from renma.training.setup import Parts
from renma.training.sources import open_source
from renma.types import Task, Trajectory

TRAINED = "bold green"
OBSERVED = "dim"


def watch(
    source: str,
    recipe: str | None,
    overrides: Sequence[str],
    *,
    episodes: int = 1,
    split: str | None = None,
    first: int = 0,
    temperature: float = 1.0,
    tokens: bool = False,
    jsonl: bool = False,
) -> list[Trajectory]:
    """Run and print episodes. split: an evaluation set's name; None: the training tasks."""
    parts = open_source(source, recipe, overrides, {"evaluation.temperature": temperature})
    tasks = chosen_tasks(parts, split, first, episodes)
    groups = asyncio.run(parts.closing(parts.evaluator.groups(tasks, 1, first=first, purpose="watch")))
    trajectories = [t for group in groups for t in group.trajectories]
    console = Console()
    for trajectory in trajectories:
        if jsonl:
            print(trajectory_json(trajectory))
        else:
            show(trajectory, parts, console, tokens)
    return trajectories


def chosen_tasks(parts: Parts, split: str | None, first: int, count: int) -> list[Task]:
    if split is None:
        return [parts.task_at(first + i) for i in range(count)]
    sets = {chosen.name: chosen.tasks for chosen in parts.evaluation}
    if split not in sets:
        raise RecipeError(f"there is no evaluation set {split!r}; the recipe has {', '.join(sets) or 'none'}")
    return list(sets[split][first : first + count])


def show(trajectory: Trajectory, parts: Parts, console: Console, tokens: bool = False) -> None:
    """Print one episode. Every token is shown once, in order, in the colour of what it is to the learner."""
    tokenizer = parts.policy.tokenizer
    console.rule(f"{trajectory.task.family}/{trajectory.task.id}", style="cyan")
    for row in rows_of(trajectory, 0, None, demonstration=True) if trajectory.trainable else []:
        if tokens:
            _token_table(row, tokenizer, console)
            continue
        text = Text()
        start = 0
        for end in range(1, len(row.ids) + 1):
            if end == len(row.ids) or bool(row.trained[end]) != bool(row.trained[start]):
                piece = tokenizer.decode(row.ids[start:end].tolist(), skip_special_tokens=False)
                text.append(str(piece), style=TRAINED if row.trained[start] else OBSERVED)
                start = end
        console.print(text)
    if trajectory.error:
        console.print(f"error: {trajectory.error}", style="red", markup=False)
    verdict = {True: "solved", False: "not solved", None: "no verdict"}[trajectory.success]
    parts_of = {**trajectory.rewards}
    for step in trajectory.steps:
        for name, value in step.reward.items():
            parts_of[name] = parts_of.get(name, 0.0) + value
    rewards = ", ".join(f"{name} {value:g}" for name, value in parts_of.items()) or "0"
    console.print(
        f"{verdict} · return {trajectory.ret:g} ({rewards}) · {len(trajectory.steps)} turns, "
        f"{trajectory.sampled_tokens} tokens · {trajectory.status}: {trajectory.stop_reason} · answer wanted: "
        f"{trajectory.task.answer}",
        style="cyan",
        markup=False,
        highlight=False,
    )


def _token_table(row: object, tokenizer: object, console: Console) -> None:
    ids, trained, logprobs = row.ids, row.trained, row.logprobs  # type: ignore[attr-defined]
    for position, (token, learned, logprob) in enumerate(zip(ids, trained, logprobs, strict=True)):
        piece = tokenizer.decode([int(token)], skip_special_tokens=False)  # type: ignore[attr-defined]
        note = f"logprob {logprob:8.4f}" if learned else "observed"
        console.print(
            Text(f"{position:5d} {int(token):7d} {piece!r:24s} {note}", style=TRAINED if learned else OBSERVED)
        )
