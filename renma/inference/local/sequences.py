"""The sequences whose keys and values are kept, a row each: a tree of which every branch is computed once.

Requests with the same tokens so far share a row: it is run once for all of them, and each draws its own token from its
logits. Where they draw different ones the row branches. So a group that starts from one prompt, and the members of it
that write the same words, cost one member; with the policy's entropy goes the work.

Running rows are kept at 0..running-1, so that a round of decoding reads the first rows of the buffers as they lie. The
others are a cache of what was: the next turn of an episode goes on from its row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from renma.inference.local.cache import SlotCache
from renma.inference.local.slots import Request
from renma.types import Routing


class Sequences:
    """Arrays over rows [S] and over their positions [S, context].

    tokens: of each position. cached: how many positions have keys and values. total: how many tokens there are (of
    running rows; the last has no keys and values yet). used: when the row last ran. fresh: whether nothing was sampled
    there yet. sharers: the requests that run along the row; none: it is idle.
    """

    def __init__(self, rows: int, context: int, cache: SlotCache) -> None:
        self.size = rows
        self.cache = cache
        self.tokens = np.zeros((rows, context), np.int32)
        self.cached = np.zeros(rows, np.int64)
        self.total = np.zeros(rows, np.int64)
        self.used = np.zeros(rows, np.int64)
        self.fresh = np.zeros(rows, np.bool_)
        self.runs = np.zeros(rows, np.bool_)
        self.sharers: list[list[Request]] = [[] for _ in range(rows)]
        self._clock = 0

    @property
    def running(self) -> int:
        return int(np.count_nonzero(self.runs))

    def place(self, request: Request, row: int, cached: int) -> None:
        """Run `request` along the idle `row`, whose first `cached` positions already are its prompt's."""
        length = len(request.prompt)
        self.tokens[row, :length] = request.prompt
        self.cached[row], self.total[row] = cached, length
        self._run(row, [request], fresh=True)

    def join(self, request: Request, row: int) -> None:
        """`request` has the very tokens of the running `row`."""
        self.sharers[row].append(request)
        request.row = row

    def leave(self, request: Request) -> None:
        """`request` runs no longer; its sequence stays cached."""
        row, request.row = request.row, -1
        self.sharers[row].remove(request)
        if not self.sharers[row]:
            self.runs[row] = False
            self._clock += 1
            self.used[row] = self._clock

    def extend(self, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        """One sampled token to each of `rows`."""
        self.tokens[rows, self.total[rows]] = tokens
        self.total[rows] += 1
        self.fresh[rows] = False

    def branch(self, row: int, movers: Sequence[Request], token: int) -> None:
        """`movers` leave `row` for a row of their own that ends in `token` where `row` has another last token."""
        kept = self.sharers[row]
        for request in movers:
            kept.remove(request)
        new, _ = self.claim()
        before = int(self.total[row]) - 1
        cached = int(self.cached[row])
        self.cache.copy(row, new, 0, cached)
        self.tokens[new, :before] = self.tokens[row, :before]
        self.tokens[new, before] = token
        self.cached[new], self.total[new] = cached, before + 1
        self._run(new, list(movers), fresh=False)

    def claim(self, source: int = -1) -> tuple[int, int]:
        """An idle row to write to, at the front; and where the sequence of row `source` is now.

        What is forgotten is an empty row, else the one that ran longest ago, and `source` only when no other is idle.
        """
        idle = np.flatnonzero(~self.runs)
        row = int(idle[0])
        order = np.lexsort((self.used[idle], self.cached[idle] > 0, idle == source))
        victim = int(idle[order[0]])
        if victim != row:
            length = int(self.cached[row])
            self.cache.copy(row, victim, 0, length)
            self.tokens[victim, :length] = self.tokens[row, :length]
            self.cached[victim], self.used[victim] = length, self.used[row]
            if source == row:
                source = victim
        if source != row:
            self.cached[row] = 0
        return row, source

    def compact(self) -> int:
        """Move running rows to the front, each hole filled from the end; gives how many run."""
        running = self.running
        holes = np.flatnonzero(~self.runs[:running])
        movers = running + np.flatnonzero(self.runs[running:])
        for hole, mover in zip(holes.tolist(), movers[::-1].tolist(), strict=True):
            self._swap(hole, mover)
        return running

    def shared(self, running: int) -> int:
        """How many first positions of rows 0..running-1 are equal, those that are cached in all."""
        length = int(self.cached[:running].min())
        equal = (self.tokens[:running, :length] == self.tokens[0, :length]).all(0)
        return length if equal.all() else int(equal.argmin())

    def forget(self) -> None:
        """Nothing is cached any more; the running requests stay.

        Nor does it matter which row was used when: the order of requests in a batch, and so the last bits of their
        log-probabilities, then do not depend on what was sampled before (a resumed run has not sampled it).
        """
        self.cached[:] = 0
        self.used[:] = 0
        self.fresh[:] = False

    def routing(self, request: Request, sampled: int) -> Routing | None:
        """[tokens, layers, k] the experts chosen along `request`'s sequence of `sampled` sampled tokens, -1 where
        nothing is computed; None: not recorded."""
        recorded = self.cache.recorded(request.row, int(self.cached[request.row]))
        if recorded is None:
            return None
        routing = np.full((len(request.prompt) + sampled, *recorded.shape[1:]), -1, np.int16)
        routing[: len(recorded)] = recorded.cpu().numpy()
        return routing

    def _run(self, row: int, requests: list[Request], fresh: bool) -> None:
        self.sharers[row] = requests
        self.runs[row], self.fresh[row] = True, fresh
        for request in requests:
            request.row = row

    def _swap(self, idle: int, running: int) -> None:
        """Exchange an idle row and a running one."""
        filled = [int(self.cached[idle]), int(self.cached[running])]
        if filled[0]:
            self.cache.swap(idle, running, max(filled))
        else:
            self.cache.copy(running, idle, 0, filled[1])
        pair, back = [idle, running], [running, idle]
        length = max(filled[0], int(self.total[running]))
        self.tokens[pair, :length] = self.tokens[back, :length]
        for vector in (self.cached, self.total, self.used, self.fresh, self.runs):
            vector[pair] = vector[back]
        self.sharers[idle], self.sharers[running] = self.sharers[running], self.sharers[idle]
        for request in self.sharers[idle]:
            request.row = idle
