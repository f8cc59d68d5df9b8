"""How many positions a batch costs: those of its distinct beginnings, and a little more where packs are cut.

The bound of 1.1 holds where the deepest row is a twelfth of a pack or less, as long as a pack's cost grows with its
positions alone. Dense attention over a pack grows with their square: the learner then cuts earlier, and computes a
shared beginning again, exactly where that costs less than the attention it saves.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from renma.learning.learner import Learner
from renma.learning.losses import reinforce
from renma.learning.rows import Row
from renma.learning.tree import Pack, PackCost, pack
from renma.recipe import LearnerSection
from tests.learning.tiny import make_model, make_row, random_rows

LIMIT = LearnerSection().max_positions


def group_rows(
    seed: int, *, tasks: int = 8, members: int = 8, header: int = 187, turns: int = 3, symbols: int = 300
) -> list[Row]:
    """A batch as the word-problems recipe samples it: one header, a question a task, 1 to `turns` turns a member."""
    rng = np.random.default_rng(seed)

    def text(low: int, high: int) -> list[int]:
        return rng.integers(0, symbols, rng.integers(low, high)).tolist()

    shared = rng.integers(0, symbols, header).tolist()
    rows = []
    for task in range(tasks):
        prompt = shared + text(20, 60)
        for member in range(members):
            ids, trained = list(prompt), [0] * len(prompt)
            for _ in range(rng.integers(1, turns + 1)):
                for mark, part in ((1, text(4, 32)), (0, text(3, 8))):
                    ids, trained = ids + part, trained + [mark] * len(part)
            rows.append(make_row(ids, trained, trajectory=task * members + member, group=task))
    return rows


def distinct_positions(rows: list[Row]) -> int:
    """Counted the plain way: different beginnings that predict, or come before something that does."""
    return len({row.ids[: t + 1].tobytes() for row in rows for t in range(np.flatnonzero(row.trained)[-1])})


def positions(packs: list[Pack]) -> int:
    return sum(tree.positions for tree in packs)


@given(seed=st.integers(0, 10**6), count=st.integers(1, 40), high=st.integers(4, 24), slack=st.integers(12, 40))
@settings(max_examples=60, deadline=None)
def test_random_trees_cost_at_most_a_tenth_more_than_their_distinct_positions(
    seed: int, count: int, high: int, slack: int
) -> None:
    rows = random_rows(seed, count, 3, high, symbols=4)
    limit = slack * max(map(len, rows))
    packs = pack(rows, limit, PackCost(fixed=0, quadratic=0))
    assert distinct_positions(rows) <= positions(packs) <= 1.1 * distinct_positions(rows)
    assert all(tree.positions <= limit for tree in packs)


@given(seed=st.integers(0, 10**6), tasks=st.integers(1, 12), members=st.integers(1, 8), header=st.integers(0, 200))
@settings(max_examples=15, deadline=None)
def test_recorded_batches_cost_at_most_a_tenth_more_under_the_default_limit(
    seed: int, tasks: int, members: int, header: int
) -> None:
    rows = group_rows(seed, tasks=tasks, members=members, header=header)
    packs = pack(rows, LIMIT, PackCost(fixed=0, quadratic=0))
    assert positions(packs) <= 1.1 * distinct_positions(rows)


def test_the_bound_does_not_hold_for_rows_as_deep_as_a_pack() -> None:
    """A header of 1,500 in packs of 4,096 leaves 2,596 for what is new: each further pack computes 1,500 again."""
    rows = group_rows(0, header=1500, turns=12)
    packs = pack(rows, LIMIT, PackCost(quadratic=0))
    assert len(packs) > 1
    assert positions(packs) >= distinct_positions(rows) + 1500 * (len(packs) - 1)
    assert positions(packs) > 1.1 * distinct_positions(rows)


@given(seed=st.integers(0, 10**6), quadratic=st.floats(1e-5, 5e-3), fixed=st.floats(0, 100))
@settings(max_examples=25, deadline=None)
def test_what_cuts_compute_again_is_less_than_the_attention_they_save(
    seed: int, quadratic: float, fixed: float
) -> None:
    rows = group_rows(seed, tasks=4)
    packs = pack(rows, LIMIT, PackCost(fixed, quadratic))
    whole = distinct_positions(rows)
    again = positions(packs) - whole
    saved = quadratic * (whole**2 - sum(tree.positions**2 for tree in packs))
    assert whole <= LIMIT  # one pack would have been allowed
    assert again + fixed * (len(packs) - 1) <= saved + 1e-6 * whole


def test_the_learner_says_how_many_positions_it_computed() -> None:
    """Under default settings a batch of small rows is one tree: not a position is computed twice."""
    rows = group_rows(0, tasks=2, members=4, header=40, symbols=48)
    numbers = Learner(make_model(), LearnerSection()).update(rows, loss=reinforce())
    assert numbers["positions"] == distinct_positions(rows)
    assert numbers["row_tokens"] == sum(map(len, rows)) > 2 * numbers["positions"]
    assert numbers["trained_tokens"] == sum(int(row.trained.sum()) for row in rows)


@pytest.mark.parametrize("members", [1, 4, 16])
def test_another_member_costs_its_own_tokens_alone(members: int) -> None:
    rows = group_rows(1, tasks=1, members=members)
    # What a member does not share with any other: all that comes after the prompt, the last token left out.
    own = sum(int(np.flatnonzero(row.trained)[-1]) - int(np.flatnonzero(row.trained)[0]) for row in rows)
    prompt = int(np.flatnonzero(rows[0].trained)[0])
    [tree] = pack(rows, LIMIT, PackCost(quadratic=0))
    assert prompt < tree.positions <= prompt + own
    assert tree.positions >= prompt + own - 2 * members  # members may begin with the same token or two
