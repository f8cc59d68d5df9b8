"""Rows that share a beginning share its positions: a pack is a prefix forest run as one sequence under a tree mask.

A few-shot header, a group's prompt and equal first turns are computed once. A node attends to itself and its ancestors
and has its depth as position, so its hidden state, and by the chain rule every gradient, is that of the separate rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from renma.learning.rows import Row
from renma.types import Routing

Longs = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PackCost:
    """What a pack of N positions costs, in units of one position's matrix products: fixed + N + quadratic * N**2.

    quadratic: dense attention over the pack. fixed: launching its operations. Where to cut rows into packs follows.
    """

    fixed: float = 32.0
    quadratic: float = 1 / 1024


@dataclass(frozen=True, slots=True)
class Pack:
    """A prefix forest of N nodes that predicts n trained tokens from M distinct nodes.

    ids [N]: the token of each node. position_ids [N]: its depth. parents [N]: its parent, which comes before
    it; -1 at a root.
    segments: the runs [start, end) of nodes of which each is the parent of the next.
    predictors [M]: the nodes, ascending, whose hidden states predict something.
    token_predictor [n]: for each trained token the index into `predictors` of its parent node, ascending.
    targets [n]: the token's id. rows, at [n]: the row (in the list that was packed) and position it came from.
    token [n]: its place among the trained tokens of that whole list, row after row.
    routing [N, layers, k] int16: the experts of each node, -1 where none are recorded; None where no row has any. Of
    rows that share a node, the first in the pack that recorded it counts: rows sampled from one prefix cache agree.
    """

    ids: Longs
    position_ids: Longs
    parents: Longs
    segments: tuple[tuple[int, int], ...]
    predictors: Longs
    token_predictor: Longs
    targets: Longs
    rows: Longs
    at: Longs
    token: Longs
    routing: Routing | None = None

    @property
    def positions(self) -> int:
        return len(self.ids)

    @property
    def token_nodes(self) -> Longs:
        """[n] the node whose hidden state predicts each trained token."""
        return self.predictors[self.token_predictor]

    def mask(self) -> NDArray[np.bool_]:
        """[N, N]: True where the node of the line attends to the node of the column: itself or an ancestor."""
        size = len(self.ids)
        mask = np.zeros((size, size), np.bool_)
        for start, end in self.segments:
            parent = self.parents[start]
            if parent >= 0:
                mask[start:end, :start] = mask[parent, :start]
            mask[start:end, start:end] = np.tri(end - start, dtype=np.bool_)
        return mask


@dataclass(frozen=True, slots=True)
class _Sorted:
    """The rows in order of their ids, without what follows the last predicting position."""

    order: list[int]
    ids: list[Longs]
    shared: Longs  # [R] how many first tokens a row shares with the row before it

    @property
    def lengths(self) -> Longs:
        return np.array([len(ids) for ids in self.ids], np.int64)


def pack(rows: Sequence[Row], max_positions: int, cost: PackCost | None = None) -> list[Pack]:
    """Cut the rows, in the order of their ids, into packs of at most `max_positions` nodes, as cheaply as can be.

    Sorted rows have their longest shared beginning with their neighbour, so a cut is charged exactly for the positions
    that must be computed again. A row longer than `max_positions` is a pack of its own. Rows that train nothing are in
    no pack. Every trained token is in exactly one pack, once.
    """
    ordered = _sort(rows)
    starts = np.cumsum([0, *(int(np.count_nonzero(row.trained)) for row in rows)])
    return [
        _build(rows, ordered, first, last, starts)
        for first, last in _cut(ordered.lengths, ordered.shared, max_positions, cost or PackCost())
    ]


def _sort(rows: Sequence[Row]) -> _Sorted:
    # Big-endian bytes of non-negative ids sort as the ids do.
    keyed: list[tuple[bytes, int]] = []
    for number, row in enumerate(rows):
        trained = np.flatnonzero(row.trained)
        if len(trained):
            keyed.append((row.ids[: trained[-1]].astype(">i4").tobytes(), number))
    keyed.sort()
    ids = [np.frombuffer(key, ">i4").astype(np.int64) for key, _ in keyed]
    shared = [0, *(_shared(a, b) for a, b in pairwise(ids))]
    return _Sorted([number for _, number in keyed], ids, np.array(shared[: len(ids)], np.int64))


def _shared(a: Longs, b: Longs) -> int:
    size = min(len(a), len(b))
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if len(different) else size


def _cut(lengths: Longs, shared: Longs, max_positions: int, cost: PackCost) -> list[tuple[int, int]]:
    """[first, last) of each pack: the least total cost over all ways to cut (dynamic programming over the last cut)."""
    count = len(lengths)
    grown = np.concatenate([[0], np.cumsum(lengths - shared)])
    best = np.zeros(count + 1)
    cut = np.zeros(count + 1, np.int64)
    # A pack of rows i..j has lengths[i] + (new positions of i+1..j) nodes.
    head = lengths - grown[1:]
    oldest = 0
    for end in range(1, count + 1):
        while oldest < end - 1 and grown[end] - grown[oldest + 1] > max_positions:
            oldest += 1
        size = head[oldest:end] + grown[end]
        total = best[oldest:end] + cost.fixed + size + cost.quadratic * size.astype(np.float64) ** 2
        total[:-1][size[:-1] > max_positions] = np.inf
        choice = int(np.argmin(total))
        best[end], cut[end] = total[choice], oldest + choice
    packs: list[tuple[int, int]] = []
    end = count
    while end:
        packs.append((int(cut[end]), end))
        end = int(cut[end])
    return packs[::-1]


def _build(rows: Sequence[Row], ordered: _Sorted, first: int, last: int, starts: Longs) -> Pack:
    ids: list[Longs] = []
    positions: list[Longs] = []
    parents: list[Longs] = []
    segments: list[tuple[int, int]] = []
    tokens: list[tuple[Longs, Longs, Longs, Longs, Longs]] = []
    paths: list[tuple[int, Longs]] = []
    path = np.empty(0, np.int64)
    size = 0
    for place in range(first, last):
        row_ids = ordered.ids[place]
        kept = 0 if place == first else int(ordered.shared[place])
        new = np.arange(size, size + len(row_ids) - kept)
        path = np.concatenate([path[:kept], new])
        if len(new):
            ids.append(row_ids[kept:])
            positions.append(np.arange(kept, len(row_ids)))
            parents.append(np.concatenate([path[kept - 1 : kept] if kept else np.array([-1]), new[:-1]]))
            segments.append((size, size + len(new)))
            size += len(new)
        number = ordered.order[place]
        row = rows[number]
        paths.append((number, path))
        at = np.flatnonzero(row.trained)
        token = starts[number] + np.arange(len(at))
        tokens.append((path[at - 1], row.ids[at].astype(np.int64), np.full(len(at), number), at, token))
    nodes, targets, row_of, at_of, token_of = (np.concatenate(part) for part in zip(*tokens, strict=True))
    order = np.argsort(nodes, kind="stable")
    predictors, token_predictor = np.unique(nodes[order], return_inverse=True)
    return Pack(
        np.concatenate(ids),
        np.concatenate(positions),
        np.concatenate(parents),
        tuple(segments),
        predictors,
        token_predictor.astype(np.int64),
        targets[order],
        row_of[order],
        at_of[order],
        token_of[order],
        _routing(rows, paths, size),
    )


def _routing(rows: Sequence[Row], paths: Sequence[tuple[int, Longs]], size: int) -> Routing | None:
    """[size, layers, k] of the nodes; paths: for each row its number and the nodes it runs along."""
    recorded = [(routing, path) for number, path in paths if (routing := rows[number].routing) is not None]
    if not recorded:
        return None
    nodes = np.full((size, *recorded[0][0].shape[1:]), -1, np.int16)
    for routing, path in recorded:
        lacking = nodes[path, 0, 0] < 0
        nodes[path[lacking]] = routing[: len(path)][lacking]
    return nodes
