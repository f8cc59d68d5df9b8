"""Tokens in, tokens out, on random conversations with a real tokenizer and every format."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from renma.agents.agent import LanguageAgent
from renma.agents.parsers.json_tags import JsonTagsParser
from renma.agents.parsers.plain import PlainParser
from renma.agents.renderers.chat import ChatRenderer
from renma.agents.renderers.plain import PlainRenderer
from renma.inference.base import SamplingParams
from renma.types import Message, Observation

TEXT = st.text(st.characters(exclude_categories=[]), max_size=12) | st.sampled_from(
    ["", "42", "\n", "Result: 1\n", "<|im_end|>", "<tool_call>", "</s>", "東京", '{"name": "add"}']
)
OBSERVATION = st.one_of(
    TEXT.map(lambda text: [Message("user", text)]),
    st.lists(TEXT.map(lambda text: Message("tool", text, tool_call_id="c")), min_size=1, max_size=3),
    st.tuples(TEXT, TEXT).map(lambda pair: [Message("tool", pair[0]), Message("user", pair[1])]),
)
WRITTEN = st.sampled_from(
    [
        "Call: calc(1+2)\n",
        "Answer: 3\n\n",
        "<think>hm",
        '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>',
        "fine<|im_end|>",
        "fine<|user|>",
        "fine</s>",
    ]
)


@st.composite
def sampled(draw):
    """Ids as a policy may sample them: anything; or known text cut where its own encoding would not be cut."""
    if draw(st.booleans()):
        return draw(st.lists(st.integers(0, 10**6), max_size=8))
    text = draw(WRITTEN)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=4)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.fixture(scope="module")
def formats(tokenizer, template):
    chat = {
        f"{name} {history}": (
            ChatRenderer(tokenizer, chat_template=template(name), history=history),
            JsonTagsParser(bare_json=True, tools=["add"]),
        )
        for name in ("chatml", "strips_thinking", "next_marker")
        for history in ("append", "rerender")
    }
    return {"plain": (PlainRenderer(tokenizer, header="Work it out."), PlainParser()), **chat}


FORMATS = [
    "plain",
    *(
        f"{name} {history}"
        for name in ("chatml", "strips_thinking", "next_marker")
        for history in ("append", "rerender")
    ),
]


@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(OBSERVATION, sampled()), min_size=1, max_size=4))
def test_what_was_sampled_is_what_is_trained(formats, scripted, tokenizer, name, conversation):
    renderer, parser = formats[name]
    script = [
        [
            i
            for part in said
            for i in ([part % len(tokenizer)] if isinstance(part, int) else renderer.encode_action(part))
        ]
        for _, said in conversation
    ]
    engine = scripted(script)
    agent = LanguageAgent(
        engine, tokenizer, renderer, parser, SamplingParams(max_tokens=16), seeds=lambda turn: turn, key=()
    )

    async def play():
        return [await agent.act(Observation(tuple(new))) for new, _ in conversation]

    turns = asyncio.run(play())
    assert [turn.sample.ids.tolist() for turn in turns] == script, "no sampled id is altered"
    assert [turn.prompt_ids.tolist() for turn in turns] == engine.prompts, "what is stored is what was sent"
    trained, row = 0, []
    for turn in turns:
        prompt, action = turn.prompt_ids.tolist(), turn.sample.ids.tolist()
        if "rerender" not in name:
            assert prompt[: len(row)] == row, "each prompt begins with the one before and its action"
            assert not row or len(prompt) > len(row)
        mask = [0] * len(prompt) + [1] * len(action)
        trained += sum(mask)
        row = prompt + action
    assert trained == sum(len(turn.sample.logprobs) for turn in turns) == sum(map(len, script))
