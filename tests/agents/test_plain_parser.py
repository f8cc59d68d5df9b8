from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from renma.agents import PARSERS
from renma.agents.parsers.plain import PlainParser
from renma.errors import RecipeError
from renma.types import ToolCall


def parse(text: str):
    return PlainParser().parse([], text)


def test_a_call():
    action = parse("Call: calc((3+4)*2)\n")
    assert action.tool_calls == (ToolCall("calc", {"expression": "(3+4)*2"}),)
    assert action.text == ""


def test_an_answer():
    action = parse(" Answer:  12 \n")
    assert (action.text, action.tool_calls) == ("12", ())


@pytest.mark.parametrize("text", ["", "twelve\n", "call: calc(1)\n", "Answer:\n", "the Answer: 12\n"])
def test_neither_is_only_raw(text):
    action = parse(text)
    assert (action.text, action.tool_calls, action.raw) == ("", (), text)


@pytest.mark.parametrize(
    ("written", "name", "reason"),
    [
        ("calc(3*4", "calc", "closing"),
        ("calc 3*4", "calc", "'('"),
        ("(3*4)", "", "no tool name"),
        ("", "", "no tool name"),
        ("calc(3*4) = 12", "calc", "after the closing"),
    ],
)
def test_a_malformed_call_says_what_is_wrong(written, name, reason):
    (call,) = parse(f"Call: {written}\n").tool_calls
    assert call.name == name and call.error is not None and reason in call.error
    assert "\n" not in call.error


def test_empty_parentheses_are_no_arguments():
    assert parse("Call: look()").tool_calls == (ToolCall("look", {}),)


def test_what_follows_a_call_is_ignored_and_what_precedes_it_is_thinking():
    action = parse("First add.\nCall: calc(1+1)\nCall: calc(2+2)\nResult: 2\nAnswer: 2\n")
    assert [call.arguments["expression"] for call in action.tool_calls] == ["1+1", "2+2"]
    assert action.text == "" and action.thinking == "First add."


def test_prefixes_and_argument_are_options():
    parser = PARSERS["plain"](call_prefix="Act:", answer_prefix="Final:", argument="query")
    assert parser.parse([], "Act: search(cows)").tool_calls == (ToolCall("search", {"query": "cows"}),)
    assert parser.parse([], "Final: 3").text == "3"
    with pytest.raises(RecipeError, match="two different"):
        PlainParser(call_prefix="A:", answer_prefix="A:")


@settings(deadline=None, max_examples=200)
@given(st.text(st.characters(exclude_categories=[]), max_size=80) | st.text("Cal: ()Answer\n", max_size=60))
def test_parsing_never_raises_and_text_is_an_answer(text):
    action = parse(text)
    assert action.raw == text
    assert not (action.text and action.tool_calls)
    assert not action.text or "Answer:" in text
    action.text.encode()
