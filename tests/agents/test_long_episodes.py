"""Case 8.5: a turn costs what is new in it, and the ids are those of the whole conversation, rendered at once."""

from __future__ import annotations

import asyncio
import warnings
from collections import Counter

import pytest

from renma.agents.agent import LanguageAgent
from renma.agents.parsers.json_tags import JsonTagsParser
from renma.agents.parsers.plain import PlainParser
from renma.agents.renderers import encoding
from renma.agents.renderers.chat import ChatRenderer
from renma.agents.renderers.plain import PlainRenderer
from renma.inference.base import SamplingParams
from renma.learning.rows import rows_of
from renma.types import Message, Observation, Step, Task, Trajectory

FORMATS = ["plain", "chatml", "next_marker", "strips_thinking"]
ENDS = {"chatml": "<|im_end|>", "next_marker": "<|observation|>", "strips_thinking": "<|im_end|>"}
QUESTION = "How much is it?"


def made(tokenizer, template, name, **options):
    if name == "plain":
        return PlainRenderer(tokenizer, header="Sums.", **options), PlainParser()
    return ChatRenderer(tokenizer, chat_template=template(name), **options), JsonTagsParser()


def action_text(name, turn):
    if name == "plain":
        return f"Call: add({turn}+1)\n"
    line = "\n" if name == "chatml" else ""
    return f'<tool_call>{line}{{"name": "add", "arguments": {{"a": {turn}}}}}{line}</tool_call>{ENDS[name]}'


def played(tokenizer, template, scripted, name, turns, **options):
    """(renderer, agent, steps) of an episode of tool calls, each answered by a number of its own."""
    renderer, parser = made(tokenizer, template, name, **options)
    script = [renderer.encode_action(action_text(name, turn)) for turn in range(turns)]
    engine = scripted(script, context=10**6)
    agent = LanguageAgent(
        engine, tokenizer, renderer, parser, SamplingParams(max_tokens=64), seeds=lambda turn: turn, key=(0,)
    )

    async def play():
        steps = []
        observation = Observation.of(QUESTION)
        for number in range(turns):
            turn = await agent.act(observation)
            observation = Observation((Message("tool", str(1000 + number)),))
            sample = turn.sample
            steps.append(Step(turn.prompt_ids, sample.ids, sample.logprobs, sample.versions, turn.action, observation))
        return steps

    return renderer, agent, asyncio.run(play())


@pytest.fixture
def work(monkeypatch, tokenizer):
    """What is done per kind: messages through the template, characters encoded, ids decoded."""
    done: Counter[str] = Counter()
    kind = type(tokenizer)
    render, encode, decode = kind.apply_chat_template, kind.encode, encoding.decode

    def counting_render(self, conversation, **options):
        done["messages"] += len(conversation)
        return render(self, conversation, **options)

    def counting_encode(self, text, **options):
        done["characters"] += len(text)
        return encode(self, text, **options)

    def counting_decode(tokenizer, ids):
        done["ids"] += len(ids)
        return decode(tokenizer, ids)

    monkeypatch.setattr(kind, "apply_chat_template", counting_render)
    monkeypatch.setattr(kind, "encode", counting_encode)
    monkeypatch.setattr(encoding, "decode", counting_decode)
    monkeypatch.setattr("renma.agents.agent.decode", counting_decode)
    return done


@pytest.mark.parametrize("name", FORMATS)
def test_case_8_5_two_hundred_turns_render_three_messages_each(tokenizer, template, scripted, work, name):
    made(tokenizer, template, name)
    before = work["messages"]  # of finding out what the template does
    played(tokenizer, template, scripted, name, 200)
    assert work["messages"] - 2 * before <= 3 * 200


@pytest.mark.parametrize("name", FORMATS)
def test_case_8_5_the_ids_are_those_of_the_slow_way(tokenizer, template, scripted, name):
    _, agent, steps = played(tokenizer, template, scripted, name, 200)
    for turns in (1, 2, 50, 200):  # the conversation that the prompt of each of these turns shows
        history = agent.messages[: 2 * turns - 1]
        if name == "plain":
            words = [f"Question: {QUESTION}\n"]
            words += [action_text(name, t) + f"Result: {1000 + t}\n" for t in range(turns - 1)]
            whole = tokenizer.encode("Sums.\n" + "".join(words), add_special_tokens=False)
            seen = steps[turns - 1].prompt_ids.tolist()
            assert seen[-len(whole) :] == whole and len(seen) - len(whole) <= 1, "the same, after a BOS at most"
        else:
            slow = made(tokenizer, template, name)[0].start(history)
            assert steps[turns - 1].prompt_ids.tolist() == slow


@pytest.mark.parametrize("name", FORMATS)
def test_case_8_5_twice_the_turns_are_twice_the_work(tokenizer, template, scripted, work, name):
    made(tokenizer, template, name)
    probing, costs = Counter(work), []
    for turns in (50, 100, 200):
        work.clear()
        _, _, steps = played(tokenizer, template, scripted, name, turns)
        work.subtract(probing)
        buffers = {id(step.prompt_ids.base): step.prompt_ids.base.nbytes for step in steps}
        costs.append(Counter(work) + Counter(bytes=sum(buffers.values())))
    for less, more in ((costs[0], costs[1]), (costs[1], costs[2])):
        for kind in ("messages", "characters", "ids"):
            assert more[kind] or (name, kind) == ("plain", "messages")
            assert more[kind] <= 2.2 * less[kind], kind
    assert costs[2]["bytes"] <= 4 * 4 * len(steps[-1].prompt_ids), "all prompts together: less than four of the last"


@pytest.mark.parametrize("name", FORMATS)
def test_the_prompts_of_a_long_episode_are_one_row(tokenizer, template, scripted, name, monkeypatch):
    steps = played(tokenizer, template, scripted, name, 60)[2]
    compared = Counter()
    real = Step.goes_on_from.__globals__["np"].array_equal

    def counting(one, other):
        compared["ids"] += len(one)
        return real(one, other)

    monkeypatch.setattr("renma.types.np.array_equal", counting)
    task = Task("t", QUESTION)
    (row,) = rows_of(Trajectory(task, 0, tuple(steps), "done", "answer"), 0)
    assert row.ids.tolist() == [*steps[-1].prompt_ids.tolist(), *steps[-1].action_ids.tolist()]
    assert row.trained.sum() == sum(len(step.action_ids) for step in steps)
    # Actions, and whole prompts only where the tape moved to a larger buffer.
    assert compared["ids"] <= 3 * len(row.ids)


COUNTS = "{{- 'turns: ' ~ (messages | length) ~ '\n' }}"


def test_case_8_5_a_template_that_changes_earlier_text_is_noticed(tokenizer, template, scripted):
    drifting = COUNTS + template("chatml")
    with pytest.warns(UserWarning, match=r"changes what it wrote of earlier turns .*history: rerender"):
        ChatRenderer(tokenizer, chat_template=drifting)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in FORMATS[1:]:
            made(tokenizer, template, name)
        _, agent, steps = played(tokenizer, lambda _: drifting, scripted, "chatml", 6, history="rerender")
        slow = ChatRenderer(tokenizer, chat_template=drifting, history="rerender")
    for turn, step in enumerate(steps):
        assert step.prompt_ids.tolist() == slow.start(agent.messages[: 2 * turn + 1])
    rows = rows_of(Trajectory(Task("t", QUESTION), 0, tuple(steps), "done", "answer"), 0)
    assert [row.ids.tolist() for row in rows] == [[*s.prompt_ids.tolist(), *s.action_ids.tolist()] for s in steps]


def test_where_nothing_changes_a_rerendered_episode_is_one_row_too(tokenizer, template, scripted):
    steps = played(tokenizer, template, scripted, "chatml", 20, history="rerender")[2]
    assert len(rows_of(Trajectory(Task("t", QUESTION), 0, tuple(steps), "done", "answer"), 0)) == 1
    assert len({id(step.prompt_ids.base) for step in steps}) <= 4, "on one tape, which has grown a few times"
