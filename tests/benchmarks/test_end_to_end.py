"""The end-to-end benchmark: what is made of its runs, and that TRL's episodes are Renma's, token by token."""

from __future__ import annotations

import asyncio
import io
import json
from collections import Counter

import pytest
from rich.console import Console

from benchmarks import end_to_end
from benchmarks.end_to_end_report import (
    accuracy_tables,
    curve,
    figures,
    first_time,
    levels,
    ratio,
    schedule,
    speed_table,
    spread,
)
from benchmarks.peers.trl_rollout import Format, Rollout, common_prefix, given_to_trl, padded, stop_ids
from benchmarks.tiny_runs import cold_start
from renma.errors import RecipeError
from renma.learning.rows import rows_of
from renma.models.policy import save_policy
from renma.recipe import Recipe
from renma.training.rng import seed_all
from renma.training.setup import assemble

TREE = {
    "name": "tiny",
    "seed": 3,
    "model": {
        "type": "scratch",
        "layers": 1,
        "hidden": 48,
        "heads": 4,
        "feed_forward": 96,
        "context": 72,
        "device": "cpu",
        "dtype": "float32",
    },
    "tasks": {"type": "arithmetic", "size": 6, "min_terms": 2, "max_terms": 3, "max_digits": 1},
    "environment": {"type": "calculator", "max_operations": 1, "max_turns": 4},
    "agent": {"renderer": {"type": "plain", "header": "Sums:"}},
    "sampling": {"max_tokens": 16},
    "rollout": {"tasks_per_step": 6, "group_size": 2, "slots": 4},
    "learner": {"learning_rate": 1e-3, "schedule": "linear", "warmup_steps": 2},
    "cold_start": {
        "demonstrator": {"type": "arithmetic", "early_answer": 0.3},
        "demonstrations": 120,
        "epochs": 3,
        "batch": 8,
        "learner": {"learning_rate": 1e-2},
    },
}


@pytest.fixture(scope="module")
def parts():
    """A policy that has learned to call the calculator on half a dozen sums: its greedy episodes have several turns."""
    recipe = Recipe.model_validate(TREE)
    seed_all(recipe.seed)
    parts = assemble(recipe)
    asyncio.run(cold_start(recipe, parts))
    return parts


@pytest.fixture(scope="module")
def folder(parts, tmp_path_factory):
    place = tmp_path_factory.mktemp("policy") / "tiny"
    save_policy(parts.policy, place)
    return place


def trajectories(parts, tasks, size):
    async def go():
        await parts.greedy.engine.load_weights(0)
        return await parts.greedy.groups(tasks, size)

    return [t for group in asyncio.run(go()) for t in group.trajectories]


def rollout_of(parts, folder, **changes):
    form = end_to_end.trl_work(parts.recipe, folder, 1)["form"] | {"temperature": 0.0} | changes
    return Rollout(parts.policy.model, parts.policy.tokenizer, Format(**form))


@pytest.mark.parametrize("context", [72, 40])
def test_trl_is_given_the_rows_that_renma_trains(parts, folder, context):
    """Greedy, so that both sample the same: prompt, completion, mask and success of every member are equal."""
    tasks = [parts.task_at(i) for i in range(6)]
    parts.greedy.engine.context = context
    theirs = trajectories(parts, tasks, 2)
    parts.greedy.engine.context = 72
    episodes = rollout_of(parts, folder, context=context).run(tasks)
    given = given_to_trl(episodes)
    assert len(episodes) == len(theirs) == 12
    for index, trajectory in enumerate(theirs):
        (row,) = rows_of(trajectory, index)
        assert given["prompt_ids"][index] + given["completion_ids"][index] == row.ids.tolist()
        assert [0] * len(given["prompt_ids"][index]) + given["env_mask"][index] == row.trained.tolist()
        assert given["success"][index] == trajectory.solved
        assert episodes[index].turns == len(trajectory.steps)
    if context == 72:
        assert len(Counter(len(t.steps) for t in theirs)) > 1  # rows leave the batch at different turns
        assert max(len(t.steps) for t in theirs) >= 2
        assert any(given["success"])
    else:
        assert any(t.stop_reason == "context" for t in theirs)


def test_a_lone_task_is_all_prefix(parts, folder):
    task = parts.task_at(0)
    (episode,) = rollout_of(parts, folder, group_size=1).run([task])
    (row,) = rows_of(trajectories(parts, [task], 1)[0], 0)
    assert [*episode.prompt, *episode.completion] == row.ids.tolist()


def test_every_token_with_the_stop_in_it_ends_an_action(parts, folder):
    rollout = rollout_of(parts, folder)
    found = stop_ids(parts.policy.tokenizer, rollout.renderer)
    texts = {index: parts.policy.tokenizer.decode([index]) for index in range(len(parts.policy.tokenizer))}
    assert {index for index, text in texts.items() if "\n" in text} <= set(found)
    assert set(found) - {index for index, text in texts.items() if "\n" in text} <= set(rollout.renderer.stop_ids)
    rollout.renderer.stop = "\n\n"
    with pytest.raises(ValueError, match="single character"):
        stop_ids(parts.policy.tokenizer, rollout.renderer)


def test_padding_stands_on_the_left_and_a_prefix_leaves_a_token_of_every_row():
    ids, mask = padded([[5], [6, 7, 8]], 0)
    assert ids.tolist() == [[0, 0, 5], [6, 7, 8]] and mask.tolist() == [[0, 0, 1], [1, 1, 1]]
    assert common_prefix([[1, 2, 3], [1, 2, 4, 5]]) == 2
    assert common_prefix([[1, 2], [1, 2, 3]]) == 1
    assert common_prefix([[1, 2, 3]]) == 2


def test_trl_gets_the_recipes_tasks_rates_and_loss(parts, folder):
    work = end_to_end.trl_work(parts.recipe, folder, 4)
    assert [[t["prompt"] for t in tasks] for tasks in work["tasks"]] == [
        [parts.task_at(step * 6 + i).prompt for i in range(6)] for step in range(4)
    ]
    assert work["rates"] == pytest.approx([0.5e-3, 0.75e-3, 0.5e-3, 0.25e-3])
    assert (work["loss"], work["scale_rewards"]) == ("grpo", "group")
    assert work["form"]["context"] == 72 and work["form"]["max_turns"] == 4
    json.dumps(work)


@pytest.mark.parametrize(
    "change",
    [
        {"algorithm": {"preset": "ppo"}},
        {"algorithm": {"preset": "grpo", "kl": 0.1}},
        {"learner": {"mini_batch": 4}},
        {"environment": {"type": "some.module:Shop"}},
        {"agent": {"renderer": {"type": "chat"}}},
    ],
)
def test_a_recipe_that_trl_cannot_follow_is_refused(change, folder):
    with pytest.raises(RecipeError, match="TRL peer"):
        end_to_end.trl_work(Recipe.model_validate(TREE | change), folder, 1)


def record(side, run, seconds, generation=1.0, **more):
    step = {
        "seconds": seconds,
        "generation": generation,
        "trajectories": 64,
        "sampled_tokens": 640,
        "turns": 2.0,
        "mixed": 0.5,
    }
    first = step | {"seconds": 100.0}
    return {
        "side": side,
        "run": run,
        "warm_up": 1,
        "steps": [first | {"success": 0.0}, step | {"success": 0.5}, step | {"success": 0.7}],
        "peak_bytes": 2e9,
    } | more


def test_each_side_runs_once_a_run_and_none_always_comes_first():
    assert list(schedule(["a", "b"], 3)) == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]
    order = list(schedule(["a", "b", "c"], 6))
    assert Counter(order) == Counter((run, side) for run in range(6) for side in "abc")
    assert Counter(side for _, side in order[::3]) == {"a": 2, "b": 2, "c": 2}


def test_figures_leave_the_warm_up_out():
    assert figures(record("renma", 0, 4.0)) == {
        "trajectories_per_second": 16.0,
        "tokens_per_second": 160.0,
        "seconds": 4.0,
        "generation": 1.0,
        "learning": 3.0,
        "peak_gb": 2.0,
        "turns": 2.0,
        "tokens": 10.0,
        "success": pytest.approx(0.6),
        "mixed": 0.5,
    }
    with pytest.raises(ValueError, match="no timed step"):
        figures(record("renma", 0, 4.0, warm_up=3))


def test_the_ratio_is_of_medians_and_its_spread_of_runs_that_both_have():
    ours = {run: figures(record("renma", run, seconds)) for run, seconds in enumerate([2.0, 4.0, 8.0])}
    theirs = {run: figures(record("trl", run, seconds)) for run, seconds in enumerate([40.0, 40.0])}
    assert ratio(ours, theirs, "trajectories_per_second") == pytest.approx((10.0, 10.0, 20.0))
    with pytest.raises(ValueError, match="no run in common"):
        ratio(ours, {7: theirs[0]}, "seconds")


def text_of(*tables):
    console = Console(width=200, record=True, file=io.StringIO())
    for table in tables:
        console.print(table)
    return console.export_text()


def test_the_table_has_medians_with_their_spread_and_the_ratio():
    records = [record("renma", run, s) for run, s in enumerate([2.0, 4.0])] + [record("trl", 0, 40.0)]
    text = text_of(speed_table(records, "title"))
    assert "renma (n=2)" in text and "trl (n=1)" in text
    assert "3.00 (2.00–4.00)" in text
    assert "15.0× (20.0–20.0)" in text  # median 24 against 1.6; the one common run 32 against 1.6
    assert "faster" not in text_of(speed_table(records[2:], "title"))
    assert spread([1.234], 1) == "1.2"


def test_time_to_an_accuracy_is_read_off_where_it_is_first_reached():
    ours = record("renma", 0, 2.0, warm_up=0, accuracy={"0": 0.1, "1": 0.2, "2": 0.15, "3": 0.5})
    theirs = record("trl", 0, 50.0, warm_up=0, accuracy={"0": 0.1, "2": 0.2, "3": 0.3})
    assert curve(ours) == [(0.0, 0.1, 0), (100.0, 0.2, 1), (102.0, 0.15, 2), (104.0, 0.5, 3)]
    assert [first_time(curve(ours), level) for level in (0.1, 0.2, 0.3, 0.9)] == [0.0, 100.0, 104.0, None]
    assert levels([curve(ours), curve(theirs)]) == [0.2, 0.3]
    assert levels([]) == []
    text = text_of(*accuracy_tables([ours, theirs], "title"))
    assert "150 (1.5×)" in text and "200 (1.9×)" in text  # 0.2 after 100 and 150 s, 0.3 after 104 and 200 s
    assert "not reached" in text_of(*accuracy_tables([ours, theirs], "title", 0.5))


def test_a_comparison_goes_on_where_it_stopped_and_keeps_others_apart(tmp_path, monkeypatch):
    done = []

    def options(*more):
        paths = ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "out.json")]
        return end_to_end.parsed(["--recipe", "quickstart", "--runs", "2", *paths, *more])

    comparison = end_to_end.Comparison(options())
    monkeypatch.setattr(comparison, "run", lambda run, side: done.append((run, side)))
    comparison.results.add(comparison.name(0, "trl"), record("trl", 0, 4.0))
    assert list(end_to_end.remaining(comparison)) == [(0, "renma"), (1, "trl"), (1, "renma")]
    assert [r["side"] for r in comparison.records()] == ["trl"]
    other = end_to_end.Comparison(options("--set", "rollout.group_size=4"))
    assert other.records() == [] and len(list(end_to_end.remaining(other))) == 4
    assert end_to_end.Comparison(options("--time-to-accuracy", "--runs", "2")).records() == []


def test_every_run_has_tasks_of_its_own(tmp_path):
    options = end_to_end.parsed(["--recipe", "quickstart", "--work", str(tmp_path), "--out", str(tmp_path / "o.json")])
    comparison = end_to_end.Comparison(options)
    recipes = [comparison.recipe(run, 3)[0] for run in range(2)]
    assert [recipe.seed for recipe in recipes] == [1, 2]
    assert {recipe.training.steps for recipe in recipes} == {3}


def test_the_policy_without_its_set_of_tokens_is_the_same_files(folder, tmp_path):
    linked = end_to_end.emitting_all(folder, tmp_path)
    assert {file.name for file in folder.iterdir()} - {file.name for file in linked.iterdir()} == {"renma.json"}
    assert (linked / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
