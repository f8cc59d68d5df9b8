"""What each running request has sampled, and how it is sampled. Where its sequence lies is sequences.py's matter."""

from __future__ import annotations

import asyncio
import heapq
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from renma.inference.base import Sample, SamplingParams
from renma.inference.local.sampler import Drawing, uniforms
from renma.inference.stopping import StopStrings
from renma.types import Routing, SampleStop


@dataclass(slots=True, eq=False)
class Request:
    """One call of `sample`. `most`: how many tokens are sampled at most. slot: its place in `Slots`, row: where its
    sequence is in `Sequences`; -1 while it waits."""

    prompt: NDArray[np.int32]
    params: SamplingParams
    order: tuple[object, ...]
    most: int
    stop_ids: frozenset[int]
    stop_strings: StopStrings | None
    future: asyncio.Future[Sample] = field(repr=False)
    slot: int = -1
    row: int = -1

    def settle(self, sample: Sample) -> None:
        if not self.future.done():
            self.future.set_result(sample)


class Slots:
    """Arrays over slots [S] and over the tokens sampled there [S, context].

    ids, logprobs, versions: of each sampled token; count: how many there are.
    """

    def __init__(self, slots: int, context: int) -> None:
        self.size = slots
        self.requests: list[Request | None] = [None] * slots
        self.ids = np.zeros((slots, context), np.int32)
        self.logprobs = np.zeros((slots, context), np.float32)
        self.versions = np.zeros((slots, context), np.int32)
        self.count = np.zeros(slots, np.int64)
        self.seeds = np.zeros(slots, np.uint64)
        self.inverse_temperature = np.ones(slots, np.float32)
        self.greedy = np.zeros(slots, np.bool_)
        self.top_k = np.zeros(slots, np.int64)
        self.top_p = np.ones(slots, np.float64)
        self.min_p = np.zeros(slots, np.float64)
        self._free = list(range(slots))  # a heap

    @property
    def busy(self) -> int:
        return self.size - len(self._free)

    @property
    def running(self) -> list[Request]:
        return [request for request in self.requests if request is not None]

    def place(self, request: Request) -> None:
        """Give `request` a free slot."""
        slot, params = heapq.heappop(self._free), request.params
        self.requests[slot], request.slot = request, slot
        self.count[slot] = 0
        self.seeds[slot] = params.seed & 0xFFFFFFFFFFFFFFFF
        self.greedy[slot] = params.temperature == 0
        self.inverse_temperature[slot] = 1.0 / params.temperature if params.temperature else 1.0
        self.top_k[slot], self.top_p[slot], self.min_p[slot] = params.top_k, params.top_p, params.min_p

    def vacate(self, request: Request) -> None:
        """`request` runs no longer."""
        self.requests[request.slot] = None
        # The lowest is taken first, whatever order requests ended in: a resumed run then has the same slots.
        heapq.heappush(self._free, request.slot)
        request.slot = -1

    def finish(self, request: Request, reason: SampleStop, routing: Routing | None) -> None:
        """Answer `request` with what was sampled, and vacate its slot."""
        slot, count = request.slot, int(self.count[request.slot])
        sample = Sample(
            self.ids[slot, :count].copy(),
            self.logprobs[slot, :count].copy(),
            self.versions[slot, :count].copy(),
            reason,
            routing,
        )
        self.vacate(request)
        request.settle(sample)

    def append(
        self, slots: NDArray[np.int64], tokens: NDArray[np.int64], logprobs: NDArray[np.float32], version: int
    ) -> None:
        """One sampled token to each of `slots`."""
        at = self.count[slots]
        self.ids[slots, at], self.logprobs[slots, at], self.versions[slots, at] = tokens, logprobs, version
        self.count[slots] += 1

    def drawing(self, slots: NDArray[np.int64], of: NDArray[np.int64]) -> Drawing | None:
        """How the next token of each of `slots` is drawn, several of them from one line of logits.

        of: the line of each, ascending from 0. None where those of one line are drawn in different ways: they need a
        line each.
        """
        first = np.flatnonzero(np.diff(of, prepend=-1))
        one = slots[first]
        ways = (self.inverse_temperature, self.greedy, self.top_k, self.top_p, self.min_p)
        if len(one) < len(slots) and any((way[slots] != way[one][of]).any() for way in ways):
            return None
        return Drawing(
            self.inverse_temperature[one],
            self.greedy[one],
            self.top_k[one],
            self.top_p[one],
            self.min_p[one],
            uniforms(self.seeds[slots], self.count[slots]),
            of,
        )
