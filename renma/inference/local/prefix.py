"""Which positions need not be computed: those a row already holds, and those a neighbour is about to compute.

A request joins a running row that has its very tokens (a group's members); takes over an idle row whose whole sequence
it goes on from (the next turn of an episode); otherwise claims an idle row, into which the longest prefix found
anywhere is copied. Of requests that wait together, those that share a long beginning (the few-shot header) compute that
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from renma.inference.local.sequences import Sequences
from renma.inference.local.slots import Request

# A second forward costs about as much as this many positions; a shared beginning that saves less is computed twice.
WORTH_A_FORWARD = 32
# A request's shared beginning shorter than this is not worth a copy from a neighbour that still has to compute it.
WORTH_A_COPY = 8


def shared(tokens: NDArray[np.int32], limits: NDArray[np.int64], prompt: NDArray[np.int32]) -> NDArray[np.int64]:
    """[S] how many leading tokens of `prompt` [P] each row of `tokens` [S, ·] has, within its first `limits` [S]."""
    width = min(len(prompt), int(limits.max(initial=0)))
    differs = np.empty((len(tokens), width + 1), np.bool_)
    np.not_equal(tokens[:, :width], prompt[:width], out=differs[:, :width])
    differs[:, width] = True
    lengths: NDArray[np.int64] = np.minimum(differs.argmax(1), limits)
    return lengths


def admit(rows: Sequences, requests: Sequence[Request]) -> int:
    """Give each request (no more than there are free slots) a row, with what is cached of its prompt.

    At least the last position of a prompt is left to compute: its logits are wanted. Returns the positions reused.
    """
    reused = 0
    homeless: list[Request] = []
    for request in requests:
        common = _common(rows, request)
        if _joined(rows, request, common):
            reused += len(request.prompt)
            continue
        common = np.minimum(common, rows.cached)
        whole = np.flatnonzero((common > 0) & (common == rows.cached) & ~rows.runs)
        common = np.minimum(common, len(request.prompt) - 1)
        best = int(whole[common[whole].argmax()]) if len(whole) else -1
        if best < 0 or common[best] < common.max():
            homeless.append(request)
            continue
        reused += int(common[best])
        rows.place(request, best, int(common[best]))
    for request in homeless:
        common = _common(rows, request)
        if _joined(rows, request, common):
            reused += len(request.prompt)
            continue
        common = np.minimum(np.minimum(common, rows.cached), len(request.prompt) - 1)
        source, length = int(common.argmax()), int(common.max())
        row, source = rows.claim(source if length else -1)
        if row != source and length:
            rows.cache.copy(source, row, 0, length)
        reused += length
        rows.place(request, row, length)
    return reused


def _common(rows: Sequences, request: Request) -> NDArray[np.int64]:
    """[S] how many leading tokens of the prompt each row has, of a running one those included that are not cached."""
    return shared(rows.tokens, np.where(rows.runs, rows.total, rows.cached), request.prompt)


def _joined(rows: Sequences, request: Request, common: NDArray[np.int64]) -> bool:
    """Whether there was a running row whose whole sequence is the prompt; `request` now runs along it."""
    length = len(request.prompt)
    same = np.flatnonzero(rows.runs & (common == length) & (rows.total == length))
    if len(same):
        rows.join(request, int(same[0]))
    return bool(len(same))


@dataclass(slots=True)
class Wave:
    """The order in which uncached sequences are computed: `first`, then `second` after each has copied its `borrow`
    (leader's row, positions)."""

    first: list[int] = field(default_factory=list)
    second: list[int] = field(default_factory=list)
    borrow: dict[int, tuple[int, int]] = field(default_factory=dict)


def plan(sequences: Sequences, rows: Sequence[int]) -> Wave:
    """Order the rows, whose sequences have more than one uncached position, so that none is computed twice."""
    wave = Wave()
    leaders: list[int] = []
    there = np.zeros(sequences.size, np.int64)  # what each leader will hold
    for row in rows:
        sequence = sequences.tokens[row, : sequences.total[row]]
        common = np.minimum(shared(sequences.tokens, there, sequence), len(sequence) - 1)
        leader = int(common.argmax())
        if common[leader] - sequences.cached[row] >= WORTH_A_COPY:
            wave.borrow[row] = leader, int(common[leader])
        else:
            leaders.append(row)
            there[row] = len(sequence)
    saved = dict.fromkeys(leaders, 0)
    for row, (leader, length) in wave.borrow.items():
        saved[leader] += length - int(sequences.cached[row])
    wave.borrow = {row: loan for row, loan in wave.borrow.items() if saved[loan[0]] >= WORTH_A_FORWARD}
    for row in rows:
        (wave.second if row in wave.borrow else wave.first).append(row)
    return wave


def ragged_batches(sizes: Sequence[int], most: int = 4096, padding: int = 64) -> list[list[int]]:
    """Split rows of `sizes` positions into batches to pad: indices into `sizes`, each index once.

    Longest first; a row joins the batch while the padding stays under a quarter of the batch or `padding` positions
    (about what a forward costs by itself), and the padded batch under `most` positions.
    """
    batches: list[list[int]] = []
    filled = 0
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        if batches:
            padded = sizes[batches[-1][0]] * (len(batches[-1]) + 1)
            waste = padded - filled - sizes[i]
            if padded <= most and waste <= max(padding, padded // 4):
                batches[-1].append(i)
                filled += sizes[i]
                continue
        batches.append([i])
        filled = sizes[i]
    return batches
