"""Tools: schemas from hints and docstrings, and calls that each stand alone."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from renma.agents.parsers.json_tags import JsonTagsParser
from renma.tools.base import ToolError, clean_text, run_calls, schemas_of, tool, truncate_text
from renma.types import Message, ToolCall


class Place(BaseModel):
    city: str
    floor: int = 0


class Bench:
    def __init__(self) -> None:
        self.ran: list[str] = []

    @tool
    def add(self, a: int, b: int = 10) -> int:
        """Add two numbers.

        More about it that the schema leaves out.

        Args:
            a: the first,
                continued
            b (int): the second
        """
        self.ran.append(f"add {a} {b}")
        return a + b

    @tool(name="lookup")
    async def find(self, key: Literal["x", "y"], schema: Annotated[int, Field(ge=0)] = 0) -> dict[str, str]:
        """Look a thing up."""
        await asyncio.sleep(0)
        return {"城市": "東京", "key": key * (schema + 1)}

    @tool
    def fail(self) -> str:
        raise KeyError("inside\nthe tool")

    @tool
    def refuse(self, text: str) -> str:
        raise ToolError(f"not {text}")

    @tool
    def echo(self, text: str) -> str:
        return text

    @tool
    def stop(self) -> str:
        raise KeyboardInterrupt

    @tool
    def visit(self, place: Place) -> str:
        return f"{place.city} {place.floor}"

    def hidden(self) -> str:
        return "never"


def run(calls: list[ToolCall], limit: int | None = None, owner: object | None = None) -> list[Message]:
    return asyncio.run(run_calls(owner or Bench(), calls, limit=limit))


def texts(calls: list[ToolCall], limit: int | None = None) -> list[str]:
    return [message.text for message in run(calls, limit)]


def test_schema_has_names_types_defaults_and_descriptions() -> None:
    schemas = {schema["function"]["name"]: schema for schema in schemas_of(Bench())}
    assert list(schemas) == ["add", "lookup", "fail", "refuse", "echo", "stop", "visit"]
    assert schemas["add"] == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    "a": {"type": "integer", "description": "the first, continued"},
                    "b": {"type": "integer", "description": "the second", "default": 10},
                },
                "required": ["a"],
            },
        },
    }
    assert schemas["lookup"]["function"]["parameters"]["properties"]["schema"]["minimum"] == 0
    assert schemas["lookup"]["function"]["parameters"]["properties"]["key"]["enum"] == ["x", "y"]
    json.dumps(list(schemas.values()))


def test_a_subclass_keeps_replaces_and_hides_tools() -> None:
    class Child(Bench):
        def fail(self) -> str:  # unmarked: no tool any more
            return ""

        @tool
        def add(self, a: int) -> int:  # type: ignore[override]
            """Only one."""
            return a + 1

    names = [schema["function"]["name"] for schema in schemas_of(Child())]
    assert names == ["add", "lookup", "refuse", "echo", "stop", "visit"]
    assert run([ToolCall("add", {"a": 1})], owner=Child())[0].text == "2"


def test_unusable_definitions_are_refused_with_the_reason() -> None:
    class Unhinted:
        @tool
        def f(self, a) -> str:  # type: ignore[no-untyped-def]
            return ""

    class Starred:
        @tool
        def f(self, *a: int) -> str:
            return ""

    class Twice:
        @tool(name="x")
        def f(self) -> str:
            return ""

        @tool(name="x")
        def g(self) -> str:
            return ""

    class Opaque:
        @tool
        def f(self, a: asyncio.Lock) -> str:
            return ""

    for owner, message in ((Unhinted(), "'a' a type hint"), (Starred(), "'a'"), (Twice(), "'x'"), (Opaque(), "schema")):
        with pytest.raises(TypeError, match=message):
            schemas_of(owner)


def test_arguments_are_converted_and_nested_models_made() -> None:
    calls = [ToolCall("add", {"a": "1", "b": 2.0}), ToolCall("visit", {"place": {"city": "Kyoto"}})]
    assert texts(calls) == ["3", "Kyoto 0"]


def test_case_4_3_bad_json_is_answered_with_the_call_id_and_the_next_call_runs() -> None:
    written = (
        '<tool_call>{"name": "add", "arguments": {"a": "1" "b": 1}}</tool_call>'
        '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    )
    calls = JsonTagsParser().parse((), written).tool_calls
    messages = run(list(calls))
    assert messages[0].text.startswith("error: ") and "JSON" in messages[0].text
    assert messages[1].text == "3"
    assert [message.tool_call_id for message in messages] == [call.id or None for call in calls]
    kept = run([ToolCall("add", error="arguments are not JSON", id="call_7")])
    assert kept == [Message("tool", "error: arguments are not JSON", tool_call_id="call_7", name="add")]


def test_case_4_4_calls_without_name_or_arguments_leave_the_good_ones_alone() -> None:
    answers = texts([ToolCall("add"), ToolCall("", {}), ToolCall("add", {"a": 1, "b": 2})])
    assert answers[0] == "error: add: a: Field required"
    assert answers[1].startswith("error: a call needs a name; available: add")
    assert answers[2] == "3"


def test_arguments_that_are_no_object_or_not_known_are_told() -> None:
    answers = texts(
        [
            ToolCall("add", "a=1"),  # type: ignore[arg-type]
            ToolCall("add", {"a": 1, "c": 2}),
            ToolCall(None, {}),  # type: ignore[arg-type]
            ToolCall("add", {"a": [1]}),
            ToolCall("add", {3: 4}),  # type: ignore[dict-item]
        ]
    )
    assert all(answer.startswith("error: ") for answer in answers)
    assert "c: Extra inputs" in answers[1] and "a: Input should be a valid integer" in answers[3]


def test_case_4_6_an_invented_tool_is_answered_with_the_known_ones() -> None:
    class Calc:
        @tool
        def calc(self, expression: str) -> str:
            return expression

    message = run([ToolCall("solve_cubic", {}, id="1")], owner=Calc())[0]
    assert message.text == "error: unknown tool 'solve_cubic'; available: calc"
    assert message.tool_call_id == "1"
    assert run([ToolCall("hidden")])[0].text.startswith("error: unknown tool 'hidden'")
    assert run([ToolCall("__init__")])[0].text.startswith("error: unknown tool '__init__'")


def test_case_4_9_calls_past_the_limit_are_answered_in_order() -> None:
    owner = Bench()
    calls = [ToolCall("add", {"a": i, "b": 0}, id=str(i)) for i in range(3)]
    messages = run(calls, 2, owner)
    assert [message.text for message in messages] == ["0", "1", "not run: limit of 2 calls a turn"]
    assert [message.tool_call_id for message in messages] == ["0", "1", "2"]
    assert owner.ran == ["add 0 0", "add 1 0"]


def test_case_4_10_non_ascii_results_stay_readable_and_surrogates_do_not_crash() -> None:
    answers = texts(
        [
            ToolCall("lookup", {"key": "x"}),
            ToolCall("echo", {"text": "🎲 שלום"}),
            ToolCall("echo", {"text": "a\ud800b"}),
            ToolCall("\ud800", {}),
        ]
    )
    assert answers[0] == '{"城市": "東京", "key": "x"}' and "\\u" not in answers[0]
    assert answers[1] == "🎲 שלום"
    for answer in answers:
        answer.encode("utf-8")


def test_an_exception_in_a_tool_is_told_on_one_line_and_an_interrupt_passes() -> None:
    assert texts([ToolCall("fail"), ToolCall("refuse", {"text": "now"})]) == [
        r"error: KeyError: 'inside\nthe tool'",
        "error: not now",
    ]
    with pytest.raises(KeyboardInterrupt):
        run([ToolCall("stop")])


def test_long_errors_are_cut() -> None:
    assert len(texts([ToolCall("x" * 10_000)])[0]) < 200
    assert len(texts([ToolCall("refuse", {"text": "y" * 10_000})])[0]) < 400


def test_case_9_7_truncation_counts_characters_and_left_drops_the_head() -> None:
    assert truncate_text("abcdefghij", 5, "left") == "[5 characters cut]fghij"
    assert truncate_text("abcdefghij", 5, "right") == "abcde[5 characters cut]"
    assert truncate_text("東京大阪", 4, "left") == "東京大阪"
    assert truncate_text("abc", 0, "left") == "[3 characters cut]"
    assert truncate_text.__doc__ is not None and "characters" in truncate_text.__doc__
    for limit, side in ((-1, "left"), (1, "top")):
        with pytest.raises(ValueError):
            truncate_text("abc", limit, side)  # type: ignore[arg-type]


@given(st.text(st.characters(), max_size=30))
def test_clean_text_always_encodes_and_leaves_good_text_alone(text: str) -> None:
    clean_text(text).encode("utf-8")
    if not any(0xD800 <= ord(character) <= 0xDFFF for character in text):
        assert clean_text(text) == text
    assert clean_text("\ud83d\ude00") == "😀"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.lists(
        st.builds(
            ToolCall,
            st.sampled_from(["add", "lookup", "echo", "visit", "fail", "nope", ""]),
            st.dictionaries(st.sampled_from(["a", "b", "key", "text", "place"]), JSON, max_size=3),
            st.text(max_size=3),
            st.none() | st.text(max_size=5),
        ),
        max_size=5,
    ),
    st.none() | st.integers(0, 5),
)
def test_every_call_has_exactly_one_answer_whatever_it_holds(calls: list[ToolCall], limit: int | None) -> None:
    messages = run(calls, limit)
    assert [message.tool_call_id for message in messages] == [call.id or None for call in calls]
    for message in messages:
        assert message.role == "tool"
        message.text.encode("utf-8")
