"""Demonstrators and transcripts: the plain format to the letter, and as imperfect as asked."""

from __future__ import annotations

import asyncio
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from renma.agents.parsers.plain import PlainParser
from renma.environments.base import Environment
from renma.environments.calculator import CalculatorEnvironment
from renma.environments.demonstrators import ArithmeticDemonstrator, Demonstrator, WordProblemDemonstrator
from renma.environments.transcripts import transcript, transcript_async, transcripts
from renma.errors import DataError, RecipeError
from renma.rewards.numbers import same_number
from renma.tasks.procedural import ArithmeticTasks
from renma.tools.calculator import calculate, evaluate
from renma.types import Action, Observation, StepResult, Task

SUM = Task("s", "7 + 25 - 4 =", 28, data={"expression": "7 + 25 - 4", "terms": 3})
WORDS = Task("w", "How many?", 48, data={"expression": "8*(3+3)"})


def pocket() -> CalculatorEnvironment:
    return CalculatorEnvironment(max_operations=1)


def episodes(demonstrator: Demonstrator, tasks: list[Task], count: int) -> list[tuple[Task, str]]:
    chosen = [replace(tasks[i % len(tasks)], id=str(i)) for i in range(count)]
    return list(zip(chosen, transcripts(chosen, pocket, demonstrator), strict=True))


def answer_of(text: str) -> str:
    return text.rpartition("Answer: ")[2].strip()


def test_a_perfect_demonstration_is_the_plain_format_to_the_letter() -> None:
    perfect = ArithmeticDemonstrator(early_answer=0, slip=0)
    assert transcript(SUM, pocket(), perfect, random.Random(0)) == (
        "Question: 7 + 25 - 4 =\nCall: calc(7+25)\nResult: 32\nCall: calc(32-4)\nResult: 28\nAnswer: 28\n"
    )
    assert transcript(WORDS, CalculatorEnvironment(), WordProblemDemonstrator(), random.Random(0)) == (
        "Question: How many?\nCall: calc(8*(3+3))\nResult: 48\nAnswer: 48\n"
    )


def test_perfect_demonstrations_solve_every_task_in_as_many_turns_as_it_has_terms() -> None:
    for task, text in episodes(ArithmeticDemonstrator(early_answer=0, slip=0), list(ArithmeticTasks(size=60)), 60):
        assert same_number(answer_of(text), task.answer), text
        assert text.count("Call: ") == task.data["terms"] - 1


def test_early_answers_come_at_the_asked_rate_and_state_the_partial_result() -> None:
    texts = [text for _, text in episodes(ArithmeticDemonstrator(early_answer=0.35, slip=0), [SUM], 600)]
    early = [text for text in texts if text.count("Call: ") == 1]
    assert 0.28 < len(early) / 600 < 0.42
    assert {answer_of(text) for text in early} == {"32"}
    assert {answer_of(text) for text in texts if text not in early} == {"28"}


def test_slips_come_at_the_asked_rate() -> None:
    right = [
        same_number(answer_of(text), 28)
        for _, text in episodes(ArithmeticDemonstrator(early_answer=0, slip=0.1), [SUM], 600)
    ]
    assert 0.66 < sum(right) / 600 < 0.80  # three turns: 0.9^3 = 0.73
    always = [text for _, text in episodes(ArithmeticDemonstrator(early_answer=0, slip=1), [SUM], 50)]
    assert all("Call: calc(7+25)\n" not in text for text in always)


def test_every_imperfect_demonstration_is_well_formed() -> None:
    line = re.compile(r"(Question: .+|Call: calc\(-?\d+[-+]\d+\)|Result: -?\d+|Answer: -?\d+)")
    for _, text in episodes(ArithmeticDemonstrator(early_answer=0.3, slip=0.5), list(ArithmeticTasks(size=200)), 200):
        assert text.endswith("\n") and all(line.fullmatch(one) for one in text.splitlines()), text


def test_corrupt_word_problem_calls_have_another_operator() -> None:
    tasks = [replace(WORDS, id=str(i)) for i in range(300)]
    texts = transcripts(tasks, CalculatorEnvironment, WordProblemDemonstrator(corrupt=0.5))
    wrong = [text for text in texts if "calc(8*(3+3))" not in text]
    assert 0.4 < len(wrong) / 300 < 0.6
    assert all(re.search(r"calc\(8[-+*/]\(3[-+*/]3\)\)", text) for text in texts)


def test_demonstrators_refuse_what_they_cannot_solve() -> None:
    rng = random.Random(0)
    with pytest.raises(DataError, match="no gold expression"):
        WordProblemDemonstrator().write(Task("g", "?", 3), 0, Observation(), rng)
    for prompt in ("2 * 3 =", "", "7 8"):
        with pytest.raises(DataError, match="task 'g'"):
            ArithmeticDemonstrator().write(Task("g", prompt, 3), 0, Observation(), rng)
    for options in ({"early_answer": 1.5}, {"slip": -0.1}):
        with pytest.raises(RecipeError, match="probability"):
            ArithmeticDemonstrator(**options)
    with pytest.raises(RecipeError, match="corrupt"):
        WordProblemDemonstrator(corrupt=2)


def test_a_refused_call_is_not_the_end_of_a_demonstration() -> None:
    refused = Observation.of("error: division by zero", "tool")
    perfect = ArithmeticDemonstrator(early_answer=0, slip=0)
    assert perfect.write(SUM, 1, refused, random.Random(0)) == "Call: calc(32-4)\n"
    assert WordProblemDemonstrator().write(WORDS, 1, refused, random.Random(0)) == "Answer: 48\n"


@given(st.integers(0, 2**32), st.integers(0, 99))
def test_demonstrations_depend_on_the_random_numbers_only(seed: int, index: int) -> None:
    task = ArithmeticTasks(size=100, seed=1)[index]
    first, second = (transcript(task, pocket(), ArithmeticDemonstrator(), random.Random(seed)) for _ in range(2))
    assert first == second


def test_many_transcripts_are_reproducible_and_each_has_its_own_chance() -> None:
    tasks = [SUM, Task("s2", SUM.prompt, 28, data=SUM.data)]
    demonstrator = ArithmeticDemonstrator(early_answer=0.5, slip=0.5)
    first = transcripts(tasks, pocket, demonstrator, seed=3)
    assert first == transcripts(tasks, pocket, demonstrator, seed=3)
    assert transcripts(tasks[1:], pocket, demonstrator, seed=3) == first[1:]


class Recorder(Environment):
    """Keeps what it was asked; never ends by itself."""

    max_turns = 3

    def __init__(self, fail: bool = False) -> None:
        self.actions: list[Action] = []
        self.closed = 0
        self.fail = fail

    def reset(self, task: Task) -> str:
        return task.prompt

    def step(self, action: Action) -> StepResult:
        if self.fail:
            raise OSError("gone")
        self.actions.append(action)
        return StepResult(Observation.of("1", "tool"))

    def close(self) -> None:
        self.closed += 1


class Caller:
    def write(self, task: Task, turn: int, observation: Observation, rng: random.Random) -> str:
        return f"Call: calc({turn})\n"


def test_transcripts_stop_at_the_last_turn_and_close_the_environment_once() -> None:
    environment = Recorder()
    text = transcript(SUM, environment, Caller(), random.Random(0))
    assert text.count("Call: ") == 3 and environment.closed == 1
    assert [action.tool_calls[0].arguments for action in environment.actions] == [
        {"expression": str(i)} for i in range(3)
    ]
    failing = Recorder(fail=True)
    with pytest.raises(OSError, match="gone"):
        transcript(SUM, failing, Caller(), random.Random(0))
    assert failing.closed == 1


def test_transcripts_work_inside_a_running_event_loop() -> None:
    async def notebook() -> tuple[str, str]:
        perfect = ArithmeticDemonstrator(early_answer=0, slip=0)
        return (
            transcript(SUM, pocket(), perfect, random.Random(0)),
            await transcript_async(SUM, pocket(), perfect, random.Random(0)),
        )

    first, second = asyncio.run(notebook())
    assert first == second and first.endswith("Answer: 28\n")

    async def failing() -> None:
        transcript(SUM, Recorder(fail=True), Caller(), random.Random(0))

    with pytest.raises(OSError, match="gone"):
        asyncio.run(failing())


def test_the_few_shot_header_is_right_in_form_and_content() -> None:
    header = Path(__file__).parents[2] / "recipes" / "word-problems-header.txt"
    lines = header.read_text(encoding="utf-8").splitlines()
    assert len(lines) % 4 == 0 and 4 <= len(lines) // 4 <= 6
    operators = set()
    for start in range(0, len(lines), 4):
        question, call, result, answer = lines[start : start + 4]
        assert question.startswith("Question: ")
        expression = PlainParser().parse((), call).tool_calls[0].arguments["expression"]
        assert result == f"Result: {calculate(expression)}"
        assert same_number(PlainParser().parse((), answer).text, evaluate(expression))
        numbers = set(re.findall(r"\d+", expression))
        assert numbers <= set(re.findall(r"\d+", question))
        operators |= set(re.findall(r"[-+*/]", expression))
    assert operators == set("+-*/")
