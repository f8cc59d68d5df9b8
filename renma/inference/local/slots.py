"""What the slots hold: the tokens of each sequence, how many of them are cached, and the request that runs there.

Busy slots are kept at 0..busy-1, so that a round of decoding reads the first rows of the buffers as they lie.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from renma.inference.base import Sample, SamplingParams
from renma.inference.local.cache import SlotCache
from renma.inference.local.sampler import Drawing, uniforms
from renma.inference.local.stopping import StopStrings
from renma.types import Routing, SampleStop


@dataclass(slots=True, eq=False)
class Request:
    """One call of `sample`. `limit` is the length, prompt and action together, at which the action is cut."""

    prompt: NDArray[np.int32]
    params: SamplingParams
    order: tuple[object, ...]
    limit: int
    stop_ids: frozenset[int]
    stop_strings: StopStrings | None
    future: asyncio.Future[Sample] = field(repr=False)
    slot: int = -1

    def settle(self, sample: Sample) -> None:
        if not self.future.done():
            self.future.set_result(sample)


class Slots:
    """Arrays over slots [S] and over their positions [S, context].

    tokens, logprobs, versions: of each position; the latter two mean something at sampled positions only.
    cached: how many positions have keys and values; total: how many tokens there are (busy slots; the last has none
    yet); start: the prompt's length; used: when the slot was last busy.
    """

    def __init__(self, slots: int, context: int, cache: SlotCache) -> None:
        self.count = slots
        self.cache = cache
        self.requests: list[Request | None] = [None] * slots
        self.tokens = np.zeros((slots, context), np.int32)
        self.logprobs = np.zeros((slots, context), np.float32)
        self.versions = np.zeros((slots, context), np.int32)
        self.cached = np.zeros(slots, np.int64)
        self.total = np.zeros(slots, np.int64)
        self.start = np.zeros(slots, np.int64)
        self.used = np.zeros(slots, np.int64)
        self.seeds = np.zeros(slots, np.uint64)
        self.inverse_temperature = np.ones(slots, np.float32)
        self.greedy = np.zeros(slots, np.bool_)
        self.top_k = np.zeros(slots, np.int64)
        self.top_p = np.ones(slots, np.float64)
        self.min_p = np.zeros(slots, np.float64)
        self._clock = 0

    @property
    def busy(self) -> int:
        return sum(request is not None for request in self.requests)

    def idle(self) -> list[int]:
        """Slots without a request: empty ones first, then the least recently used."""
        rows = [row for row, request in enumerate(self.requests) if request is None]
        return sorted(rows, key=lambda row: (self.cached[row] > 0, self.used[row], row))

    def place(self, request: Request, row: int, cached: int) -> None:
        """Put `request` into slot `row`, whose first `cached` positions already are its prompt's."""
        length, params = len(request.prompt), request.params
        self.requests[row], request.slot = request, row
        self.tokens[row, :length] = request.prompt
        self.cached[row], self.total[row], self.start[row] = cached, length, length
        self.seeds[row] = params.seed & 0xFFFFFFFFFFFFFFFF
        self.greedy[row] = params.temperature == 0
        self.inverse_temperature[row] = 1.0 / params.temperature if params.temperature else 1.0
        self.top_k[row], self.top_p[row], self.min_p[row] = params.top_k, params.top_p, params.min_p

    def vacate(self, row: int) -> Request:
        """End the request in `row`; its sequence stays cached."""
        request = self.requests[row]
        assert request is not None
        self.requests[row], request.slot = None, -1
        self._clock += 1
        self.used[row] = self._clock
        return request

    def finish(self, row: int, reason: SampleStop) -> None:
        """End the request in `row` and answer it with what was sampled."""
        span = slice(int(self.start[row]), int(self.total[row]))
        sample = Sample(
            self.tokens[row, span].copy(),
            self.logprobs[row, span].copy(),
            self.versions[row, span].copy(),
            reason,
            self._routing(row),
        )
        self.vacate(row).settle(sample)

    def _routing(self, row: int) -> Routing | None:
        """[total, layers, k] the experts chosen in slot `row`, -1 where nothing is computed; None: not recorded."""
        recorded = self.cache.recorded(row, int(self.cached[row]))
        if recorded is None:
            return None
        routing = np.full((int(self.total[row]), *recorded.shape[1:]), -1, np.int16)
        routing[: len(recorded)] = recorded.cpu().numpy()
        return routing

    def append(
        self, rows: NDArray[np.int64], tokens: NDArray[np.int64], logprobs: NDArray[np.float32], version: int
    ) -> None:
        """One sampled token to each of `rows`."""
        at = self.total[rows]
        self.tokens[rows, at], self.logprobs[rows, at], self.versions[rows, at] = tokens, logprobs, version
        self.total[rows] += 1

    def drawing(self, rows: NDArray[np.int64]) -> Drawing:
        """How the next token of each of `rows` is to be drawn."""
        return Drawing(
            self.inverse_temperature[rows],
            self.greedy[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            uniforms(self.seeds[rows], self.total[rows] - self.start[rows]),
        )

    def compact(self) -> int:
        """Move busy slots to the front, each hole filled from the end; gives how many are busy."""
        busy = self.busy
        holes = [row for row in range(busy) if self.requests[row] is None]
        movers = [row for row in range(busy, self.count) if self.requests[row] is not None]
        for hole, mover in zip(holes, reversed(movers), strict=True):
            self._swap(hole, mover)
        return busy

    def forget(self) -> None:
        """Nothing is cached any more; the running requests stay.

        Nor does it matter which slot was used when: the order of requests in a batch, and so the last bits of their
        log-probabilities, then do not depend on what was sampled before (a resumed run has not sampled it).
        """
        self.cached[:] = 0
        self.used[:] = 0

    def _swap(self, one: int, other: int) -> None:
        pair, back = [one, other], [other, one]
        filled = int(self.cached[pair].max())
        if filled:
            self.cache.swap(one, other, filled)
        length = int(max(filled, self.total[pair].max()))
        for array in (self.tokens, self.logprobs, self.versions):
            array[pair, :length] = array[back, :length]
        for vector in (
            self.cached,
            self.total,
            self.start,
            self.used,
            self.seeds,
            self.inverse_temperature,
            self.greedy,
            self.top_k,
            self.top_p,
            self.min_p,
        ):
            vector[pair] = vector[back]
        self.requests[one], self.requests[other] = self.requests[other], self.requests[one]
        for row in pair:
            request = self.requests[row]
            if request is not None:
                request.slot = row
