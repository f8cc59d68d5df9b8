"""How a step's time grows with the recipe's knobs, for Renma and for computing every row by itself.

    python -m benchmarks.growth                            # a small policy from scratch: minutes on two cores
    python -m benchmarks.growth --model gemma-3-270m       # about two hours; goes on where it stopped
    python -m benchmarks.growth --quick                    # three values of each knob, one round
    python -m benchmarks.growth --draw                     # only draw what is there

One knob moves at a time, from `BASE`. Each point samples multi-turn episodes through the local engine (action and
observation lengths are fixed, so that the work is), and learns from them in one optimiser step. `Renma`: requests share
what is cached, the batch is one prefix tree. `separate rows`: the first two tokens of every request are a mark of its
own, so that the engine finds nothing to share and computes each prompt whole, at the same length; and every row is a
pack of its own in the learner. Both ways take turns in every round; the chart has medians.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from benchmarks.small_multiples import Panel, draw_panels
from benchmarks.tiny_runs import Results
from renma.inference.base import Engine, SamplingParams
from renma.inference.local import LocalEngine
from renma.learning.learner import Learner
from renma.learning.losses import reinforce
from renma.learning.rows import Row, rows_of
from renma.models.policy import Policy, load_policy
from renma.recipe import LearnerSection, PretrainedModel, ScratchModel
from renma.types import Action, Ids, Step, Task, Trajectory

OURS, SEPARATE = "Renma", "separate rows"
SINGLE = 16  # max_positions under which every row of more tokens is a pack of its own


@dataclass(frozen=True, slots=True)
class Shape:
    """Of one step's work, in tokens but for tasks, group_size, turns and slots (requests decoded at once)."""

    tasks: int = 2
    group_size: int = 8
    turns: int = 4
    header: int = 192
    question: int = 32
    action: int = 16
    observation: int = 16
    slots: int = 32


BASE = Shape()
KNOBS: dict[str, tuple[int, ...]] = {
    "group_size": (1, 2, 4, 8, 16, 32),
    "turns": (1, 2, 4, 8, 16),
    "header": (0, 128, 256, 512, 1024),
    "observation": (0, 16, 32, 64, 128),
    "slots": (2, 4, 8, 16, 32),
}
LABELS = {
    "group_size": "members of a group",
    "turns": "turns of an episode",
    "header": "tokens of the header",
    "observation": "tokens of an observation",
    "slots": "requests at once (slots)",
}


def longest(shape: Shape) -> int:
    return shape.header + shape.question + shape.turns * (shape.action + shape.observation) + 1


def points(knobs: dict[str, tuple[int, ...]], base: Shape = BASE) -> Iterator[tuple[str, int, Shape]]:
    for knob, values in knobs.items():
        for value in values:
            yield knob, value, replace(base, **{knob: value})


def policy_for(model: str | None) -> Policy:
    """A model by name or folder, emitting a thousand tokens; None: three layers of 192, the quickstart's size."""
    texts = [chr(i) for i in range(32, 1032)]
    if model is not None:
        return load_policy(PretrainedModel(source=model, output_tokens="tasks"), texts=lambda: texts)
    context = max(longest(shape) for _, _, shape in points(KNOBS))
    section = ScratchModel(layers=3, hidden=192, heads=6, feed_forward=512, context=context)
    return load_policy(section, texts=lambda: texts)


def rollout(engine: Engine, shape: Shape, vocabulary: int, shared: bool, seed: int = 0) -> list[Trajectory]:
    """Every episode of a step, `slots` open at once; random text but for what the policy samples."""
    rng = np.random.default_rng(seed)

    def text(count: int) -> Ids:
        return rng.integers(0, vocabulary, count).astype(np.int32)

    header = text(shape.header)
    prompts = [np.concatenate([header, text(shape.question)]) for _ in range(shape.tasks)]
    shown = [[text(shape.observation) for _ in range(shape.turns)] for _ in range(shape.tasks * shape.group_size)]
    marks = itertools.product(range(vocabulary), repeat=2)
    waiting = list(itertools.product(range(shape.tasks), range(shape.group_size)))[::-1]
    done: dict[tuple[int, int], Trajectory] = {}

    async def episode(task: int, member: int) -> Trajectory:
        prompt, steps = prompts[task], []
        for turn in range(shape.turns):
            sent = prompt if shared else np.concatenate([np.array(next(marks), np.int32), prompt[2:]])
            number = (task * shape.group_size + member) * shape.turns + turn
            params = SamplingParams(max_tokens=shape.action, seed=number)
            sample = await engine.sample(sent, params, key=(task, member, turn))
            steps.append(Step(prompt, sample.ids, sample.logprobs, sample.versions, Action("")))
            prompt = np.concatenate([prompt, sample.ids, shown[task * shape.group_size + member][turn]])
        return Trajectory(Task(str(task), "?"), member, tuple(steps), "done", "answer")

    async def worker() -> None:
        while waiting:
            place = waiting.pop()
            done[place] = await episode(*place)

    async def all_of_them() -> None:
        await engine.load_weights(seed)  # nothing is cached of an earlier step
        await asyncio.gather(*(worker() for _ in range(min(shape.slots, len(waiting)))))

    asyncio.run(all_of_them())
    return [done[place] for place in sorted(done)]


def rows_from(trajectories: Sequence[Trajectory]) -> list[Row]:
    """Their rows, each trajectory with an advantage at random."""
    rng = np.random.default_rng(0)
    rows: list[Row] = []
    for number, trajectory in enumerate(trajectories):
        credit = np.full(trajectory.sampled_tokens, rng.normal(), np.float32)
        rows += rows_of(trajectory, number, credit, group=int(trajectory.task.id))
    return rows


class Machine:
    """One policy with its learner; engines are made for the slots that a point asks for, and kept."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.vocabulary = int(policy.model.config.get_text_config().vocab_size)
        self.learner = Learner(policy.model, LearnerSection(learning_rate=1e-6), output_ids=policy.output_ids)
        self.settings = {OURS: self.learner.settings}
        self.settings[SEPARATE] = self.learner.settings.model_copy(update={"max_positions": SINGLE})

    def step(self, shape: Shape, way: str, *, learns: bool = True) -> dict[str, float]:
        """Sample and learn; seconds of each, and how many positions each computed."""
        engine = LocalEngine(
            self.policy.model, self.policy.tokenizer, output_ids=self.policy.output_ids,
            slots=shape.slots, context=longest(shape),
        )  # fmt: skip
        started = time.perf_counter()
        trajectories = rollout(engine, shape, self.vocabulary, way == OURS)
        sampled = time.perf_counter()
        result = {
            "rollout": sampled - started,
            "prompt_positions": float(engine.stats["prompt_positions"]),
            "prefilled": float(engine.stats["computed_positions"]),
        }
        asyncio.run(engine.close())
        if learns:
            rows = rows_from(trajectories)
            self.learner.settings = self.settings[way]
            began = time.perf_counter()
            numbers = self.learner.update(rows, loss=reinforce())
            result |= {
                "learner": time.perf_counter() - began,
                "positions": numbers["positions"],
                "row_tokens": numbers["row_tokens"],
            }
        return result


def measure(
    machine: Machine, knobs: dict[str, tuple[int, ...]], rounds: int, results: Results, console: Console, model: str
) -> None:
    """Every point `rounds` times, both ways in turn; what is in the file already is not measured again."""
    planned = [
        (number, knob, value, shape, way)
        for number in range(rounds)
        for knob, value, shape in points(knobs)
        for way in (OURS, SEPARATE)
    ]
    todo = [point for point in planned if key(model, *point[1:3], point[4], point[0]) not in results.runs]
    if todo:
        small = replace(BASE, tasks=1, group_size=2, turns=2)
        for way in (OURS, SEPARATE):
            machine.step(small, way)
    for number, knob, value, shape, way in track(todo, f"steps of {model}", console=console):
        found = machine.step(shape, way, learns=knob != "slots")
        record = {"model": model, "knob": knob, "value": value, "way": way, "shape": asdict(shape), **found}
        record["threads"] = torch.get_num_threads()
        results.add(key(model, knob, value, way, number), record)


def key(model: str, knob: str, value: int, way: str, number: int) -> str:
    return "/".join(map(str, (model, knob, value, way, number)))


def medians(runs: Sequence[dict[str, Any]], knob: str, part: str) -> dict[str, list[tuple[float, float]]]:
    """way -> (the knob's value, median seconds of that part of the step), ascending."""
    found: dict[str, dict[int, list[float]]] = {OURS: {}, SEPARATE: {}}
    for run in runs:
        if run["knob"] == knob and part in run:
            found[run["way"]].setdefault(run["value"], []).append(run[part])
    return {
        way: [(float(x), statistics.median(seconds)) for x, seconds in sorted(values.items())]
        for way, values in found.items()
        if values
    }


def chart(runs: Sequence[dict[str, Any]], model: str) -> str:
    panels = []
    for knob in KNOBS:
        for part in ("rollout", "learner"):
            lines = medians(runs, knob, part)
            note = "Slots are the engine's: the learner does not depend on them." if knob == "slots" else "not measured"
            panels.append(Panel(f"{part}: seconds a step", LABELS[knob], dict(lines), note))
    base = asdict(BASE)
    told = ", ".join(f"{base[name]} {text}" for name, text in {
        "tasks": "tasks", "group_size": "members", "turns": "turns", "header": "header tokens",
        "question": "of the question", "action": "an action", "observation": "an observation", "slots": "slots",
    }.items())  # fmt: skip
    return draw_panels(f"A step's time as one knob moves ({model})", told, (SEPARATE, OURS), panels)


def report(runs: Sequence[dict[str, Any]], console: Console) -> None:
    """How many times as long separate rows take, at each knob's ends."""
    for knob in KNOBS:
        for part in ("rollout", "learner"):
            lines = medians(runs, knob, part)
            if len(lines) == 2:
                pairs = list(zip(lines[OURS], lines[SEPARATE], strict=False))
                told = ", ".join(f"{x:g}: {b / a:.1f}x" for (x, a), (_, b) in pairs)
                console.print(f"{part} {LABELS[knob]}: separate rows take {told}", highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model's name or folder; default: a small one from scratch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--knobs", nargs="*", default=list(KNOBS), choices=list(KNOBS))
    parser.add_argument("--quick", action="store_true", help="three values of each knob, one round, a file of its own")
    parser.add_argument("--draw", action="store_true", help="draw what is there; run nothing")
    parser.add_argument("--out", type=Path, default=Path(".benchmarks/growth.json"))
    parser.add_argument("--svg", type=Path, default=Path("docs/growth.svg"))
    arguments = parser.parse_args()
    console = Console()
    knobs = {knob: KNOBS[knob] for knob in arguments.knobs}
    if arguments.quick:
        knobs = {knob: values[::2] for knob, values in knobs.items()}
        arguments.rounds = 1
        arguments.out = arguments.out.with_name(arguments.out.stem + "-quick.json")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    results = Results(arguments.out)
    model = Path(arguments.model).name if arguments.model else "3 layers of 192"
    if not arguments.draw:
        machine = Machine(policy_for(arguments.model))
        measure(machine, knobs, arguments.rounds, results, console, model)
    runs = [run for run in results.runs.values() if run["model"] == model]
    report(runs, console)
    arguments.svg.write_text(chart(runs, model), encoding="utf-8")
    console.print(f"wrote {arguments.svg}")


if __name__ == "__main__":
    main()
