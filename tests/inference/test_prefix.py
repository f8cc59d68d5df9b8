"""Finding shared prefixes, and the order in which a wave is computed."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from renma.inference.local.cache import SlotCache
from renma.inference.local.prefix import plan, ragged_batches, shared
from renma.inference.local.sequences import Sequences

row = st.lists(st.integers(0, 1), min_size=8, max_size=8)


@given(st.lists(row, min_size=1, max_size=5), st.lists(st.integers(0, 1), min_size=1, max_size=10), st.data())
def test_shared_is_the_common_prefix_within_the_limit(
    rows: list[list[int]], prompt: list[int], data: st.DataObject
) -> None:
    limits = data.draw(st.lists(st.integers(0, 8), min_size=len(rows), max_size=len(rows)))
    found = shared(np.array(rows, np.int32), np.array(limits), np.array(prompt, np.int32))
    for tokens, limit, length in zip(rows, limits, found.tolist(), strict=True):
        most = min(limit, len(prompt))
        assert length == next((i for i in range(most) if tokens[i] != prompt[i]), most)


@given(st.lists(st.integers(1, 300), max_size=30))
def test_ragged_batches_hold_each_row_once_and_little_padding(sizes: list[int]) -> None:
    batches = ragged_batches(sizes, most=500, padding=10)
    assert sorted(i for batch in batches for i in batch) == list(range(len(sizes)))
    for batch in batches:
        members = [sizes[i] for i in batch]
        padded = max(members) * len(members)
        assert padded - sum(members) <= max(10, padded // 4)
        assert len(batch) == 1 or padded <= 500


def rows_with(sequences: list[list[int]]) -> Sequences:
    rows = Sequences(len(sequences), 64, SlotCache(1, len(sequences), 64))
    for i, sequence in enumerate(sequences):
        rows.tokens[i, : len(sequence)] = sequence
        rows.total[i] = len(sequence)
    return rows


def test_plan_gives_dependents_the_shared_beginning() -> None:
    header, other = [1] * 20, [2] * 40
    ends = [[3, 4], [3, 4], [5, 6], [7, 8], [7, 8]]
    sequences = [*(header + end for end in ends), other, header[:3]]
    wave = plan(rows_with(sequences), range(len(sequences)))
    assert wave.first == [0, 5, 6]
    assert wave.second == [1, 2, 3, 4]
    assert wave.borrow == {1: (0, 21), 2: (0, 20), 3: (0, 20), 4: (0, 20)}


def test_plan_does_not_wait_for_a_beginning_that_saves_less_than_a_forward() -> None:
    wave = plan(rows_with([[1] * 20 + [2], [1] * 20 + [3]]), range(2))
    assert (wave.first, wave.second) == ([0, 1], [])


@given(st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=40), min_size=1, max_size=8), st.data())
def test_a_wave_computes_every_row_and_borrows_only_what_is_equal_and_there(
    sequences: list[list[int]], data: st.DataObject
) -> None:
    rows = rows_with(sequences)
    for i, sequence in enumerate(sequences):
        rows.cached[i] = data.draw(st.integers(0, len(sequence) - 2))
    wave = plan(rows, range(len(sequences)))
    assert sorted([*wave.first, *wave.second]) == list(range(len(sequences)))
    assert set(wave.borrow) == set(wave.second)
    for i, (leader, length) in wave.borrow.items():
        assert leader in wave.first
        assert rows.cached[i] < length < len(sequences[i])
        assert sequences[leader][:length] == sequences[i][:length]
