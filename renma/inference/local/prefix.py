"""Which positions need not be computed: those a slot already holds, and those a neighbour is about to compute.

A request takes over an idle slot whose whole sequence it goes on from (the next turn of an episode); otherwise the
least recently used idle slot, into which the longest prefix found anywhere is copied. Of requests that wait together,
those with one prompt compute it once, and those that share a long beginning (the few-shot header) compute that once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from renma.inference.local.slots import Request, Slots

# A second forward costs about as much as this many positions; a shared beginning that saves less is computed twice.
WORTH_A_FORWARD = 32
# A request's shared beginning shorter than this is not worth a copy from a neighbour that still has to compute it.
WORTH_A_COPY = 8
# An idle slot is taken over when the request uses all but this many of its cached positions.
LOST_AT_TAKEOVER = 2


def shared(tokens: NDArray[np.int32], limits: NDArray[np.int64], prompt: NDArray[np.int32]) -> NDArray[np.int64]:
    """[S] how many leading tokens of `prompt` [P] each row of `tokens` [S, ·] has, within its first `limits` [S]."""
    width = min(len(prompt), int(limits.max(initial=0)))
    differs = np.empty((len(tokens), width + 1), np.bool_)
    np.not_equal(tokens[:, :width], prompt[:width], out=differs[:, :width])
    differs[:, width] = True
    lengths: NDArray[np.int64] = np.minimum(differs.argmax(1), limits)
    return lengths


def admit(slots: Slots, requests: Sequence[Request]) -> int:
    """Give each request (no more than there are idle slots) a slot and what is cached of its prompt.

    At least the last position of a prompt is left to compute: its logits are wanted. Returns the positions reused.
    """
    reused = 0
    homeless: list[Request] = []
    for request in requests:
        common = np.minimum(shared(slots.tokens, slots.cached, request.prompt), len(request.prompt) - 1)
        whole = [
            row
            for row in np.flatnonzero((common > 0) & (common >= slots.cached - LOST_AT_TAKEOVER))
            if slots.requests[row] is None
        ]
        best = max(whole, key=lambda row: common[row], default=None)
        if best is None or common[best] < common.max():
            homeless.append(request)
            continue
        reused += int(common[best])
        slots.place(request, int(best), int(common[best]))
    for request in homeless:
        common = np.minimum(shared(slots.tokens, slots.cached, request.prompt), len(request.prompt) - 1)
        source, length = int(common.argmax()), int(common.max())
        idle = slots.idle()
        row = next((row for row in idle if row != source), source) if length else idle[0]
        if row != source and length:
            slots.cache.copy(source, row, 0, length)
        reused += length
        slots.place(request, row, length)
    return reused


@dataclass(slots=True)
class Wave:
    """The order in which uncached sequences are computed: `first`, then `second` after each has copied its `borrow`
    (leader's slot, positions), then `twins`, which take all from their leader, the logits too."""

    first: list[int] = field(default_factory=list)
    second: list[int] = field(default_factory=list)
    borrow: dict[int, tuple[int, int]] = field(default_factory=dict)
    twins: dict[int, int] = field(default_factory=dict)


def plan(slots: Slots, rows: Sequence[int]) -> Wave:
    """Order the slots `rows`, whose sequences have more than one uncached position, so that none is computed twice."""
    wave = Wave()
    promised = np.zeros(slots.count, np.int64)  # what each slot will hold that is computed before or beside this one
    leaders: list[int] = []
    for row in rows:
        sequence = slots.tokens[row, : slots.total[row]]
        common = shared(slots.tokens, promised, sequence)
        leader = int(common.argmax())
        promised[row] = len(sequence)
        if common[leader] == len(sequence) == slots.total[leader]:
            wave.twins[row] = wave.twins.get(leader, leader)
            continue
        first = np.zeros_like(common)
        first[leaders] = np.minimum(common[leaders], len(sequence) - 1)
        leader = int(first.argmax())
        if first[leader] - slots.cached[row] >= WORTH_A_COPY:
            wave.borrow[row] = leader, int(first[leader])
        else:
            leaders.append(row)
    saved = dict.fromkeys(leaders, 0)
    for row, (leader, length) in wave.borrow.items():
        saved[leader] += length - int(slots.cached[row])
    wave.borrow = {row: loan for row, loan in wave.borrow.items() if saved[loan[0]] >= WORTH_A_FORWARD}
    for row in rows:
        if row not in wave.twins:
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
