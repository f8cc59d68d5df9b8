"""Where preferences come from: a run's stored groups, files, and the policy's own attempts."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from renma.agents.agent import LanguageAgent
from renma.agents.parsers.plain import PlainParser
from renma.agents.renderers.chat import ChatRenderer
from renma.agents.renderers.encoding import decode
from renma.errors import DataError, RecipeError
from renma.inference.base import SamplingParams
from renma.learning.rows import rows_of
from renma.parts import build
from renma.preferences import LABEL, PREFERENCE, PREFERENCES, SUPPLIED, Judgements, Preferences
from renma.preferences.base import best_and_worst, chosen_and_rejected, split, with_noise
from renma.preferences.outcomes import from_outcomes
from renma.preferences.written import action_encoder, writer_for
from renma.recipe import Component
from renma.recipe_load import load_recipe
from renma.rollout.store import TrajectoryStore
from renma.training.reward_stage import preference_source
from renma.training.setup import Parts, assemble
from renma.types import Group, Message, Task, Trajectory
from tests.end_to_end.tiny import TINY
from tests.learning.tiny import make_trajectory

TEMPLATES = Path(__file__).parent.parent / "fixtures" / "templates"


@cache
def parts() -> Parts:
    return assemble(load_recipe({**TINY, "cold_start": None, "evaluation": {}}))


def source(type: str, **options: Any) -> Any:
    return preference_source(parts(), Component(type=type, **options), "preferences")


def pairs(type: str, **options: Any) -> list[Group]:
    found: list[Group] = asyncio.run(source(type, **options).pairs())
    return found


def judged(type: str, **options: Any) -> list[Group]:
    found: list[Group] = asyncio.run(source(type, **options).judged())
    return found


def file(folder: Path, rows: Sequence[dict[str, Any]]) -> str:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def shown(trajectory: Trajectory) -> str:
    """The whole text of a trajectory whose prompts extend what came before."""
    last = trajectory.steps[-1]
    return decode(parts().policy.tokenizer, [*last.prompt_ids.tolist(), *last.action_ids.tolist()])


# Files


def test_a_text_pair_is_written_as_the_policy_would_see_it(tmp_path: Path) -> None:
    [group] = pairs(
        "jsonl", path=file(tmp_path, [{"prompt": "1 + 2 =", "chosen": "Answer: 3", "rejected": "Answer: 4\n"}])
    )
    chosen, rejected = chosen_and_rejected(group)
    assert shown(chosen) == "Question: 1 + 2 =\nAnswer: 3\n"
    assert shown(rejected) == "Question: 1 + 2 =\nAnswer: 4\n"
    assert (chosen.rewards, rejected.rewards) == ({PREFERENCE: 1.0}, {PREFERENCE: 0.0})
    assert np.isnan(chosen.steps[0].logprobs).all(), "no policy sampled it"
    assert chosen.steps[0].prompt_ids.tolist() == parts().renderer.start([Message("user", "1 + 2 =")])
    [row] = rows_of(chosen, 0, demonstration=True)
    assert row.trained.sum() == chosen.sampled_tokens == len(chosen.steps[0].action_ids)


def test_a_conversation_of_several_turns_trains_every_assistants_message(tmp_path: Path) -> None:
    chosen = [
        {"role": "assistant", "content": "Call: calc(1+2)"},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "Answer: 3"},
    ]
    rejected = [{"role": "assistant", "content": "Answer: 5"}]
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 2 ="}]
    [group] = pairs("jsonl", path=file(tmp_path, [{"prompt": prompt, "chosen": chosen, "rejected": rejected}]))
    long, short = chosen_and_rejected(group)
    assert shown(long) == "Be brief.\nQuestion: 1 + 2 =\nCall: calc(1+2)\nResult: 3\nAnswer: 3\n"
    assert [len(t.steps) for t in (long, short)] == [2, 1]
    assert long.steps[0].action.tool_calls[0].name == "calc"
    assert long.steps[0].observation.messages[0].text == "3"
    [row] = rows_of(long, 0, demonstration=True)
    trained = decode(parts().policy.tokenizer, row.ids[row.trained].tolist())
    assert trained == "Call: calc(1+2)\nAnswer: 3\n"


def test_without_a_prompt_column_the_shared_beginning_is_the_prompt(tmp_path: Path) -> None:
    start = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "1 + 2 ="},
    ]
    row = {
        "good": [*start, {"role": "assistant", "content": "Answer: 3"}],
        "bad": [*start, {"role": "assistant", "content": "Answer: 4"}],
    }
    [group] = pairs("jsonl", path=file(tmp_path, [row]), chosen="good", rejected="bad")
    assert [len(t.steps) for t in group.trajectories] == [1, 1]
    assert shown(group.trajectories[0]).endswith("Question: 1 + 2 =\nAnswer: 3\n")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "1", "chosen": "a"}, "line 1: there is no column 'rejected'"),
        ({"prompt": "1", "chosen": "a", "rejected": "a"}, "line 1: chosen and rejected are the same"),
        ({"prompt": "1", "chosen": 3, "rejected": "a"}, "line 1: 'chosen' must be text or a list"),
        (
            {"prompt": "1", "chosen": [{"role": "robot", "content": "a"}], "rejected": "a"},
            "line 1: .*'chosen' needs a role",
        ),
        (
            {"prompt": "1", "chosen": [{"role": "user", "content": "a"}], "rejected": "b"},
            "line 1: .*begin with an assist",
        ),
        (
            {"prompt": "1", "chosen": [{"role": "assistant", "content": "a"}] * 2, "rejected": "b"},
            "line 1: two assistant's messages follow",
        ),
        (
            {"prompt": "1", "chosen": [{"role": "assistant", "content": "", "tool_calls": [{}]}], "rejected": "b"},
            "line 1: .*has tool_calls",
        ),
        ({"prompt": "1", "chosen": "two\nlines", "rejected": "b"}, r"line 1: .*goes on after '\\n'"),
        ({"prompt": [], "chosen": "a", "rejected": "b"}, "line 1: there is no prompt"),
        ({"prompt": "1 + " * 200, "chosen": "a", "rejected": "b"}, "line 1: turn 0.*context.*drop_long"),
    ],
)
def test_mistakes_in_a_file_name_the_line(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        pairs("jsonl", path=file(tmp_path, [row]))


def test_long_pairs_can_be_left_out_and_are_counted(tmp_path: Path) -> None:
    good = {"prompt": "1", "chosen": "a", "rejected": "b"}
    path = file(tmp_path, [{**good, "prompt": "1 + " * 200}, good, {**good, "chosen": "1" * 300}, good])
    made = source("jsonl", path=path, drop_long=True)
    assert len(asyncio.run(made.pairs())) == 2
    assert made.dropped == 2
    assert len(pairs("jsonl", path=path, drop_long=True, limit=1)) == 1


def test_step_labels_come_with_their_steps(tmp_path: Path) -> None:
    said = [
        {"role": "assistant", "content": "Call: calc(1+2)"},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "Answer: 4"},
    ]
    row = {"prompt": "1 + 2 =", "said": said, "labels": [1, None]}
    [group] = judged("step_labels", path=file(tmp_path, [row, row]), limit=1)
    [trajectory] = group.trajectories
    assert [dict(step.reward) for step in trajectory.steps] == [{LABEL: 1.0}, {}]
    for labels in ([1], [1, 2], "good", [1, "bad"]):
        with pytest.raises(DataError, match="line 1: "):
            judged("step_labels", path=file(tmp_path, [{**row, "labels": labels}]))


@pytest.mark.parametrize("template", ["chatml", "next_marker"])
def test_through_a_chat_template_an_action_ends_with_the_stop_token(template: str) -> None:
    tokenizer = parts().policy.tokenizer
    own = copy.deepcopy(tokenizer)
    own.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>"]})
    renderer = ChatRenderer(own, chat_template=(TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8"))
    ids = action_encoder(renderer)("Answer: 3")
    assert ids[-1] in renderer.stop_ids
    assert decode(own, ids[:-1]) == "Answer: 3"
    assert action_encoder(renderer)(decode(own, ids)) == ids, "a text that has its stop keeps it once"

    def agent(engine: Any, task: Task, member: int, tools: Any, seeds: Any, key: Any) -> LanguageAgent:
        return LanguageAgent(engine, own, renderer, PlainParser(), SamplingParams(), seeds=seeds, key=key)

    runner = replace(parts().runner, make_agent=agent)

    async def write() -> Trajectory:
        writer = await writer_for(runner, renderer)
        said = [Message("assistant", "Hi"), Message("user", "1 + 2 ="), Message("assistant", "Answer: 3")]
        return await writer.trajectory(Task("t", "Hello"), 0, [Message("user", "Hello")], said)

    trajectory = asyncio.run(write())
    [row] = rows_of(trajectory, 0, demonstration=True)
    assert [step.action_ids[-1] in renderer.stop_ids for step in trajectory.steps] == [True, True]
    assert row.trained.sum() == trajectory.sampled_tokens


# A run's own groups


def member(number: int, ret: float, *, success: bool | None = None, actions: Sequence[int] = (1, 2)) -> Trajectory:
    tokenizer = parts().policy.tokenizer
    context: list[int] = [5]
    turns = []
    for action in actions:
        turns.append((list(context), [action]))
        context += [action, 6]
    one = make_trajectory(turns)
    steps = tuple(
        replace(step, action=replace(step.action, raw=decode(tokenizer, step.action_ids.tolist())))
        for step in one.steps
    )
    return replace(one, member=number, rewards={"true": ret}, success=success, steps=steps)


def stored(folder: Path, batches: Sequence[Sequence[Group]]) -> str:
    with TrajectoryStore(folder / "trajectories") as store:
        for step, groups in enumerate(batches):
            store.append(step, groups, None)
            store.append(step, groups, None, phase="evaluation/held-out/after")
    return str(folder)


def group(name: str, *members: Trajectory) -> Group:
    task = Task(name, "?")
    return Group(task, tuple(replace(t, task=task) for t in members))


def test_of_a_runs_groups_the_best_stands_against_the_worst(tmp_path: Path) -> None:
    mixed = group("a", member(0, 0.5, actions=[3]), member(1, 1.0, actions=[4]), member(2, 0.0, actions=[5]))
    even = group("b", member(0, 1.0), member(1, 1.0, actions=[9]))
    twins = group("c", member(0, 1.0), member(1, 0.0))
    path = stored(tmp_path, [[mixed, even], [twins, mixed]])
    found = pairs("run", path=path)
    assert [one.task.id for one in found] == ["a", "a"], "nothing to learn where returns or texts are equal"
    for one in found:
        chosen, rejected = chosen_and_rejected(one)
        assert chosen.steps[0].action_ids.tolist() == [4] and rejected.steps[0].action_ids.tolist() == [5]
        assert (chosen.ret, rejected.ret) == (1.0, 0.0)
        assert np.isfinite(chosen.steps[0].logprobs).all(), "the recorded ones are kept"
    assert len(pairs("run", path=path, max_pairs=1)) == 1
    with pytest.raises(DataError, match="no trajectories of phase 'dropped'"):
        pairs("run", path=path, phase="dropped")
    with pytest.raises(DataError, match="holds no trajectories"):
        source("run", path=str(tmp_path / "elsewhere"))


def test_noise_turns_about_its_share_of_labels_and_always_the_same(tmp_path: Path) -> None:
    groups = [group(str(i), member(0, 1.0, actions=[4]), member(1, 0.0, actions=[5])) for i in range(200)]
    path = stored(tmp_path, [groups])

    def turned(noise: float) -> list[bool]:
        return [chosen_and_rejected(one)[0].steps[0].action_ids[0] == 5 for one in pairs("run", path=path, noise=noise)]

    assert not any(turned(0.0)) and all(turned(1.0))
    assert 0.15 < np.mean(turned(0.25)) < 0.35
    assert turned(0.25) == turned(0.25)
    with pytest.raises(RecipeError, match="noise is a probability"):
        pairs("run", path=path, noise=1.5)


def test_a_run_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    one = member(0, 1.0)
    other = replace(one, steps=tuple(replace(s, action=replace(s.action, raw="something else")) for s in one.steps))
    path = stored(tmp_path, [[group("a", other, member(1, 0.0, actions=[7]))]])
    with pytest.raises(DataError, match="another tokenizer"):
        pairs("run", path=path)


def test_a_steps_label_is_the_share_of_those_that_went_on_from_it_and_solved_the_task(tmp_path: Path) -> None:
    members = [
        member(0, 1.0, success=True, actions=[1, 2]),
        member(1, 0.0, success=False, actions=[1, 3]),
        member(2, 1.0, success=True, actions=[1, 3]),
        member(3, 0.0, success=False, actions=[4, 2]),
    ]
    wanted = [[2 / 3, 1.0], [2 / 3, 0.5], [2 / 3, 0.5], [0.0, 0.0]]
    path = stored(tmp_path, [[group("a", *members)]])
    for options in ({}, {"threshold": 0.5}):
        [found] = judged("run", path=path, **options)
        labels = [[step.reward[LABEL] for step in t.steps] for t in found.trajectories]
        assert labels == pytest.approx(np.array(wanted))
    unknown = group("a", member(0, 1.0))
    with pytest.raises(DataError, match="set threshold"):
        from_outcomes([unknown])
    turned = from_outcomes([group("a", *members)], noise=1.0)
    assert [step.reward[LABEL] for step in turned[0].trajectories[0].steps] == pytest.approx([1 / 3, 0.0])


# The policy's own attempts


def test_sampled_pairs_are_judged_by_the_named_verifiers() -> None:
    options = {"groups": 4, "group_size": 4, "rewards": [{"type": "tests.end_to_end.tiny:variety"}]}
    found = pairs("sampled", **options)
    assert found
    for one in found:
        chosen, rejected = chosen_and_rejected(one)
        kinds = [len({int(i) for s in t.steps for i in s.action_ids}) for t in (chosen, rejected)]
        assert kinds[0] > kinds[1]
        assert np.isfinite(chosen.steps[0].logprobs).all()
    again = pairs("sampled", **options)
    assert [t.steps[0].action_ids.tolist() for one in again for t in one.trajectories] == [
        t.steps[0].action_ids.tolist() for one in found for t in one.trajectories
    ]
    with pytest.raises(RecipeError, match="group_size at least 2"):
        source("sampled", group_size=1)


# What they share


def test_every_registered_source_says_what_it_gives() -> None:
    gives = {
        name: [p.__name__ for p in (Preferences, Judgements) if issubclass(PREFERENCES[name], p)]
        for name in PREFERENCES
    }
    assert gives == {
        "jsonl": ["Preferences"],
        "run": ["Preferences", "Judgements"],
        "sampled": ["Preferences", "Judgements"],
        "step_labels": ["Judgements"],
    }
    with pytest.raises(RecipeError, match="preferences.pth: .*'path'"):
        build(PREFERENCES, Component(type="run", pth="x"), "preferences", **dict.fromkeys(SUPPLIED))  # type: ignore[call-arg]


def test_a_share_of_the_tasks_is_held_out_whole() -> None:
    made = [best_and_worst(group(str(i % 10), member(0, 1.0, actions=[4]), member(1, 0.0))) for i in range(40)]
    groups = [one for one in made if one is not None]
    kept, out = split(groups, 0.2, seed=1)
    assert len(kept) + len(out) == 40 and len(out) == 8
    assert not {one.task.id for one in kept} & {one.task.id for one in out}
    assert split(groups, 0.2, seed=1) == (kept, out) != split(groups, 0.2, seed=2)
    assert split(groups, 0.0, seed=1) == (groups, [])
    assert [len(side) for side in split([groups[0]] * 10, 0.2, seed=1)] == [8, 2], "one task: single groups"
    assert [len(side) for side in split(groups[:2], 0.9, seed=1)] == [1, 1], "something is left to train on"
    assert with_noise(groups, 0.0, seed=1) == groups
