"""A tape's views show what it held, whatever comes after."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from renma.tape import Tape
from renma.types import Action, Step

ids = st.lists(st.integers(0, 2**31 - 1), max_size=40)


@given(st.lists(st.tuples(st.sampled_from(["add", "cut"]), ids, st.floats(0, 1)), max_size=30))
def test_views_stay_what_they_were(moves: list[tuple[str, list[int], float]]) -> None:
    tape, expected, seen = Tape(), [], []
    for kind, new, share in moves:
        if kind == "add":
            tape.extend(new)
            expected += new
        else:
            length = int(share * len(expected))
            tape.cut(length)
            del expected[length:]
        seen.append((tape.view(), list(expected)))
    for view, then in seen:
        assert view.dtype == np.int32 and view.tolist() == then
    assert len(tape) == len(expected)


def test_a_thousand_turns_take_the_memory_of_the_last() -> None:
    tape = Tape()
    views = []
    for turn in range(1000):
        tape.extend(np.full(50, turn, np.int32))
        views.append(tape.view())
    buffers = {id(view.base): view.base.nbytes for view in views}
    assert sum(buffers.values()) <= 4 * views[-1].nbytes
    assert sum(view.nbytes for view in views) > 100 * sum(buffers.values())


def test_views_are_not_written_to() -> None:
    tape = Tape([1, 2])
    with pytest.raises(ValueError, match="read-only"):
        tape.view()[0] = 3
    tape.extend([3])
    assert tape.view().tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="cannot be cut to 4"):
        tape.cut(4)


def step_of(prompt: np.ndarray, action: list[int]) -> Step:
    size = len(action)
    arrays = np.array(action, np.int32), np.zeros(size, np.float32), np.zeros(size, np.int32)
    return Step(prompt, *arrays, Action(""))


few = st.lists(st.integers(0, 2), max_size=4)


@given(few, few, few, st.booleans(), st.integers(0, 3))
def test_a_step_goes_on_from_another_where_its_prompt_begins_with_all_of_it(
    prompt: list[int], action: list[int], new: list[int], on_tape: bool, lost: int
) -> None:
    tape = Tape(prompt)
    first = step_of(tape.view(), action)
    tape.extend(action)
    tape.extend(new)
    seen = tape.view()[: max(0, len(tape) - lost)]
    for later in (seen if on_tape else seen.copy(), np.array(new, np.int32)):
        begins = later[: len(prompt) + len(action)].tolist() == [*prompt, *action]
        assert step_of(later, [1]).goes_on_from(first) == begins


def test_the_same_place_in_memory_is_not_enough() -> None:
    numbers = np.arange(12, dtype=np.int32)
    first, strided = step_of(numbers[:3], []), step_of(numbers[:12:2], [])
    assert step_of(numbers[:6], []).goes_on_from(first) and not strided.goes_on_from(first)
