"""Word problems: the gold expressions in infix form, and the published sets where they are there."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from renma.errors import DataError
from renma.rewards.numbers import same_number
from renma.tasks.files import find_file
from renma.tasks.word_problems import WordProblems, prefix_to_infix, tidy_infix
from renma.tools.calculator import calculate, evaluate


@pytest.mark.parametrize(
    ("prefix", "infix"),
    [
        ("* 8 + 3 3", "8*(3+3)"),
        ("- + 38 15 4", "38+15-4"),
        ("- 10 - 4 3", "10-(4-3)"),
        ("/ 24 / 4 2", "24/(4/2)"),
        ("* / 7.5 2 5.0", "7.5/2*5"),
        ("+ 1 + 2 3", "1+2+3"),
        ("- 2 -5", "2-(-5)"),
        ("+ 2 -5", "2+(-5)"),
        ("7.0", "7"),
    ],
)
def test_prefix_to_infix(prefix: str, infix: str) -> None:
    assert prefix_to_infix(prefix) == infix


@pytest.mark.parametrize(
    ("infix", "tidy"),
    [
        ("( 76.0 - 25.0 )", "76-25"),
        ("( ( 4.0 - 2.0 ) + 3.0 )", "4-2+3"),
        ("( 6.0 / ( 1.0 + 1.0 ) )", "6/(1+1)"),
        ("10.0", "10"),
    ],
)
def test_tidy_infix(infix: str, tidy: str) -> None:
    assert tidy_infix(infix) == tidy


@pytest.mark.parametrize("prefix", ["", "+ 1", "1 2", "+ 1 x", "+ 1 2 3"])
def test_incomplete_prefix_expressions_are_refused(prefix: str) -> None:
    with pytest.raises(ValueError):
        prefix_to_infix(prefix)


@pytest.mark.parametrize("infix", ["", "( 1 + 2", "1 + 2 )", "( 1 + 2 + 3 )", "1 +", "( )", "( x )"])
def test_malformed_infix_expressions_are_refused(infix: str) -> None:
    with pytest.raises(ValueError):
        tidy_infix(infix)


TREES = st.recursive(
    st.integers(-20, 99).map(lambda n: (str(n), str(n), Fraction(n))),
    lambda inner: (
        st.tuples(st.sampled_from("+-*/"), inner, inner)
        .filter(lambda t: t[0] != "/" or t[2][2] != 0)
        .map(
            lambda t: (
                f"{t[0]} {t[1][0]} {t[2][0]}",
                f"( {t[1][1]} {t[0]} {t[2][1]} )",
                {
                    "+": lambda a, b: a + b,
                    "-": lambda a, b: a - b,
                    "*": lambda a, b: a * b,
                    "/": lambda a, b: a / b,
                }[t[0]](t[1][2], t[2][2]),
            )
        )
    ),
    max_leaves=6,
)


@given(TREES)
def test_both_forms_keep_the_value(tree: tuple[str, str, Fraction]) -> None:
    prefix, infix, value = tree
    assert prefix_to_infix(prefix) == tidy_infix(infix)
    assert evaluate(prefix_to_infix(prefix)) == value


def folder(tmp_path: Path, *rows: object) -> str:
    (tmp_path / "math").mkdir()
    (tmp_path / "math" / "mawps_train.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(tmp_path)


def test_problems_are_tidied_and_wrong_expressions_left_out(tmp_path: Path) -> None:
    rows = [
        {"id": f"m{i}", "question": " How \n many? ", "answer": answer, "equation_prefix": prefix}
        for i, (answer, prefix) in enumerate([(48.0, "* 8 + 3 3"), (2.0, "+ 1 2"), (0.5, "/ 1 2"), (1.0, "/ 1 0")])
    ]
    data_dir = folder(tmp_path, *rows)
    source = WordProblems(set="mawps_train", data_dir=data_dir)
    assert [(task.id, task.prompt, task.answer) for task in source] == [
        ("m0", "How many?", 48), ("m1", "How many?", 2), ("m2", "How many?", 0.5), ("m3", "How many?", 1)
    ]  # fmt: skip
    assert [task.data.get("expression") for task in source] == ["8*(3+3)", None, "1/2", None]
    assert isinstance(source[0].answer, int)
    assert [task.id for task in WordProblems(data_dir=data_dir, verified_only=True)] == ["m0", "m2"]
    shuffled = [[task.id for task in WordProblems(data_dir=data_dir, shuffle_seed=s)] for s in (1, 1, 2)]
    assert shuffled[0] == shuffled[1] != shuffled[2] and sorted(shuffled[0]) == ["m0", "m1", "m2", "m3"]
    assert [task.id for task in WordProblems(data_dir=data_dir, shuffle_seed=1, limit=2)] == shuffled[0][:2]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "q"}, "no column 'answer'"),
        ({"question": "q", "answer": "many"}, "holds no number"),
        ({"question": "q", "answer": 1, "equation_prefix": "+ 1"}, "lacks an operand"),
    ],
)
def test_malformed_rows_are_told_with_their_line(tmp_path: Path, row: object, message: str) -> None:
    with pytest.raises(DataError, match=f"line 1: .*{message}"):
        WordProblems(data_dir=folder(tmp_path, row))


@pytest.mark.parametrize(
    ("name", "size", "wrong"),
    [
        ("mawps_train", 1314, 12),  # seven answers that were rounded, five that are wrong or in another unit
        ("mawps_test", 300, 2),
        ("svamp", 1000, 1),
        ("gsm8k_test", 1319, 1319),  # no expressions there
    ],
)
def test_the_published_sets(name: str, size: int, wrong: int) -> None:
    try:
        file = find_file(f"math/{name}.jsonl")
    except DataError as error:
        pytest.skip(str(error))
    source = WordProblems(set=name)  # type: ignore[arg-type]
    assert len(source) == size
    assert sum("expression" not in task.data for task in source) == wrong
    for task in source:
        if "expression" in task.data:
            assert same_number(calculate(task.data["expression"]), task.answer), (file, task.id)
