"""What credit and loss cost beside the model: 1,024 trajectories x 20 steps x 50 tokens, against forward and backward.

    python benchmarks/bookkeeping.py
    python benchmarks/bookkeeping.py --presets grpo steppo --repeats 9

Bookkeeping is all that happens to a batch but the model's own work: groups to credit and rows (`make_batch`; a critic
that answers at once), flat tokens, a rollout correction, what the loss makes ready, the aggregate's weights, and the
loss itself, forward and backward to the log-probabilities. Model: the quickstart recipe's; the larger the model, the
smaller the share. Its forward and backward are measured on the first rows of the same batch and multiplied by the
number of rows: it takes as long for each pack of rows, of which there are many. Medians of interleaved repeats.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from renma.learning.correction import token_tis
from renma.learning.forward import TreeModel
from renma.learning.objective import Objective
from renma.learning.rows import Row
from renma.learning.tokens import Tokens
from renma.models.scratch import build_llama, llama_config, train_tokenizer
from renma.recipe import LearnerSection, ScratchModel
from renma.recipe_load import load_recipe
from renma.recipes import find_recipe
from renma.training.algorithms import Algorithm, preset
from renma.training.batch import Batch, Sampled, make_batch
from renma.training.judges import Judges
from renma.types import Action, Floats, Group, Ids, Step, Task, Trajectory

PRESETS = (
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce_pp",
    "dapo",
    "gspo",
    "cispo",
    "gigpo",
    "ppo",
    "steppo",
    "decoupled_ppo",
)
MEMBERS, PROMPT, OBSERVATION, STATES = 8, 100, 25, 400
PACK = LearnerSection().max_positions


@dataclass(frozen=True, slots=True)
class InstantCritic:
    """Values at random, at once."""

    def state_values(self, groups: Sequence[Group], rows: Sequence[Row]) -> tuple[list[Floats], list[list[float]]]:
        rng = np.random.default_rng(0)
        values = [rng.random(int(np.count_nonzero(row.trained)), np.float32) for row in rows]
        return values, [[0.0] * len(group.trainable) for group in groups]


def make_groups(trajectories: int, steps: int, tokens: int, vocabulary: int, seed: int = 0) -> list[Group]:
    """Groups of `MEMBERS` with one prompt each, rewarded at the end; states repeat within a group."""
    rng = np.random.default_rng(seed)
    groups = []
    for number in range(trajectories // MEMBERS):
        task = Task(str(number), "?")
        prompt = rng.integers(3, vocabulary, PROMPT).astype(np.int32)
        members = tuple(_trajectory(task, member, prompt, steps, tokens, vocabulary, rng) for member in range(MEMBERS))
        groups.append(Group(task, members))
    return groups


def _trajectory(
    task: Task, member: int, prompt: Ids, steps: int, tokens: int, vocabulary: int, rng: np.random.Generator
) -> Trajectory:
    context, taken = prompt, []
    for _ in range(steps):
        action = rng.integers(3, vocabulary, tokens).astype(np.int32)
        logprobs = -rng.random(tokens, dtype=np.float32)
        key = f"state {rng.integers(STATES)}"
        taken.append(Step(context, action, logprobs, np.zeros(tokens, np.int32), Action(""), state_key=key))
        context = np.concatenate([context, action, rng.integers(3, vocabulary, OBSERVATION).astype(np.int32)])
    outcome = {"score": float(rng.random() < 0.4)}
    return Trajectory(task, member, tuple(taken), "done", "answer", success=bool(outcome["score"]), rewards=outcome)


def batch_of(algorithm: Algorithm, groups: Sequence[Group]) -> Batch:
    critic: Any = InstantCritic() if "values" in algorithm.needs else None
    return make_batch(Sampled(groups), algorithm, judges=Judges(critic=critic))


def objective_of(algorithm: Algorithm) -> Objective:
    """The algorithm's, with token TIS where it may have one: the ratio against recomputed log-probabilities."""
    return Objective(algorithm.loss, algorithm.aggregate, 1000.0, old_logprobs="recompute", correction=token_tis())


def ready(rows: Sequence[Row], objective: Objective, policy: Sequence[Floats]) -> Tokens:
    """One optimiser step's tokens, as the learner makes them ready; policy: log pi_old of each row."""
    tokens = Tokens.of(rows, policy)
    began = np.concatenate(list(policy))
    assert objective.correction is not None
    tokens, _ = tokens.corrected(objective.correction, began)
    if objective.traits.prepare is not None:
        tokens, _ = tokens.prepared_for(objective, began)
    return tokens.weighed(objective)


def loss_of(tokens: Tokens, objective: Objective, logp: torch.Tensor) -> torch.Tensor:
    """The gradient [n] of the objective with respect to logp, pack by pack of about `PACK` tokens."""
    assert tokens.weight is not None
    gradients = []
    edges = [*np.searchsorted(tokens.trajectory, np.unique(tokens.trajectory)), len(tokens)]
    start = 0
    for end in edges[1:]:
        if end - start < PACK and end < len(tokens):
            continue
        index = np.arange(start, end)
        leaf = logp[start:end].clone().requires_grad_()
        factor = None if tokens.factor is None else torch.from_numpy(tokens.factor[index])
        charge, _ = objective.charge(tokens.given(index, leaf, torch.zeros(len(index))), factor)
        (charge * torch.from_numpy(tokens.weight[index]).to(charge.dtype)).sum().backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad)
        start = end
    return torch.cat(gradients)


def time_preset(name: str, groups: Sequence[Group]) -> dict[str, float]:
    """Seconds of each part for the whole batch."""
    algorithm = preset(name)
    objective = objective_of(algorithm)
    started = time.perf_counter()
    batch = batch_of(algorithm, groups)
    made = time.perf_counter()
    policy = [row.logprobs[row.trained] + np.float32(0.01) for row in batch.rows]
    logp = torch.from_numpy(np.concatenate(policy))
    given = time.perf_counter()
    tokens = ready(batch.rows, objective, policy)
    prepared = time.perf_counter()
    loss_of(tokens, objective, logp)
    return {"batch": made - started, "tokens": prepared - given, "loss": time.perf_counter() - prepared}


def quickstart_tree(context: int) -> TreeModel:
    """The quickstart's model, untrained, with room for the rows, over its own output tokens."""
    section = load_recipe(find_recipe("quickstart")).model
    assert isinstance(section, ScratchModel)
    tokenizer = train_tokenizer(["0123456789 + - = Call: calc() Answer:\n"], section.vocabulary)
    model = build_llama(llama_config(section.model_copy(update={"context": context}), tokenizer), 0)
    return TreeModel(model)


def time_model(tree: TreeModel, rows: Sequence[Row]) -> float:
    """Seconds of forward and backward over the rows; packing is not counted."""
    packs = tree.packs(list(rows), PACK)
    started = time.perf_counter()
    tree.begin()
    for one in packs:
        tree.logprobs(one)[0].sum().backward()
    tree.finish()
    seconds = time.perf_counter() - started
    tree.causal.zero_grad()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=list(PRESETS), choices=list(PRESETS), metavar="NAME")
    parser.add_argument("--trajectories", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=50, help="of one action")
    parser.add_argument("--slice", type=int, default=4, help="rows that the model is measured on")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--save", type=Path, help="write the medians to this JSON file")
    arguments = parser.parse_args()
    groups = make_groups(arguments.trajectories, arguments.steps, arguments.tokens, vocabulary=250)
    rows = batch_of(preset("grpo"), groups[:1]).rows[: arguments.slice]
    tree = quickstart_tree(len(rows[0]))
    times: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _ in track(range(arguments.repeats + 1), "repeats (the first warms up)"):
        times["model"]["slice"].append(time_model(tree, rows))
        for name in arguments.presets:
            for part, seconds in time_preset(name, groups).items():
                times[name][part].append(seconds)
    medians = {n: {p: statistics.median(values[1:]) for p, values in parts.items()} for n, parts in times.items()}
    model = medians["model"]["slice"] / len(rows) * arguments.trajectories
    medians["model"]["whole"] = model
    table = Table(title=f"seconds for {arguments.trajectories} x {arguments.steps} x {arguments.tokens} tokens")
    for title in (
        "preset",
        "credit and rows",
        "flat tokens, correction, weights",
        "loss",
        "all",
        "of the model's time",
    ):
        table.add_column(title, justify="left" if title == "preset" else "right")
    for name in arguments.presets:
        own = medians[name]
        total = sum(own.values())
        cells = [f"{own[part]:.2f}" for part in ("batch", "tokens", "loss")]
        table.add_row(name, *cells, f"{total:.2f}", f"{total / model:.2%}")
    console = Console()
    console.print(table)
    console.print(
        f"Forward and backward of the quickstart's model: {model:.0f} s, {arguments.trajectories / len(rows):.0f} x "
        f"the {medians['model']['slice']:.2f} s of {len(rows)} rows; {torch.get_num_threads()} threads."
    )
    if arguments.save:
        arguments.save.write_text(json.dumps(medians, indent=1), encoding="utf-8")
        console.print(f"wrote {arguments.save}")


if __name__ == "__main__":
    main()
