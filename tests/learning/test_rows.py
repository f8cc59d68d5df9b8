"""Rows: the exact ids, and only the sampled ones trained."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from renma.learning.rows import MissingLogprobs, Row, UntrainableTrajectory, rows_of
from tests.learning.tiny import make_trajectory


def masks(rows: list[Row]) -> list[str]:
    return ["".join(str(int(t)) for t in row.trained) for row in rows]


def test_case_1_1_sampled_ids_are_trained_as_sampled() -> None:
    # Toy BPE {a: 0, b: 1, ab: 2, X: 3}: the model samples a, b; encoding "ab" again would give [2].
    trajectory = make_trajectory([([7], [0, 1]), ([7, 0, 1, 3], [5])], logprobs=[[-0.1, -0.2], [-0.3]])
    [row] = rows_of(trajectory, 0)
    assert row.ids.tolist() == [7, 0, 1, 3, 5]
    assert masks([row]) == ["01101"]
    assert row.logprobs[row.trained].tolist() == pytest.approx([-0.1, -0.2, -0.3])


def test_case_1_4_a_prompt_that_extends_stays_in_one_row() -> None:
    trajectory = make_trajectory([([1, 2], [9, 8, 3]), ([1, 2, 9, 8, 3, 4], [5, 3])])
    [row] = rows_of(trajectory, 0)
    assert row.ids.tolist() == [1, 2, 9, 8, 3, 4, 5, 3]
    assert masks([row]) == ["00111011"]
    assert row.step.tolist() == [-1, -1, 0, 0, 0, -1, 1, 1]
    assert row.versions.tolist() == [-1, -1, 3, 3, 3, -1, 4, 4]


def test_case_1_4_a_rewritten_prompt_begins_a_new_row() -> None:
    trajectory = make_trajectory([([1, 2], [9, 8, 3]), ([1, 2, 8, 3, 4], [5, 3])])
    rows = rows_of(trajectory, 6, np.arange(5, dtype=np.float32))
    assert masks(rows) == ["00111", "0000011"]
    assert [row.ids.tolist() for row in rows] == [[1, 2, 9, 8, 3], [1, 2, 8, 3, 4, 5, 3]]
    assert [row.advantages.tolist() for row in rows] == [[0, 0, 0, 1, 2], [0, 0, 0, 0, 0, 3, 4]]
    assert [row.trajectory for row in rows] == [6, 6]


def test_case_1_4_a_shorter_prompt_begins_a_new_row() -> None:
    assert masks(rows_of(make_trajectory([([1, 2], [9, 8]), ([1, 2, 9], [5])]), 0)) == ["0011", "0001"]


def test_case_1_5_observations_are_not_trained() -> None:
    [row] = rows_of(make_trajectory([([20, 21], [30, 31]), ([20, 21, 30, 31, 22], [])]), 0)
    assert masks([row]) == ["00110"]


def test_case_1_7_an_assistant_turn_in_the_prompt_is_not_trained() -> None:
    user, shot, question, answer = [1, 2], [3, 4], [1, 5], [3, 6]
    [row] = rows_of(make_trajectory([(user + shot + question, answer)]), 0)
    assert masks([row]) == ["00000011"]


@pytest.mark.parametrize(("action", "mask"), [([5, 6, 2], "0111"), ([5, 6, 7], "0111"), ([2, 2], "011")])
def test_case_7_7_masks_come_from_lengths_and_never_from_token_values(action: list[int], mask: str) -> None:
    # 2 is both padding and end of sequence; the prompt holds it too.
    assert masks(rows_of(make_trajectory([([2], action)]), 0)) == [mask]


def test_case_8_4_three_turns_that_only_append_are_one_row() -> None:
    trajectory = make_trajectory([([1, 2], [3]), ([1, 2, 3, 4], [5]), ([1, 2, 3, 4, 5, 6], [7, 8])])
    [row] = rows_of(trajectory, 0)
    assert len(row) == 8


def test_case_5_5_failed_and_aborted_trajectories_are_refused_by_name() -> None:
    turns = [([1], [2])]
    with pytest.raises(UntrainableTrajectory, match="t1 member 0 failed .environment_error."):
        rows_of(make_trajectory(turns, status="failed", stop_reason="environment_error"), 0)
    with pytest.raises(UntrainableTrajectory, match="aborted"):
        rows_of(make_trajectory(turns, status="truncated", stop_reason="aborted"), 0)
    with pytest.raises(UntrainableTrajectory, match="aborted"):
        rows_of(make_trajectory(turns, sample_stop="aborted"), 0)


def test_case_9_3_missing_logprobs_are_named_with_the_cure() -> None:
    trajectory = make_trajectory([([1], [2, 3])], logprobs=[[-1.0, np.nan]])
    with pytest.raises(MissingLogprobs, match=r"step 0: 1 of 2 sampled tokens have no log-probability.*logprobs=true"):
        rows_of(trajectory, 0)
    [row] = rows_of(trajectory, 0, demonstration=True)
    assert np.isnan(row.logprobs[2]) and masks([row]) == ["011"]


def test_there_is_one_advantage_for_each_sampled_token() -> None:
    with pytest.raises(ValueError, match="2 sampled tokens need as many advantages"):
        rows_of(make_trajectory([([1], [2, 3])]), 0, np.zeros(3, np.float32))


def test_an_action_without_a_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a prompt"):
        rows_of(make_trajectory([([], [2, 3])]), 0)


turn = st.tuples(
    st.booleans(), st.lists(st.integers(0, 5), min_size=1, max_size=4), st.lists(st.integers(0, 5), max_size=4)
)


@given(st.lists(turn, min_size=1, max_size=6))
def test_trained_positions_are_exactly_the_sampled_ones(turns: list[tuple[bool, list[int], list[int]]]) -> None:
    context: list[int] = []
    pairs: list[tuple[list[int], list[int]]] = []
    for extends, observed, action in turns:
        prompt = (context if extends else []) + observed
        pairs.append((prompt, action))
        context = prompt + action
    trajectory = make_trajectory(pairs)
    advantages = np.arange(trajectory.sampled_tokens, dtype=np.float32)
    rows = rows_of(trajectory, 0, advantages)

    def trained(name: str) -> list[float]:
        return [value for row in rows for value in getattr(row, name)[row.trained].tolist()]

    assert trained("ids") == [i for _, action in pairs for i in action]
    assert trained("logprobs") == [v for step in trajectory.steps for v in step.logprobs.tolist()]
    assert trained("step") == [k for k, (_, action) in enumerate(pairs) for _ in action]
    assert trained("advantages") == advantages.tolist()
    assert all((row.logprobs[~row.trained] == 0).all() for row in rows)
    # Every sampled token stands behind exactly the ids the policy saw when it sampled it.
    seen = [(tuple(prompt + action[:i]), action[i]) for prompt, action in pairs for i in range(len(action))]
    stands = [(tuple(row.ids[:t].tolist()), int(row.ids[t])) for row in rows for t in np.flatnonzero(row.trained)]
    assert stands == seen
