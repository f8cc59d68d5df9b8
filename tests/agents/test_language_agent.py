from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from renma.agents.agent import LanguageAgent
from renma.agents.base import ContextFull
from renma.agents.parsers.json_tags import JsonTagsParser
from renma.agents.parsers.plain import PlainParser
from renma.agents.renderers.chat import ChatRenderer
from renma.agents.renderers.plain import PlainRenderer
from renma.environments.base import Environment
from renma.errors import ContextOverflow
from renma.inference.base import SamplingParams
from renma.rollout.episode import EpisodeRules, run_episode
from renma.types import Message, Observation, Step, StepResult, Task

TOOLS = [{"type": "function", "function": {"name": "add", "description": "a + b", "parameters": {}}}]


def agent_of(engine, tokenizer, renderer, parser, **options):
    options = {"seeds": lambda turn: 100 + turn, "key": (7, 2), **options}
    sampling = options.pop("sampling", SamplingParams(max_tokens=32))
    return LanguageAgent(engine, tokenizer, renderer, parser, sampling, **options)


def play(agent, *observations):
    async def turns():
        return [await agent.act(observation) for observation in observations]

    return asyncio.run(turns())


def row_of(turns):
    """One training row: its ids, and 1 at each trained position."""
    ids, mask = [], []
    for turn in turns:
        prompt = turn.prompt_ids.tolist()
        assert prompt[: len(ids)] == ids
        mask += [0] * (len(prompt) - len(ids)) + [1] * len(turn.sample.ids)
        ids = prompt + turn.sample.ids.tolist()
    return ids, mask


def test_a_plain_episode(tokenizer, scripted):
    renderer = PlainRenderer(tokenizer)
    script = [renderer.encode_action("Call: calc(1+2)\n"), renderer.encode_action("Answer: 3\n")]
    engine = scripted(script)
    agent = agent_of(engine, tokenizer, renderer, PlainParser())
    call, answer = play(agent, Observation.of("1+2?"), Observation.of("3", "tool"))
    assert call.action.tool_calls[0].id == "call_0_0" and call.action.raw == "Call: calc(1+2)\n"
    assert answer.action.text == "3"
    assert tokenizer.decode(engine.prompts[1]) == "Question: 1+2?\nCall: calc(1+2)\nResult: 3\n"
    assert engine.keys == [(7, 2, 0), (7, 2, 1)]
    assert [params.seed for params in engine.params] == [100, 101]
    assert call.prompt_ids.dtype == np.int32 and call.sample.ids.tolist() == script[0]


def test_the_renderers_stops_are_added_to_the_recipes(tokenizer, scripted):
    engine = scripted([[5]])
    sampling = SamplingParams(max_tokens=9, temperature=0.7, stop_ids=(11,), stop_strings=(";",))
    play(agent_of(engine, tokenizer, PlainRenderer(tokenizer), PlainParser(), sampling=sampling), Observation.of("q"))
    (params,) = engine.params
    assert params.stop_ids == (11, tokenizer.eos_token_id) and params.stop_strings == (";", "\n")
    assert params.temperature == 0.7 and params.max_tokens == 9


def test_case_1_3_history_keeps_the_calls(tokenizer, template, scripted):
    renderer = ChatRenderer(tokenizer, chat_template=template("chatml"))
    said = 'Adding.<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call><|im_end|>'
    script = [renderer.encode_action(said), renderer.encode_action("3<|im_end|>")]
    engine = scripted(script)
    agent = agent_of(engine, tokenizer, renderer, JsonTagsParser(), tools=TOOLS)
    result = Observation((Message("tool", "3", tool_call_id="call_0_0"),))
    first, second = play(agent, Observation.of("1+2?"), result)
    assert first.action.text == "Adding." and first.action.raw == said
    assert agent.messages[1].tool_calls == first.action.tool_calls
    assert second.action.text == "3" and len(agent.messages) == 4
    assert '"arguments": {"a": 1, "b": 2}' in tokenizer.decode(engine.prompts[1])
    assert engine.prompts[1][: len(engine.prompts[0]) + len(script[0])] == engine.prompts[0] + script[0]


@pytest.mark.parametrize("name", ["chatml", "strips_thinking", "next_marker", "plain"])
def test_case_1_5_the_trained_positions_are_the_sampled_ones(tokenizer, template, scripted, name):
    plain = name == "plain"
    renderer = PlainRenderer(tokenizer) if plain else ChatRenderer(tokenizer, chat_template=template(name))
    script = [[300, 301, 302], [5], [310, renderer.stop_ids[0]]]
    agent = agent_of(scripted(script), tokenizer, renderer, PlainParser() if plain else JsonTagsParser())
    turns = play(agent, Observation.of("q"), Observation.of("r", "tool"), Observation.of("s"))
    ids, mask = row_of(turns)
    assert mask[0] == 0 and sum(mask) == 6
    assert [i for i, trained in zip(ids, mask, strict=True) if trained] == [i for action in script for i in action]


def test_case_1_7_only_what_was_sampled_is_trained(tokenizer, template, scripted):
    for renderer in (PlainRenderer(tokenizer), ChatRenderer(tokenizer, chat_template=template("chatml"))):
        rows = []
        for shot in ("4", "5"):
            example = Observation((Message("user", "2+2?"), Message("assistant", shot), Message("user", "1+1?")))
            agent = agent_of(scripted([[300, 301]]), tokenizer, renderer, PlainParser())
            rows.append(row_of(play(agent, example)))
        (one, mask), (other, _) = rows
        assert mask == [0] * (len(one) - 2) + [1, 1]
        assert one != other, "prompts that differ in their example are different prompts"


def test_case_1_12_a_prompt_that_leaves_no_room_sends_nothing(tokenizer, scripted):
    renderer = PlainRenderer(tokenizer, user="{content}", tool="{content}")
    piece = tokenizer.encode("q")
    assert len(piece) == 1
    engine = scripted([[300, 301, tokenizer.encode("\n")[0]]], context=20)
    agent = agent_of(engine, tokenizer, renderer, PlainParser(), sampling=SamplingParams(max_tokens=64))
    (turn,) = play(agent, Observation.of("q" * 12))
    assert len(turn.prompt_ids) == 12 and engine.params[0].max_tokens == 8, "never asked for more than fits"
    before = agent.messages
    with pytest.raises(ContextFull, match="25 tokens; the context is 20"):
        play(agent, Observation.of("q" * 10, "tool"))
    assert len(engine.prompts) == 1 and agent.messages == before


def test_case_1_12_one_token_of_room_is_room(tokenizer, scripted):
    renderer = PlainRenderer(tokenizer, user="{content}")
    engine = scripted([[300]], context=100)
    (turn,) = play(agent_of(engine, tokenizer, renderer, PlainParser(), context=13), Observation.of("q" * 12))
    assert engine.params[0].max_tokens == 1 and turn.sample.stop_reason == "length"
    with pytest.raises(ContextFull):
        play(agent_of(engine, tokenizer, renderer, PlainParser(), context=12), Observation.of("q" * 12))


def test_an_engine_that_overflows_all_the_same_is_a_full_context(tokenizer, scripted):
    class Refusing(scripted):
        async def sample(self, prompt_ids, params, *, key=()):
            raise ContextOverflow("the prompt does not fit")

    with pytest.raises(ContextFull, match="does not fit"):
        play(agent_of(Refusing([]), tokenizer, PlainRenderer(tokenizer), PlainParser()), Observation.of("q"))


def test_case_1_14_control_tokens_that_the_parser_reads_are_stored(tokenizer, template, scripted):
    opens, closes = tokenizer.convert_tokens_to_ids(["<tool_call>", "</tool_call>"])
    inner = tokenizer.encode(json.dumps({"name": "add"}), add_special_tokens=False)
    script = [[300, opens, *inner, closes]]
    renderer = ChatRenderer(tokenizer, chat_template=template("chatml"))
    agent = agent_of(scripted(script), tokenizer, renderer, JsonTagsParser(), tools=TOOLS)
    (turn,) = play(agent, Observation.of("q"))
    assert turn.action.tool_calls[0].name == "add" and "<tool_call>" not in turn.action.text
    step = Step(turn.prompt_ids, turn.sample.ids, turn.sample.logprobs, turn.sample.versions, turn.action)
    assert step.action_ids.tolist() == script[0]
    assert len(step.action_ids) == len(step.logprobs) == len(step.versions)


def test_case_4_3_and_4_4_a_bad_call_keeps_its_place_and_gets_an_id(tokenizer, template, scripted):
    renderer = ChatRenderer(tokenizer, chat_template=template("chatml"))
    text = '<tool_call>{"name": "add" 1}</tool_call><tool_call>{"name": "add"}</tool_call><|im_end|>'
    script = [renderer.encode_action(text), renderer.encode_action("ok<|im_end|>")]
    agent = agent_of(scripted(script), tokenizer, renderer, JsonTagsParser(), tools=TOOLS)
    results = Observation(tuple(Message("tool", "r", tool_call_id=f"call_0_{i}") for i in range(2)))
    first, second = play(agent, Observation.of("q"), results)
    bad, good = first.action.tool_calls
    assert (bad.id, good.id) == ("call_0_0", "call_0_1") and bad.error and not good.error
    assert second.action.text == "ok"


def test_the_parser_is_told_which_tools_there_are(tokenizer, template, scripted):
    renderer = ChatRenderer(tokenizer, chat_template=template("chatml"))
    script = [renderer.encode_action('{"name": "add", "arguments": {"a": 1}}<|im_end|>')]
    agent = agent_of(scripted(script), tokenizer, renderer, JsonTagsParser(bare_json=True), tools=TOOLS)
    (turn,) = play(agent, Observation.of("q"))
    assert turn.action.tool_calls[0].arguments == {"a": 1}


def test_an_engine_error_leaves_the_agent_as_it_was(tokenizer, scripted):
    engine = scripted([[300]])
    agent = agent_of(engine, tokenizer, PlainRenderer(tokenizer), PlainParser())
    engine.script = []
    with pytest.raises(IndexError):
        play(agent, Observation.of("q"))
    engine.script = [[300]]
    (turn,) = play(agent, Observation.of("q"))
    assert tokenizer.decode(turn.prompt_ids) == "Question: q\n" and len(agent.messages) == 2


class Asking(Environment):
    """Never ends by itself; cuts the episode at `cut` steps where that is given."""

    max_turns = 9

    def __init__(self, cut=None):
        self.n, self.cut = 0, cut

    def reset(self, task):
        return task.prompt

    def step(self, action):
        self.n += 1
        seen = Observation((Message("tool", f"r{self.n}"), Message("user", "and?" * self.n)))
        return StepResult(seen, truncated=self.n == self.cut)


@pytest.mark.parametrize("name", ["plain", "chatml append", "chatml rerender", "strips_thinking rerender"])
@pytest.mark.parametrize("limit", ["turns", "environment", "context"])
def test_the_next_prompt_is_what_the_policy_would_have_seen(tokenizer, template, scripted, name, limit):
    if name == "plain":
        renderer = PlainRenderer(tokenizer)
    else:
        text, history = name.split()
        renderer = ChatRenderer(tokenizer, chat_template=template(text), history=history)
    end = renderer.stop_ids[0]
    script = [[300, end], [*tokenizer.encode("<think>hm</think>yes", add_special_tokens=False), end], [301, 302], [303]]

    def episode(rules, cut=None, context=4096):
        def agent(task, member, tools):
            return agent_of(scripted(script), tokenizer, renderer, JsonTagsParser(), context=context)

        return asyncio.run(run_episode(Task("t", "q?"), 0, lambda: Asking(cut), agent, rules))

    whole = episode(EpisodeRules(max_turns=4))
    following = whole.steps[3].prompt_ids
    room = len(following)
    short = {
        "turns": lambda: episode(EpisodeRules(max_turns=3)),
        "environment": lambda: episode(EpisodeRules(), cut=3),
        "context": lambda: episode(EpisodeRules(max_turns=4), context=room),
    }[limit]()
    assert (short.status, short.stop_reason) == ("truncated", "context" if limit == "context" else "step_limit")
    assert len(short.steps) == 3
    assert short.next_prompt_ids.dtype == np.int32 and short.next_prompt_ids.tolist() == following.tolist()


def test_looking_ahead_changes_nothing(tokenizer, scripted):
    renderer = PlainRenderer(tokenizer)
    engine = scripted([renderer.encode_action("a\n"), renderer.encode_action("b\n")])
    agent = agent_of(engine, tokenizer, renderer, PlainParser())
    for observation in (Observation.of("q"), Observation.of("r", "tool")):
        other, before = agent.next_prompt(Observation.of("something else")), agent.messages
        expected = agent.next_prompt(observation)
        assert agent.messages == before and expected != other
        (turn,) = play(agent, observation)
        assert turn.prompt_ids.tolist() == expected
    assert len(engine.prompts) == 2
