"""Gathering a batch: refills with fresh tasks, greedy baselines, demonstrations, recorded pairs."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from renma.errors import RunError
from renma.recipe import AlgorithmSection
from renma.training.algorithms import Algorithm, resolve
from renma.training.batch import Sampled, learnable, make_batch
from renma.training.batch_metrics import describe_batch
from renma.training.gather import Gatherer
from renma.types import Action, Group, Step, Task, Trajectory


def attempt(task: Task, member: int, ret: float, status: str = "done") -> Trajectory:
    ids = np.array([1, 2], np.int32)
    step = Step(ids, ids + member, np.zeros(2, np.float32), np.zeros(2, np.int32), Action(str(ret)), terminated=True)
    reason = "answer" if status == "done" else "environment_error"
    return Trajectory(task, member, (step,), status, reason, success=ret > 0, rewards={"r": ret})  # type: ignore[arg-type]


class Sampler:
    """A runner whose task at a position is mixed, uniform or broken, as `kinds` says (m, u, b); notes what it drew."""

    def __init__(self, kinds: str) -> None:
        self.kinds = kinds
        self.drawn: list[int] = []

    async def groups(self, tasks: list[Task], size: int, *, first: int = 0, purpose: str = "train", done: Any = None):
        found = []
        for i, task in enumerate(tasks):
            kind = self.kinds[(first + i) % len(self.kinds)]
            self.drawn.append(first + i)
            returns = [1.0 if kind == "m" and member == 0 else 0.0 for member in range(size)]
            status = "failed" if kind == "b" else "done"
            found.append(Group(task, tuple(attempt(task, m, r, status) for m, r in enumerate(returns))))
        return found


def gatherer(kinds: str, algorithm: Algorithm, tasks_per_step: int = 4) -> Gatherer:
    rollout = SimpleNamespace(tasks_per_step=tasks_per_step, group_size=4, drop_groups_with=["environment_error"])
    parts = SimpleNamespace(
        recipe=SimpleNamespace(rollout=rollout),
        task_at=lambda position: Task(str(position), ""),
        runner=Sampler(kinds),
        greedy=Sampler(kinds),
        demonstrator=lambda: Sampler("m"),
        preferences=[Group(Task(f"pair {i}", ""), ()) for i in range(6)],
    )
    return Gatherer(parts, algorithm)  # type: ignore[arg-type]


def algorithm(**keys: Any) -> Algorithm:
    return resolve(AlgorithmSection.model_validate(keys))


def gather(made: Gatherer, position: int = 0) -> Any:
    return asyncio.run(made.gather(position))


def test_case_2_17_refills_draw_new_tasks_and_train_none_twice() -> None:
    """3 mixed of 8 where 4 are wanted (12.5 % at first): fresh tasks until the batch is full."""
    made = gatherer("muuuumuumuuuuuuummmm", algorithm(preset="dapo", refills=9))
    sampled = gather(made)
    kept, dropped = learnable(sampled.groups, made.algorithm)
    assert len(kept) >= 4 and dropped["not_selected"] == len(sampled.groups) - len(kept)
    drawn = made.parts.runner.drawn  # type: ignore[attr-defined]
    assert drawn == list(range(len(sampled.groups))), "each task once, in order"
    assert sampled.next_position == len(drawn) and sampled.refills >= 1
    batch = make_batch(sampled, made.algorithm)
    assert len({row.group for row in batch.rows}) == len(kept)


def test_case_2_17_without_any_mixed_group_the_run_ends_naming_the_solve_rate() -> None:
    made = gatherer("u", algorithm(preset="dapo", refills=2))
    with pytest.raises(RunError, match=r"after 2 refills none of 12 groups is mixed: solve rate 0%"):
        gather(made)
    assert len(made.parts.runner.drawn) == 12  # type: ignore[attr-defined]


def test_case_2_17_after_the_last_refill_the_batch_is_what_there_is() -> None:
    made = gatherer("muuuuuuuuuuuuuuuuuuu", algorithm(preset="dapo", refills=1))
    sampled = gather(made)
    batch = make_batch(sampled, made.algorithm)
    assert (sampled.refills, len(batch.groups), batch.dropped) == (1, 1, {"not_selected": 7})


def test_broken_groups_are_refilled_too() -> None:
    made = gatherer("bbmmmmmm", algorithm(preset="dapo"))
    sampled = gather(made)
    assert (sampled.refills, len(sampled.groups)) == (1, 8), "half were kept, so 4 are drawn for the 2 that lack"
    assert make_batch(sampled, made.algorithm, drop_groups_with=["environment_error"]).dropped == {
        "environment_error": 2
    }


def test_without_refills_a_batch_is_its_positions() -> None:
    made = gatherer("u", algorithm(preset="grpo"))
    sampled = gather(made, 8)
    assert [g.task.id for g in sampled.groups] == ["8", "9", "10", "11"]
    assert (sampled.next_position, sampled.refills, list(sampled.greedy)) == (12, 0, [])


def test_remax_takes_one_greedy_trajectory_a_task_and_drops_what_has_none() -> None:
    made = gatherer("mmum", algorithm(preset="remax"))
    sampled = gather(made)
    assert [t.task.id for t in sampled.greedy] == ["0", "1", "2", "3"]
    batch = make_batch(sampled, made.algorithm)
    assert [float(a[0]) for a in batch.credit.advantages[0]] == [0.0, -1.0, -1.0, -1.0], "greedy earns 1 there"
    assert [float(a[0]) for a in batch.credit.advantages[2]] == [0.0] * 4
    made.parts.greedy = Sampler("bmum")  # type: ignore[misc]
    assert make_batch(gather(made), made.algorithm).dropped == {"greedy_failed": 1}


def test_demonstrations_come_instead_of_samples_or_beside_them() -> None:
    only = gatherer("m", algorithm(preset="sft"))
    sampled = gather(only)
    assert [len(g.trajectories) for g in sampled.groups] == [1] * 4 and not only.parts.runner.drawn  # type: ignore[attr-defined]
    both = gatherer("m", algorithm(preset="sft_rl"))
    sampled = gather(both)
    batch = make_batch(sampled, both.algorithm)
    assert (len(sampled.groups), len(sampled.demonstrations)) == (4, 4)
    assert len(batch.rows) == 4 * 4 + 4
    assert sorted({row.trajectory for row in batch.rows}) == list(range(20))


def test_what_the_policy_did_not_sample_says_nothing_of_it() -> None:
    for name, speaks in (("sft", False), ("grpo", True)):
        made = gatherer("m", algorithm(preset=name))
        sampled = gather(made)
        numbers = describe_batch(sampled, make_batch(sampled, made.algorithm), 3)
        assert ("success" in numbers) == ("staleness_max" in numbers) == speaks
        assert "return_mean" in numbers


def test_recorded_pairs_are_taken_in_turn() -> None:
    made = gatherer("m", algorithm(preset="dpo", learns_from="preferences"))
    assert [g.task.id for g in gather(made, 4).groups] == ["pair 4", "pair 5", "pair 0", "pair 1"]


def test_rows_without_advantage_are_left_out_where_the_algorithm_says_so() -> None:
    made = gatherer("mu", algorithm(preset="rft"), tasks_per_step=2)
    batch = make_batch(gather(made), made.algorithm)
    assert len(batch.groups) == 2 and [row.trajectory for row in batch.rows] == [0]


def test_task_normalisation_is_within_each_family() -> None:
    plain, normal = algorithm(preset="reinforce"), algorithm(preset="reinforce", task_normalisation=True)
    groups = [
        Group(task, tuple(attempt(task, m, r) for m, r in enumerate(returns)))
        for task, returns in (
            (Task("a", "", family="easy"), (1.0, 0.0)),
            (Task("b", "", family="hard"), (100.0, 300.0)),
        )
    ]
    sampled = Sampled(groups)
    raw, scaled = (make_batch(sampled, chosen).credit.advantages for chosen in (plain, normal))
    assert [float(a[0]) for a in raw[1]] == [100.0, 300.0]
    assert [float(a[0]) for a in scaled[0]] == pytest.approx([1.0, -1.0], abs=1e-4)
    assert [float(a[0]) for a in scaled[1]] == pytest.approx([-1.0, 1.0], abs=1e-4)
