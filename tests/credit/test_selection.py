"""Which groups are learned from."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from renma.credit import SELECTIONS
from renma.credit.selection import mixed, starpo_s
from renma.errors import RecipeError
from renma.parts import build
from renma.recipe import Component
from renma.types import Action, Group, Step, Task, Trajectory

few = settings(max_examples=40, deadline=None)


def group(*returns: float, successes: tuple[bool | None, ...] = (), failed: int = 0, name: str = "t") -> Group:
    ids = np.zeros(1, np.int32)
    steps = (Step(ids, ids, np.zeros(1, np.float32), ids, Action("")),)
    known = successes or (None,) * len(returns)
    members = [
        Trajectory(Task(name, ""), i, steps, "done", "answer", success=s, rewards={"r": r})
        for i, (r, s) in enumerate(zip(returns, known, strict=True))
    ]
    members += [Trajectory(Task(name, ""), 90 + i, steps, "failed", "time", rewards={"r": 50.0}) for i in range(failed)]
    return Group(Task(name, ""), tuple(members))


def test_starpo_s_keeps_the_groups_that_differ_most_in_their_order():
    groups = [group(0, 1), group(0, 0), group(0, 3), group(0, 2)]
    kept, dropped = starpo_s(0.5)(groups)
    assert kept == [groups[2], groups[3]]
    assert dropped == [groups[0], groups[1]]
    assert starpo_s(0.25)(groups)[0] == [groups[2]]
    assert starpo_s(0.75)(groups)[0] == [groups[0], groups[2], groups[3]]


def test_starpo_s_ties_go_by_order_and_rounding_is_a_tie():
    groups = [group(0.3, 0.3, 0.3), group(0.1 + 0.2, 0.3, 0.3), group(1.0, 1.0, 1.0), group(2.0, 2.0, 2.0)]
    assert starpo_s(0.5)(groups)[0] == groups[:2]


def test_starpo_s_failed_members_are_in_no_spread():
    quiet, loud, empty = group(0, 0, failed=2), group(0, 1), group(failed=2)
    kept, dropped = starpo_s(0.5)([empty, quiet, loud])  # 1.5 of 3 rounds up
    assert kept == [quiet, loud] and dropped == [empty]


@few
@given(st.lists(st.lists(st.integers(-3, 3), min_size=1, max_size=4), max_size=9), st.floats(0.25, 0.75))
def test_starpo_s_every_group_goes_to_one_side(rows: list[list[int]], keep: float):
    groups = [group(*map(float, row)) for row in rows]
    kept, dropped = starpo_s(keep)(groups)
    assert sorted(map(id, kept + dropped)) == sorted(map(id, groups))
    if groups:
        assert abs(len(kept) - keep * len(groups)) <= 0.5 or len(kept) == 1
        assert (
            min(np.std(rows[_at(groups, g)]) for g in kept)
            >= max((np.std(rows[_at(groups, g)]) for g in dropped), default=0.0) - 1e-6
        )
    for side in (kept, dropped):
        places = [_at(groups, g) for g in side]
        assert places == sorted(places)


def _at(groups: list[Group], wanted: Group) -> int:
    return next(i for i, group in enumerate(groups) if group is wanted)


def test_mixed_drops_what_is_uniform():
    differs, rounding, lone = group(0, 1), group(0.1 + 0.2, 0.3), group(1.0, failed=3)
    kept, dropped = mixed()([rounding, differs, lone, group()])
    assert kept == [differs]
    assert len(dropped) == 3 and dropped[0] is rounding and dropped[1] is lone


def test_mixed_by_success_looks_past_shaping():
    shaped = group(1.0, 0.9, successes=(True, True))
    solved_once = group(0.9, 0.9, successes=(True, False))
    unsaid = group(0.9, 0.1)
    kept, dropped = mixed("success")([shaped, solved_once, unsaid])
    assert kept == [solved_once, unsaid] and dropped == [shaped]
    assert mixed("return")([shaped, solved_once])[0] == [shaped]


def test_selections_from_a_recipe():
    assert set(SELECTIONS) == {"starpo_s", "mixed"}
    assert build(SELECTIONS, Component(type="starpo_s", keep=0.25), "algorithm.select")([]) == ([], [])
    for keep in (0.2, 0.8):
        with pytest.raises(RecipeError, match="keep must be from 0.25 to 0.75"):
            starpo_s(keep)
    with pytest.raises(RecipeError, match="algorithm.select.metric"):
        build(SELECTIONS, Component(type="mixed", metric="median"), "algorithm.select")
