"""Task sources: procedural, from files, mixed; and the order in which they are taken."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from renma.errors import DataError, RecipeError
from renma.tasks import TASKS
from renma.tasks.base import TaskList, TaskSource, disjoint
from renma.tasks.files import JsonlTasks, find_file
from renma.tasks.mixture import Mixture, interleave
from renma.tasks.order import TaskOrder
from renma.tasks.procedural import ArithmeticTasks, ReasoningGymTasks
from renma.tools.calculator import evaluate
from renma.types import Task


def written(tmp_path: Path, *lines: Any, name: str = "set.jsonl") -> str:
    file = tmp_path / name
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    file.write_text(text, encoding="utf-8")
    return str(file)


def prompts(source: TaskSource) -> list[str]:
    return [source[i].prompt for i in range(len(source))]


def test_every_registered_source_is_a_task_source() -> None:
    assert list(TASKS) == ["arithmetic", "jsonl", "mixture", "reasoning_gym", "word_problems"]
    assert all(hasattr(TASKS[name], "__getitem__") for name in TASKS)
    assert isinstance(ArithmeticTasks(size=1), TaskSource)


def test_arithmetic_tasks_are_bare_expressions_with_their_value() -> None:
    source = ArithmeticTasks(size=60, seed=3)
    assert len(source) == 60
    for task in source:
        assert task.prompt == f"{task.data['expression']} ="
        assert evaluate(task.data["expression"]) == task.answer
        assert task.family == f"arithmetic/{task.data['terms']}-terms"
        assert len(task.data["expression"].split()) == 2 * task.data["terms"] - 1
    assert {task.data["terms"] for task in source} == {2, 3, 4}
    assert len({(task.family, task.id) for task in source}) == 60
    assert ArithmeticTasks(size=1, prefix="Work out: ")[0].prompt.startswith("Work out: ")
    with pytest.raises(IndexError):
        source[60]
    with pytest.raises(IndexError):
        source[-1]


def test_arithmetic_tasks_depend_on_seed_and_index_only() -> None:
    assert ArithmeticTasks(size=50, seed=3)[7] == ArithmeticTasks(size=9, seed=3)[7]
    assert ArithmeticTasks(size=50, seed=3)[7] == list(ArithmeticTasks(size=50, seed=3))[7]


def test_neighbouring_seeds_do_not_share_their_tasks() -> None:
    # reasoning-gym itself seeds item i with seed + i: the set of seed 1 would be the set of seed 0 moved by one.
    first, second = (prompts(ArithmeticTasks(size=40, seed=s, min_terms=4, min_digits=2)) for s in (0, 1))
    assert not set(first) & set(second)


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 40))
def test_train_and_held_out_never_share_a_prompt(train_seed: int, test_seed: int, size: int) -> None:
    train = ArithmeticTasks(size=size, seed=train_seed, max_terms=2, max_digits=1, split="train")
    held_out = ArithmeticTasks(size=size, seed=test_seed, max_terms=2, max_digits=1, split="held_out")
    assert not set(prompts(train)) & set(prompts(held_out))


def test_disjoint_leaves_out_what_others_contain() -> None:
    source = TaskList([Task("a", "1 + 1 ="), Task("b", "2 +  2 ="), Task("c", "WHO?"), Task("d", "3 + 3 =")])
    others = TaskList([Task("x", "2 + 2 ="), Task("y", "who?")]), TaskList([Task("z", "9 =")])
    assert [task.id for task in disjoint(source, *others)] == ["a", "d"]
    with pytest.raises(DataError, match="all 4 tasks"):
        disjoint(source, source)


def test_reasoning_gym_tasks_carry_question_answer_and_metadata() -> None:
    source = ReasoningGymTasks(dataset="gcd", size=5, seed=1, config={"max_numbers": 3})
    task = source[2]
    assert task.prompt and task.answer is not None and task.family == "reasoning_gym/gcd"
    assert task == ReasoningGymTasks(dataset="gcd", size=5, seed=1, config={"max_numbers": 3})[2]
    assert len(list(source)) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "chain_sums"}, "no generator 'chain_sums'; did you mean 'chain_sum'"),
        ({"config": {"max_term": 3}}, "no setting 'max_term'; did you mean 'max_terms'"),
        ({"config": {"min_terms": 5, "max_terms": 2}}, "refuses config"),
        ({"size": 0}, "size must be at least 1"),
        ({"split": "test"}, "split must be"),
        ({"held_out_share": 1.0}, "held_out_share"),
    ],
)
def test_mistakes_in_procedural_options_are_told(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        ReasoningGymTasks(**options)


def test_a_space_too_small_to_hold_any_out_is_told() -> None:
    # One-term "sums" of one digit: ten prompts in all, and with this share none is held out.
    source = ArithmeticTasks(size=3, min_terms=1, max_terms=1, max_digits=1, split="held_out", held_out_share=1e-6)
    with pytest.raises(DataError, match="too few different tasks"):
        source[0]


def test_jsonl_tasks_map_columns(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {"q": "one", "a": 1, "key": "x", "kind": "k"},
        "",
        {"q": "two", "a": 2, "key": "y", "kind": "l"},
        {"q": "three", "a": 3, "key": "z", "kind": "k"},
    )
    source = JsonlTasks(path=path, question="q", answer="a", id="key")
    assert source[0] == Task("x", "one", 1, "set", {"kind": "k"})
    assert [task.id for task in source] == ["x", "y", "z"]
    chosen = JsonlTasks(path=path, question="q", answer="a", family="mine", where={"kind": "k"}, limit=2)
    assert [(task.id, task.prompt, task.family) for task in chosen] == [("1", "one", "mine"), ("4", "three", "mine")]


GOOD = {"question": "q", "answer": 1}


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        ([], {}, r"set\.jsonl is empty"),
        (["", "  "], {}, r"set\.jsonl is empty"),
        ([GOOD, '{"question": '], {}, r"line 2: not JSON"),
        ([GOOD, "[1]"], {}, r"line 2: a list, not an object"),
        ([GOOD, "[" * 100_000], {}, r"line 2: (not JSON|JSON nested)"),
        ([{"question": "q", "anwser": 1}], {}, r"line 1: there is no column 'answer'; did you mean 'anwser'"),
        ([{"question": " ", "answer": 1}], {}, r"line 1: column 'question' holds no text"),
        ([{"question": 3, "answer": 1}], {}, r"line 1: column 'question' holds no text"),
        ([GOOD | {"k": 1}, GOOD | {"k": 1}], {"id": "k"}, r"line 2: id '1' is already that of line 1"),
        ([GOOD | {"k": 1}], {"where": {"k": 2}}, r"where .*there is no task"),
        ([GOOD], {"where": {"kind": 2}}, r"line 1: there is no column 'kind'"),
    ],
)
def test_a_bad_file_is_one_line_with_the_place(
    tmp_path: Path, lines: list[Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        JsonlTasks(path=written(tmp_path, *lines), **options)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_utf8_is_told(tmp_path: Path) -> None:
    (tmp_path / "set.jsonl").write_bytes(b'{"question": "\xff"}\n')
    with pytest.raises(DataError, match="not UTF-8"):
        JsonlTasks(path=str(tmp_path / "set.jsonl"))


def test_files_are_looked_up_in_order_and_every_place_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = {name: tmp_path / name for name in ("given", "env", "shared/data", "work")}
    for place in places.values():
        place.mkdir(parents=True)
    monkeypatch.chdir(places["work"])
    monkeypatch.setenv("RENMA_DATA", str(places["env"]))
    with pytest.raises(DataError) as caught:
        find_file("math/gsm8k_test.jsonl", str(places["given"]))
    message = str(caught.value)
    for part in (str(places["given"]), str(places["env"]), "shared/data", "RENMA_DATA", "openai/gsm8k"):
        assert part in message
    for name in ("work", "shared/data", "env", "given"):  # each is found before those already there
        written(places[name], GOOD, name="mine.jsonl")
        assert find_file("mine.jsonl", str(places["given"])).resolve() == places[name] / "mine.jsonl"
    with pytest.raises(DataError, match="no data file"):
        find_file(str(tmp_path / "absent.jsonl"))


def test_order_goes_through_every_task_once_an_epoch() -> None:
    order = TaskOrder(7, seed=5)
    epochs = [[order.index_at(7 * epoch + i) for i in range(7)] for epoch in range(4)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert [order.epoch_at(p) for p in (0, 6, 7)] == [0, 0, 1]
    with pytest.raises(ValueError):
        TaskOrder(0, 1)
    with pytest.raises(ValueError):
        order.index_at(-1)


@given(st.integers(1, 30), st.integers(0, 2**40), st.lists(st.integers(0, 200), max_size=20))
def test_case_7_1_the_order_is_a_function_of_the_position_alone(length: int, seed: int, asked: list[int]) -> None:
    straight = TaskOrder(length, seed)
    all_in_order = [straight.index_at(p) for p in range(201)]
    resumed = TaskOrder(length, seed)
    assert [resumed.index_at(p) for p in asked] == [all_in_order[p] for p in asked]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 60))
def test_any_beginning_of_a_mixture_is_in_proportion(weights: list[int], size: int) -> None:
    schedule = interleave(weights, size)
    for end in range(1, size + 1):
        counts = Counter(part for part, _ in schedule[:end])
        for part, weight in enumerate(weights):
            assert abs(counts[part] - end * weight / sum(weights)) <= len(weights)
    for part in range(len(weights)):
        assert [turn for p, turn in schedule if p == part] == list(range(Counter(p for p, _ in schedule)[part]))


def test_mixtures_interleave_by_weight_and_start_sources_again() -> None:
    first = TaskList([Task(f"a{i}", "p") for i in range(4)])
    second = TaskList([Task("b0", "p"), Task("b1", "p")])
    assert [task.id for task in Mixture.of([(first, 1), (second, 1)])] == ["a0", "b0", "a1", "b1", "a2", "b0"]
    assert [task.id for task in Mixture.of([(first, 3), (second, 1)], size=4)] == ["a0", "a1", "b0", "a2"]
    with pytest.raises(IndexError):
        Mixture.of([(first, 1)])[4]


def test_mixtures_are_built_from_a_recipe() -> None:
    easy = {"type": "arithmetic", "size": 3, "max_terms": 2, "weight": 2}
    hard = {"type": "arithmetic", "size": 3, "min_terms": 4}
    mixture = Mixture(sources=[easy, hard])
    assert Counter(task.data["terms"] for task in mixture) == {2: 4, 4: 2}
    for sources, message in (
        ([], "sources is empty"),
        ([{"weight": 1}], r"sources\.0: 'type' is missing"),
        ([easy, {"type": "arithmetc"}], r"sources\.1: unknown task source"),
        ([easy, hard | {"sise": 3}], r"sources\.1\.sise"),
        ([easy | {"weight": -1}], r"sources\.0\.weight"),
        ([easy | {"weight": 0}], "a weight above 0"),
    ):
        with pytest.raises(RecipeError, match=message):
            Mixture(sources=sources)
