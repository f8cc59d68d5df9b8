"""A tiny policy made from scratch, and its transcripts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from renma.models.policy import Policy, load_policy
from renma.recipe import ScratchModel

TEXTS = [
    f"Question: {a} plus {b}?\nCall: calc({a}+{b})\nResult: {a + b}\nAnswer: {a + b}\n"
    for a, b in [(3, 4), (12, 70), (5, 9)]
]


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return TEXTS


@pytest.fixture(scope="session")
def tiny() -> ScratchModel:
    return ScratchModel(
        layers=2, hidden=32, heads=2, feed_forward=48, vocabulary=280, context=64, dtype="float32", device="cpu"
    )


@pytest.fixture
def make_policy(tiny: ScratchModel) -> Callable[..., Policy]:
    def make(seed: int = 0, **changes: object) -> Policy:
        return load_policy(tiny.model_copy(update=changes), texts=lambda: TEXTS, seed=seed)

    return make
