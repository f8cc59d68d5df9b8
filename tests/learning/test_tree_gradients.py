"""Target of the tree: in float32, its gradients are those of the separate rows to 1e-5 of their size.

Random trees, deep and wide, with spans trained at random, under full, sliding and mixed attention whose windows are
smaller than the tree is deep, cut into packs at random.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen3Config

from renma.learning import tree_attention
from renma.learning.forward import TreeModel
from renma.learning.learner import Learner
from renma.learning.losses import reinforce
from renma.learning.rows import Row, rows_of
from renma.recipe import LearnerSection
from tests.learning.tiny import COMMON, make_model, make_row, make_trajectory, separate_logprobs

TOLERANCE = 1e-5
WINDOWS = (2, 3, 7, 19)
STYLES = {
    "llama": lambda window: LlamaConfig(**COMMON),
    "qwen3": lambda window: Qwen3Config(**COMMON),
    "mistral": lambda window: MistralConfig(**COMMON, sliding_window=window),
    "gemma3": lambda window: Gemma3TextConfig(
        **COMMON,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=window,
        final_logit_softcapping=5.0,
    ),
}


@cache
def model_of(style: str, window: int) -> Any:
    torch.manual_seed(0)
    config = STYLES[style](window)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def random_tree(seed: int, rows: int, depth: int, branching: float, symbols: int) -> list[Row]:
    """Rows up to `depth` tokens. branching: how early a row leaves an earlier one: 0 at its end, 1 at its root.

    Each row has turns: a span that is not trained, then one that is, of 1 to 8 tokens each.
    """
    rng = np.random.default_rng(seed)
    found: list[list[int]] = []
    for _ in range(rows):
        ids: list[int] = []
        if found:
            other = found[int(rng.integers(len(found)))]
            ids = other[: round(len(other) * (1 - branching * rng.random()))]
        more = int(rng.integers(1 if found else 2, depth + 1))
        found.append((ids + rng.integers(0, symbols, more).tolist())[:depth])
    return [make_row(ids, spans(rng, len(ids)), trajectory=i) for i, ids in enumerate(found) if len(ids) > 1]


def spans(rng: np.random.Generator, length: int) -> list[int]:
    trained: list[int] = []
    while len(trained) < length:
        trained += [0] * int(rng.integers(1, 9)) + [1] * int(rng.integers(1, 9))
    trained = trained[:length]
    if not any(trained):
        trained[-1] = 1
    return trained


def gradients(model: Any) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def of_separate_rows(model: Any, rows: list[Row], cotangents: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    for row, cotangent in zip(rows, cotangents, strict=True):
        (separate_logprobs(model, row) * cotangent).sum().backward()
    return gradients(model)


def of_the_tree(
    model: Any, rows: list[Row], cotangents: list[torch.Tensor], max_positions: int, block: int = tree_attention.BLOCK
) -> dict[str, torch.Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_attention, "BLOCK", block)
        return of_packs(model, rows, cotangents, max_positions)


def of_packs(
    model: Any, rows: list[Row], cotangents: list[torch.Tensor], max_positions: int
) -> dict[str, torch.Tensor]:
    tree_model = TreeModel(model, logit_chunk=13)
    tree_model.begin()
    each = torch.cat(cotangents)
    for tree in tree_model.packs(rows, max_positions):
        logp, _ = tree_model.logprobs(tree)
        (logp * each[torch.from_numpy(tree.token)]).sum().backward()
    tree_model.finish()
    return gradients(model)


def cotangents_of(rows: list[Row]) -> list[torch.Tensor]:
    return [
        torch.from_numpy(np.random.default_rng(i).normal(size=int(row.trained.sum())).astype(np.float32))
        for i, row in enumerate(rows)
    ]


def furthest_apart(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest ||got - wanted|| / ||wanted|| over the parameters, and which.

    Where a gradient is nearly 0 beside the others (what a first token attends to does not depend on its query) its
    rounding is measured against a tenth of the whole gradient's norm.
    """
    assert got.keys() == wanted.keys()
    whole = float(torch.cat([gradient.flatten() for gradient in wanted.values()]).norm())
    return max(
        (float((got[name] - gradient).norm()) / max(float(gradient.norm()), whole / 10), name)
        for name, gradient in wanted.items()
    )


def assert_equal(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    apart, name = furthest_apart(got, wanted)
    assert apart <= TOLERANCE, f"{name}: the gradients differ by {apart:.2g} of their norm"


trees = st.builds(
    random_tree,
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 12),
    depth=st.integers(2, 48),
    branching=st.sampled_from([0.0, 0.3, 1.0]),
    symbols=st.sampled_from([2, 5, 48]),
)


@pytest.mark.parametrize("style", sorted(STYLES))
@settings(max_examples=10, deadline=None)
@given(rows=trees, window=st.sampled_from(WINDOWS), max_positions=st.integers(16, 200), block=st.integers(1, 40))
def test_a_random_tree_has_the_gradients_of_its_rows_in_float32(
    style: str, rows: list[Row], window: int, max_positions: int, block: int
) -> None:
    """block: of how many nodes attention computes the scores at once (tree_attention.py)."""
    model = model_of(style, window if style in ("mistral", "gemma3") else 0)
    cotangents = cotangents_of(rows)
    tree = of_the_tree(model, rows, cotangents, max_positions, block)
    assert_equal(tree, of_separate_rows(model, rows, cotangents))


@pytest.mark.parametrize("style", ["llama", "gemma3"])
def test_eager_attention_takes_the_whole_mask_and_gives_the_same(style: str) -> None:
    rows = random_tree(3, rows=6, depth=30, branching=0.3, symbols=5)
    model, cotangents = model_of(style, 7), cotangents_of(rows)
    by_blocks = of_the_tree(model, rows, cotangents, 4096, block=8)
    model.set_attn_implementation("eager")
    try:
        assert_equal(of_the_tree(model, rows, cotangents, 4096), by_blocks)
    finally:
        model.set_attn_implementation("sdpa")


@pytest.mark.parametrize(("style", "window"), [("llama", 0), ("gemma3", 7)])
def test_a_group_deeper_than_the_window_and_wider_than_a_pack(style: str, window: int) -> None:
    """A header of 40, 8 members of 3 turns: 0 or more of the shared beginning is computed again at each cut."""
    rng = np.random.default_rng(0)
    header = rng.integers(0, 48, 40).tolist()
    rows = []
    for member in range(8):
        turns = rng.integers(0, 48, 36).tolist()
        rows.append(make_row(header + turns, [0] * 40 + [1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0] * 3, trajectory=member))
    model, cotangents = model_of(style, window), cotangents_of(rows)
    wanted = of_separate_rows(model, rows, cotangents)
    for max_positions in (16, 100, 4096):
        assert_equal(of_the_tree(model, rows, cotangents, max_positions), wanted)


# Case 8.4, as it is written: 3 turns, append-only.

TURNS = [([1, 2], [3]), ([1, 2, 3, 4], [5]), ([1, 2, 3, 4, 5, 6], [7, 8])]


def separate_turns() -> list[Row]:
    """The three turns as three rows: each one's whole prompt, its action alone trained."""
    rows = []
    for number, (prompt, action) in enumerate(TURNS):
        [row] = rows_of(make_trajectory([(prompt, action)], logprobs=[[-1.0] * len(action)]), 0)
        rows.append(make_row(row.ids, row.trained.astype(int).tolist(), advantage=1.0, step=number, trajectory=0))
    return rows


def merged_turns() -> Row:
    [row] = rows_of(make_trajectory(TURNS), 0, np.ones(4, np.float32))
    return row


def test_case_8_4_three_turns_are_one_row_of_as_many_tokens_as_the_last() -> None:
    row = merged_turns()
    assert row.ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert len(row) == len(TURNS[-1][0]) + len(TURNS[-1][1]) == 8
    assert sum(len(prompt) + len(action) for prompt, action in TURNS) == 16


def test_case_8_4_merged_and_separate_rows_have_the_same_tokens_and_the_same_gradient() -> None:
    def trained(rows: list[Row]) -> list[tuple[tuple[int, ...], int]]:
        return sorted((tuple(r.ids[:t].tolist()), int(r.ids[t])) for r in rows for t in np.flatnonzero(r.trained))

    merged, apart = [merged_turns()], separate_turns()
    assert trained(merged) == trained(apart)
    assert [token for _, token in trained(merged)] == [3, 5, 7, 8]
    model = make_model()
    ones = [[torch.ones(int(row.trained.sum())) for row in rows] for rows in (merged, apart)]
    wanted = of_separate_rows(model, apart, ones[1])
    assert_equal(of_separate_rows(model, merged, ones[0]), wanted)
    assert_equal(of_the_tree(model, merged, ones[0], 4096), wanted)
    assert_equal(of_the_tree(model, apart, ones[1], 4096), wanted)


def test_case_8_4_the_learner_computes_seven_positions_either_way() -> None:
    """The last token predicts nothing: 7 of the merged row's 8. As a tree, the three rows are that same path."""
    results, weights = [], []
    for rows in ([merged_turns()], separate_turns()):
        model = make_model()
        learner = Learner(model, LearnerSection(learning_rate=1e-3))
        results.append(learner.update(rows, loss=reinforce()))
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert [r["positions"] for r in results] == [7, 7]
    assert [r["row_tokens"] for r in results] == [8, 16]
    assert [r["trained_tokens"] for r in results] == [4, 4]
    for name in ("loss", "grad_norm", "entropy"):
        assert results[0][name] == pytest.approx(results[1][name], rel=1e-5)
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-5, atol=1e-5)
