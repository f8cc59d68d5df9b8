from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from renma.agents.calls import MAX_DEPTH, CallError, arguments_of, decode_json
from renma.agents.parsers.json_tags import JsonTagsParser
from renma.errors import RecipeError
from renma.types import ToolCall


def parse(text: str, **options):
    return JsonTagsParser(**options).parse([], text)


def tag(value: object) -> str:
    body = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"<tool_call>{body}</tool_call>"


def test_text_and_calls_are_told_apart():
    action = parse("Let me see. " + tag({"name": "add", "arguments": {"a": 1}}) + " Done.")
    assert action.text == "Let me see.  Done."
    assert action.tool_calls == (ToolCall("add", {"a": 1}),)


def test_case_4_1_a_call_ends_where_its_json_ends():
    action = parse(tag('{"name":"write","arguments":{"text":"end </tool_call> tag"}}'))
    assert action.tool_calls == (ToolCall("write", {"text": "end </tool_call> tag"}),)
    assert action.text == ""
    other = parse(tag({"name": "write", "arguments": {"text": "<tool_call><think></think>"}}) + "ok")
    assert other.tool_calls == (ToolCall("write", {"text": "<tool_call><think></think>"}),) and other.text == "ok"


def test_case_4_3_bad_json_is_an_error_and_the_next_call_stands():
    text = tag('{"name": "run", "arguments": {"cmd": "ls" "x": 1}}') + tag({"name": "add", "arguments": {"a": 1}})
    bad, good = parse(text).tool_calls
    assert bad.name == "run" and bad.error is not None and bad.error.startswith("invalid JSON")
    assert good == ToolCall("add", {"a": 1})


def test_case_4_3_an_unclosed_bad_call_does_not_swallow_the_next():
    bad, good = parse('<tool_call>{"name": "run", oops\n' + tag({"name": "add", "arguments": {}})).tool_calls
    assert bad.error is not None and good == ToolCall("add", {})


@pytest.mark.parametrize("listed", [True, False])
def test_case_4_4_each_call_stands_alone(listed):
    calls = [{"name": "add", "arguments": 7}, {"arguments": {}}, {"name": "add", "arguments": {"a": 1, "b": 2}}]
    text = tag(calls) if listed else "".join(map(tag, calls))
    first, second, third = parse(text).tool_calls
    assert first.error is not None and "arguments must be a JSON object" in first.error
    assert second.error is not None and 'no "name"' in second.error
    assert third == ToolCall("add", {"a": 1, "b": 2})


@pytest.mark.parametrize("name", ["", 3, None, ["add"], {"a": 1}])
def test_case_4_4_a_name_must_be_text(name):
    (call,) = parse(tag({"name": name, "arguments": {}})).tool_calls
    assert call.error is not None


def test_case_4_8_json_without_tags_is_text():
    rex = 'Think of {"name": "Rex", "legs": 4}.'
    assert parse(rex).tool_calls == () and parse(rex).text == rex
    call = '{"name":"add","arguments":{"a":1,"b":2}}'
    assert parse(call).tool_calls == ()
    parser = JsonTagsParser(bare_json=True).with_tools(["add"])
    assert parser.parse([], rex).tool_calls == ()
    assert parser.parse([], rex).text == rex
    assert parser.parse([], call).tool_calls == (ToolCall("add", {"a": 1, "b": 2}),)
    fenced = parser.parse([], f"{rex} So:\n```json\n{call}\n```")
    assert fenced.tool_calls == (ToolCall("add", {"a": 1, "b": 2}),) and fenced.text == f"{rex} So:"
    assert parser.parse([], '{"name": ["add"]} {"name": {"add": 1}}').tool_calls == ()
    assert JsonTagsParser(bare_json=True).parse([], call).tool_calls == (), "no tool is known"


def test_case_4_8_a_call_inside_thinking_is_none():
    call = tag({"name": "add", "arguments": {}})
    action = parse(f"<think>maybe {call}</think>No.")
    assert action.tool_calls == () and action.text == "No." and action.thinking == f"maybe {call}"
    opened_by_the_prompt = parse(f"maybe {call} or not</think>Yes.{call}")
    assert len(opened_by_the_prompt.tool_calls) == 1 and opened_by_the_prompt.text == "Yes."
    assert opened_by_the_prompt.thinking == f"maybe {call} or not"
    assert parse(f"<think>cut {call}").tool_calls == ()
    assert parse(f"cut {call}", starts_thinking=True).tool_calls == ()
    bare = JsonTagsParser(bare_json=True, tools=["add"]).parse([], '<think>{"name":"add"}</think>')
    assert bare.tool_calls == ()
    assert len(parse(f"<think>{call}", think=None).tool_calls) == 1


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
def test_case_4_12_arguments_may_be_text_or_object(arguments):
    assert parse(tag({"name": "add", "arguments": arguments})).tool_calls == (ToolCall("add", {"a": 1}),)


@pytest.mark.parametrize("call", [{"arguments": ""}, {"arguments": None}, {"arguments": {}}, {"arguments": "{}"}, {}])
def test_case_4_12_empty_arguments(call):
    assert parse(tag({"name": "look", **call})).tool_calls == (ToolCall("look", {}),)


def test_case_4_10_text_survives_and_a_lone_surrogate_does_no_harm():
    (call,) = parse(tag({"name": "say", "arguments": {"城市": "東京 🙂 שלום"}})).tool_calls
    assert call.arguments == {"城市": "東京 🙂 שלום"}
    (call,) = parse(tag('{"name": "say", "arguments": {"x": "a\\ud83d", "y": "\\ud83d\\ude42"}}')).tool_calls
    assert call.arguments == {"x": "a\ufffd", "y": "🙂"}


def test_a_missing_closing_tag_at_the_end_is_forgiven_and_garbage_is_not():
    assert parse('<tool_call>{"name": "look"}').tool_calls == (ToolCall("look", {}),)
    (call,) = parse('<tool_call>{"name": "look"}}</tool_call>').tool_calls
    assert call.name == "look" and call.error is not None


@pytest.mark.parametrize("bad", ["NaN", "-Infinity", "1e999", "9" * 5000, "[" * 5000, '{"a":' * 40 + "1" + "}" * 40])
def test_values_that_nothing_could_take_are_errors(bad):
    (call,) = parse(f'<tool_call>{{"name": "f", "arguments": {{"x": {bad}}}}}</tool_call>').tool_calls
    assert call.error is not None and "invalid JSON" in call.error


def test_the_depth_limit_is_the_stated_one():
    decode_json("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    with pytest.raises(CallError, match="nested"):
        decode_json("[" * (MAX_DEPTH + 2) + "]" * (MAX_DEPTH + 2))
    with pytest.raises(CallError, match="a boolean"):
        arguments_of(True)


def test_tags_must_differ():
    with pytest.raises(RecipeError, match="different"):
        JsonTagsParser(open="<x>", close="<x>")


PIECES = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        '{"name": "add"',
        ', "arguments": ',
        '{"a": 1}',
        "}",
        "[",
        "]",
    ]
)


@settings(deadline=None, max_examples=150)
@given(
    st.lists(PIECES | st.text(st.characters(exclude_categories=[]), max_size=6), max_size=14).map("".join),
    st.booleans(),
    st.booleans(),
)
def test_parsing_never_raises(text, bare, thinking):
    parser = JsonTagsParser(bare_json=bare, starts_thinking=thinking, tools=["add"])
    action = parser.parse([], text)
    assert action.raw == text
    for call in action.tool_calls:
        assert call.name or call.error
        json.dumps(dict(call.arguments), ensure_ascii=False, allow_nan=False).encode()
    action.text.encode()
