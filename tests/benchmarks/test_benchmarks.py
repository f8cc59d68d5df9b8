"""The benchmarks' own parts: the corridor, a run in it, a sampler that disagrees, the bookkeeping that is timed."""

from __future__ import annotations

import asyncio
import random
from argparse import Namespace

import numpy as np
import pytest
import torch
from rich.console import Console

from benchmarks import bookkeeping, correction, credit, tiny_runs
from benchmarks.corridor import RULE, SIGNS, Corridor, CorridorDemonstrator, CorridorTasks, turns
from renma.learning.rows import rows_of
from renma.training.algorithms import preset, resolve
from renma.training.setup import assemble
from renma.types import Action


def walk(task, verbs):
    """The corridor walked with a function of (sign) -> verb: observations, states, the last result."""

    async def go():
        environment = Corridor()
        seen, states, result = [await environment.reset(task)], [], None
        while result is None or not result.terminated:
            states.append(await environment.state_key())
            result = await environment.step(Action("", raw=verbs(seen[-1][-1])))
            seen.append(result.observation.messages[-1].text)
        return seen, states, result

    return asyncio.run(go())


def test_the_rule_opens_every_door_that_does_not_stick():
    for index in range(20):
        task = CorridorTasks(doors=[4])[index]
        seen, states, result = walk(task, lambda sign: RULE[sign] + "\n")
        needed = np.flatnonzero(~np.array(task.data["stuck"]))
        assert states == seen[:-1]
        assert result.info["success"] == (len(needed) >= 4) == bool(result.reward)
        if result.info["success"]:
            assert len(states) == needed[3] + 1 and seen[-1] == "0."


def test_a_wrong_verb_stands_still_until_the_tries_are_used_up():
    _, states, result = walk(CorridorTasks(doors=[8])[0], lambda sign: "fly")
    assert len(states) == turns(8) and len(set(states)) == 1
    assert result.terminated and result.reward == 0


def test_tasks_are_the_same_for_equal_seeds_and_lengths_take_turns():
    one, again = CorridorTasks(doors=[4, 16], seed=3), CorridorTasks(doors=[4, 16], seed=3)
    assert [one[i] for i in range(6)] == [again[i] for i in range(6)]
    assert [len(one[i].data["signs"]) for i in range(4)] == [4, 16, 4, 16]
    assert one[0] != CorridorTasks(doors=[4, 16], seed=4)[0]


def test_the_demonstrator_knows_the_first_signs_only():
    from renma.types import Observation

    rng = random.Random(0)
    writer = CorridorDemonstrator(known=8, skill=1.0)
    written = {s: {writer.write(None, 0, Observation.of("4" + s), rng).strip() for _ in range(60)} for s in SIGNS}
    assert all(written[sign] == {RULE[sign]} for sign in SIGNS[:8])
    assert all(len(written[sign]) == 4 for sign in SIGNS[8:])


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    """A policy of this shape that has learned nothing, where the benchmarks would look for a cold-started one."""
    folder = tmp_path_factory.mktemp("policies")
    recipe = tiny_runs.recipe_for(credit.HORIZONS, 0, {"preset": "grpo"})
    tiny_runs.save_policy(assemble(recipe).policy, folder / "4-8-16-seed-0")
    return folder


def settings(policies, **more):
    return Namespace(policies=policies, budget=200, doors=4, rate=1e-3, seeds=1, tune=False, **more)


@pytest.mark.parametrize("name", ["grpo", "steppo"])
def test_a_run_uses_its_budget_and_measures(policies, name):
    result = credit.one_run(4, name, 0, 1e-3, settings(policies), tasks=4)
    assert 200 <= result["environment_steps"] < 200 + 64 * turns(4)
    assert result["updates"] == len(result["curve"]) >= 1
    assert len(result["wins"]) == 4 and 0 <= result["area"] <= 1


@pytest.mark.parametrize("name", list(credit.ALGORITHMS))
def test_every_algorithm_of_the_table_is_a_recipe(name):
    algorithm = resolve(tiny_runs.recipe_for([4], 0, credit.ALGORITHMS[name]).algorithm)
    expected = {n: "step" for n in credit.ALGORITHMS if n.startswith("steppo")} | {"steppo-clip": "token"}
    assert getattr(algorithm.loss, "level", "token") == expected.get(name, "token")


def test_what_is_in_the_file_is_not_run_again_and_the_tables_tell_it(policies, tmp_path, monkeypatch):
    calls = []

    def run(doors, name, seed, rate, arguments, **more):
        calls.append(name)
        area = {"grpo": 0.2, "ppo-token": 0.3}.get(name, 0.5)
        return {"algorithm": name, "doors": doors, "seed": seed, "rate": rate, "start": 0.1, "success": 0.5,
                "wins": [1, 0], "area": area, "ended": "", "environment_steps": 1}  # fmt: skip

    monkeypatch.setattr(credit, "one_run", run)
    arguments = settings(policies, horizons=[4, 8], algorithms=["grpo", "steppo"])
    console = Console(record=True, width=160)
    credit.measure(arguments, tiny_runs.Results(tmp_path / "r.json"), console)
    arguments.algorithms += ["ppo-token"]
    credit.measure(arguments, tiny_runs.Results(tmp_path / "r.json"), console)
    assert calls == ["grpo", "steppo"] * 2 + ["ppo-token"] * 2
    credit.show(tiny_runs.Results(tmp_path / "r.json"), console)
    text = console.export_text()
    assert "steppo over ppo-token " in text and "+20.0" in text and "+30.0" in text


def test_two_processes_can_add_to_one_file(tmp_path):
    one, other = tiny_runs.Results(tmp_path / "r.json"), tiny_runs.Results(tmp_path / "r.json")
    one.add("a", {"x": 1})
    other.add("b", {"x": 2})
    assert tiny_runs.Results(tmp_path / "r.json").runs == {"a": {"x": 1}, "b": {"x": 2}} == other.runs


def test_the_area_is_the_mean_over_environment_steps_up_to_the_budget():
    curve = tiny_runs.Curve(100, lambda text, share: None)
    curve.points = [{"steps": 40, "success": 0.5}, {"steps": 90, "success": 0.1}, {"steps": 140, "success": 1.0}]
    assert curve.area() == pytest.approx((40 * 0.5 + 50 * 0.1 + 10 * 1.0) / 100)
    curve.points.pop()  # a run that ended early: its last success counts for the rest
    assert curve.area() == pytest.approx((40 * 0.5 + 60 * 0.1) / 100)


def test_each_algorithm_takes_its_best_rate_of_the_tuning_in_the_file(tmp_path):
    results = tiny_runs.Results(tmp_path / "r.json")
    for rate, area in ((1e-3, 0.2), (2e-3, 0.3), (4e-3, 0.1)):
        run = {
            "algorithm": "grpo",
            "seed": credit.TUNING_SEED,
            "doors": credit.TUNING_DOORS,
            "rate": rate,
            "area": area,
        }
        results.add(str(rate), run)
    results.add("reported", {"algorithm": "grpo", "seed": 0, "doors": credit.TUNING_DOORS, "rate": 4e-3, "area": 0.9})
    assert credit.rate_of("grpo", tiny_runs.Results(tmp_path / "r.json")) == 2e-3
    assert credit.rate_of("rloo", results) == credit.RATE
    assert credit.reported(results) == []


@pytest.mark.parametrize("sampler", ["noise-0.3", "int8"])
def test_a_disturbed_sampler_records_its_own_log_probabilities(policies, sampler):
    recipe = tiny_runs.recipe_for([4], 0, {"preset": "grpo"})
    parts = assemble(recipe, policy_folder=policies / "4-8-16-seed-0")
    before = {name: p.clone() for name, p in parts.policy.model.named_parameters()}
    correction.sampling_from(correction.SAMPLERS[sampler]())(parts)
    engine = parts.engine

    async def sample():
        await engine.load_weights(0)
        return await parts.runner.groups([parts.task_at(0)], 4)

    groups = asyncio.run(sample())
    rows = [row for i, t in enumerate(groups[0].trajectories) for row in rows_of(t, i)]
    recorded = np.concatenate([row.logprobs[row.trained] for row in rows])
    learned = np.concatenate(tiny_runs.learner_of(parts, recipe.learner).logprobs(rows))
    changed = tiny_runs.Learner(engine._copy, recipe.learner, output_ids=parts.policy.output_ids)
    assert 1e-4 < np.abs(recorded - learned).mean() < 1
    if sampler == "int8":  # the learner's own head has no bias to put the noise in
        assert np.concatenate(changed.logprobs(rows)) == pytest.approx(recorded, abs=1e-3)
    assert all(torch.equal(before[name], p) for name, p in parts.policy.model.named_parameters())


def test_a_corrected_run_keeps_the_numbers_that_the_table_shows(policies):
    result = correction.one_run("noise-1", "token-tis", 0, settings(policies), tasks=4)
    [cells] = [correction._cells([result])]
    assert len(cells) == len(correction.COLUMNS) and "-" not in cells


@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_keeps_the_largest_and_errs_by_half_a_level(bits):
    weight = torch.randn(5, 33, generator=torch.Generator().manual_seed(0))
    found = correction.rounded(weight, bits)
    level = weight.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    assert bool(((found - weight).abs() <= 0.5001 * level).all())
    assert torch.allclose(found.abs().amax(-1), weight.abs().amax(-1))
    assert len(found[0].unique()) <= 2**bits - 1


@pytest.mark.parametrize("name", bookkeeping.PRESETS)
def test_the_bookkeeping_that_is_timed_is_the_whole_batch(name):
    groups = bookkeeping.make_groups(16, steps=3, tokens=4, vocabulary=40)
    algorithm = preset(name)
    rows = bookkeeping.batch_of(algorithm, groups).rows
    objective = bookkeeping.objective_of(algorithm)
    policy = [row.logprobs[row.trained] for row in rows]
    tokens = bookkeeping.ready(rows, objective, policy)
    kept = 16 if algorithm.select is None else 8 * len(algorithm.select(groups)[0])
    assert len(rows) == kept and len(tokens) == kept * 3 * 4
    gradient = bookkeeping.loss_of(tokens, objective, torch.from_numpy(np.concatenate(policy)))
    assert gradient.shape == (len(tokens),) and bool((gradient != 0).any())
    assert set(bookkeeping.time_preset(name, groups)) == {"batch", "tokens", "loss"}
