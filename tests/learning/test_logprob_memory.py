"""Case 8.1: the memory of log-probabilities is that of a chunk's logits, as the allocator saw it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from renma.learning.logprobs import token_logprobs

TOKENS, VOCABULARY, HIDDEN = 64, 5000, 16
FLOAT = 4


def peak_bytes(run: Callable[[], None]) -> int:
    """The most that `run` held at once beyond what there was before: every allocation, those inside operations too."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    kineto = profiler.profiler
    assert kineto is not None and kineto.kineto_results is not None
    events = [event for event in kineto.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def chunked_peak(chunk: int, *, trained: bool = False, tokens: int = TOKENS) -> int:
    torch.manual_seed(0)
    hidden = torch.randn(tokens, HIDDEN, requires_grad=True)
    weight = torch.randn(VOCABULARY, HIDDEN, requires_grad=trained)
    targets = torch.randint(0, VOCABULARY, (tokens,))

    def run() -> None:
        token_logprobs(hidden, weight, targets, chunk=chunk)[0].sum().backward()

    return peak_bytes(run)


def test_the_measure_sees_all_logits_of_the_plain_way() -> None:
    hidden, weight = torch.randn(TOKENS, HIDDEN, requires_grad=True), torch.randn(VOCABULARY, HIDDEN)
    targets = torch.randint(0, VOCABULARY, (TOKENS, 1))
    most = peak_bytes(lambda: (hidden @ weight.T).log_softmax(-1).gather(1, targets).sum().backward())
    assert most >= 2 * TOKENS * VOCABULARY * FLOAT


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_case_8_1_peak_memory_is_a_chunk_of_logits_and_their_exponentials(chunk: int) -> None:
    logits = min(chunk, TOKENS) * VOCABULARY * FLOAT
    small = 64 * 1024  # hidden states, one number a token
    assert logits <= chunked_peak(chunk) <= 2 * logits + small


def test_case_8_1_peak_memory_does_not_grow_with_the_tokens() -> None:
    few, many = chunked_peak(7, tokens=32), chunked_peak(7, tokens=256)
    assert many - few <= 64 * 1024 < VOCABULARY * FLOAT * 7


def test_case_8_1_a_trained_head_adds_its_gradient_alone() -> None:
    frozen, trained = chunked_peak(7), chunked_peak(7, trained=True)
    gradient = VOCABULARY * HIDDEN * FLOAT  # twice while autograd hands it over
    assert frozen <= trained <= frozen + 2 * gradient + 64 * 1024
