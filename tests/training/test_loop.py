"""The loop: staleness is bounded, nothing is lost or trained twice, and a bound of 0 is the synchronous run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from renma.errors import RecipeError, RunError
from renma.learning.learner import Learner
from renma.recipe_load import load_recipe
from renma.training.algorithms import resolve
from renma.training.batch import Batch
from renma.training.loop import Loop
from renma.training.setup import Parts, assemble
from renma.types import Group
from tests.end_to_end.tiny import TINY


class Kept:
    """Keeps what the loop hands out; may stop the run after so many steps."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.steps: list[tuple[int, list[str], dict[str, float]]] = []
        self.stop_at = stop_at
        self.in_flight: list[int] = []

    def episode_done(self, step: int, trajectory: Any) -> None: ...

    def learned(self, step: int, groups: Sequence[Group], batch: Batch, metrics: dict[str, float]) -> None:
        self.steps.append((step, [g.task.id for g in groups], metrics))

    async def step_done(self, loop: Loop) -> None:
        self.in_flight.append(len(loop._running))
        assert loop.parts.engine.version == loop.version, "the sampler has the new weights before anything is awaited"
        if loop.version == self.stop_at:
            raise asyncio.CancelledError


def parts_of(*overrides: str) -> Parts:
    return assemble(load_recipe({**TINY, "cold_start": None, "evaluation": {}}, ["training.steps=5", *overrides]))


def run(parts: Parts, version: int = 0, stop_at: int | None = None) -> Kept:
    recipe = parts.recipe
    learner = Learner(parts.policy.model, recipe.learner, temperature=recipe.sampling.temperature)
    kept = Kept(stop_at)
    loop = Loop(parts, learner, resolve(recipe.algorithm), kept, version)  # type: ignore[arg-type]
    try:
        asyncio.run(asyncio.wait_for(loop.run(), 60))
    except asyncio.CancelledError:
        assert stop_at is not None
    return kept


def wanted(parts: Parts, batches: Sequence[int]) -> list[list[str]]:
    size = parts.recipe.rollout.tasks_per_step
    return [[parts.task_at(b * size + i).id for i in range(size)] for b in batches]


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_case_5_8_no_token_is_older_than_the_bound_and_none_is_discarded(bound: int) -> None:
    parts = parts_of(f"training.staleness={bound}")
    kept = run(parts)
    assert [tasks for _, tasks, _ in kept.steps] == wanted(parts, range(5))
    lags = [metrics["staleness_max"] for *_, metrics in kept.steps]
    assert max(lags) <= bound
    assert (max(lags) > 0) == (bound > 0)
    assert max(kept.in_flight) <= bound


def test_case_5_7_7_2_and_7_3_a_resume_keeps_the_bound_and_loses_nothing() -> None:
    """Stopped with batches in flight; the resumed run takes up the first batch that was not trained, at its version."""
    first = parts_of("training.staleness=2")
    before = run(first, stop_at=2)
    again = parts_of("training.staleness=2")
    after = run(again, version=2)
    trained = [tasks for _, tasks, _ in [*before.steps, *after.steps]]
    assert trained == wanted(again, range(5))
    assert all(metrics["staleness_max"] <= 2 for *_, metrics in after.steps)
    assert max(after.in_flight) <= 2, "at most (bound + 1) batches are in flight, however far the run is"


def test_two_runs_with_one_seed_are_the_same_run() -> None:
    def numbers(kept: Kept) -> list[dict[str, float]]:
        return [{k: v for k, v in m.items() if "seconds" not in k and "per_second" not in k} for *_, m in kept.steps]

    assert numbers(run(parts_of())) == numbers(run(parts_of()))
    assert numbers(run(parts_of())) != numbers(run(parts_of("seed=4")))


def test_case_6_11_and_6_1_an_unchanged_policy_has_ratio_one() -> None:
    for temperature in (1.0, 0.6):
        kept = run(parts_of(f"sampling.temperature={temperature}", "training.steps=1"))
        metrics = kept.steps[0][2]
        assert metrics["learner/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
        assert metrics["learner/mismatch_max"] < 1e-4
        assert metrics["learner/clip_share"] == 0.0


def test_the_first_batch_stops_a_run_whose_engine_and_learner_disagree() -> None:
    parts = parts_of()
    recipe = parts.recipe
    learner = Learner(parts.policy.model, recipe.learner, temperature=0.3)  # the engine samples at 1.0
    loop = Loop(parts, learner, resolve(recipe.algorithm), Kept())  # type: ignore[arg-type]
    with pytest.raises(RunError, match="differ from the learner's by"):
        asyncio.run(loop.run())


def test_a_run_without_a_trainable_sample_stops_with_the_reason() -> None:
    parts = parts_of()
    broken = parts.runner.make_environment

    def make() -> Any:
        environment = broken()
        environment.reset = lambda task: (_ for _ in ()).throw(OSError("no page"))  # type: ignore[method-assign]
        return environment

    parts.runner = replace(parts.runner, make_environment=make)
    with pytest.raises(RunError, match="OSError: no page"):
        run(parts)


def test_groups_whose_members_all_agree_change_nothing() -> None:
    """Case 2.3: no signal, no update; the share is reported."""
    parts = parts_of("training.steps=1", "rewards=[]")
    weights = {n: p.detach().clone() for n, p in parts.policy.model.named_parameters()}
    metrics = run(parts).steps[0][2]
    assert metrics["zero_std_share"] == 1.0
    assert all(np.array_equal(p.detach().numpy(), weights[n].numpy()) for n, p in parts.policy.model.named_parameters())


def test_case_5_11_environments_that_share_state_are_never_run_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    from renma.environments.calculator import CalculatorEnvironment

    monkeypatch.setattr(CalculatorEnvironment, "thread_safe", False)
    with pytest.raises(RecipeError, match="rollout.slots=1"):
        parts_of()
    parts = parts_of("rollout.slots=1", "rollout.tasks_per_step=2", "rollout.group_size=2", "training.steps=1")
    open_now, most = 0, 0
    made = parts.runner.make_environment

    def counted() -> Any:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        environment = made()
        closing = environment.close

        def close() -> Any:
            nonlocal open_now
            open_now -= 1
            return closing()

        environment.close = close  # type: ignore[method-assign]
        return environment

    parts.runner = replace(parts.runner, make_environment=counted)
    run(parts)
    assert (open_now, most) == (0, 1)
