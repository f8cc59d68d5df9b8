"""Named spans in the code, which cost next to nothing until somebody listens.

    with span("render"):            # plain code: the spans of a thread lie in one another
        prompt = renderer.start(messages)
    with interval("environment"):   # something awaited, while other tasks do other things
        result = await environment.step(action)

A listener (`recording`) gets every span that ends while it listens, with its own time: what its inner spans took is
theirs. So the own times of a thread's spans add up to the outermost, and nothing is counted twice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
Mark = Callable[[str], AbstractContextManager[object]]
"""Makes a span visible elsewhere too: torch.profiler.record_function, say."""


@dataclass(frozen=True, slots=True)
class Span:
    """One span: `start` and `end` in nanoseconds of the recording's clock. own: nanoseconds without those of the spans
    inside it. depth: spans around it on its thread; -1 for an interval, which may overlap anything."""

    name: str
    thread: int
    depth: int
    start: int
    end: int
    own: int


@dataclass(slots=True)
class Recording:
    """The spans that ended while it listened, in the order of their ends. thread: the one that began it."""

    mark: Mark | None = None
    clock: Callable[[], int] = time.perf_counter_ns
    thread: int = field(default_factory=threading.get_ident)
    spans: list[Span] = field(default_factory=list)
    open: threading.local = field(default_factory=threading.local)

    def own_seconds(self, thread: int | None = None) -> dict[str, float]:
        """Own time by name of the spans of one thread (None: the recording's); intervals are left out."""
        wanted = self.thread if thread is None else thread
        totals: dict[str, float] = {}
        for span in self.spans:
            if span.thread == wanted and span.depth >= 0:
                totals[span.name] = totals.get(span.name, 0.0) + span.own / 1e9
        return totals

    def beside_seconds(self) -> dict[str, float]:
        """Time by name of what ran beside the recording's thread: intervals, summed though they overlap, and the
        spans of other threads."""
        totals: dict[str, float] = {}
        for span in self.spans:
            if span.depth < 0 or (span.depth == 0 and span.thread != self.thread):
                totals[span.name] = totals.get(span.name, 0.0) + (span.end - span.start) / 1e9
        return totals

    def counts(self) -> dict[str, int]:
        totals: dict[str, int] = {}
        for span in self.spans:
            totals[span.name] = totals.get(span.name, 0) + 1
        return totals


class _Off:
    """The span of a normal run."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *raised: object) -> None:
        return None


class _On:
    __slots__ = ("children", "mark", "name", "recording", "stack", "start")

    def __init__(self, recording: Recording, name: str) -> None:
        self.recording, self.name, self.children = recording, name, 0
        self.mark = None if recording.mark is None else recording.mark(name)

    def __enter__(self) -> None:
        stack: list[_On] | None = getattr(self.recording.open, "stack", None)
        if stack is None:
            stack = self.recording.open.stack = []
        self.stack = stack
        stack.append(self)
        if self.mark is not None:
            self.mark.__enter__()
        self.start = self.recording.clock()

    def __exit__(self, *raised: object) -> None:
        end = self.recording.clock()
        if self.mark is not None:
            self.mark.__exit__(None, None, None)
        if self.stack[-1] is not self:
            raise RuntimeError(f"span {self.name!r} was held while another task ran: use an interval there")
        self.stack.pop()
        took = end - self.start
        if self.stack:
            self.stack[-1].children += took
        found = Span(self.name, threading.get_ident(), len(self.stack), self.start, end, took - self.children)
        self.recording.spans.append(found)


class _Interval:
    __slots__ = ("name", "recording", "start")

    def __init__(self, recording: Recording, name: str) -> None:
        self.recording, self.name = recording, name

    def __enter__(self) -> None:
        self.start = self.recording.clock()

    def __exit__(self, *raised: object) -> None:
        end = self.recording.clock()
        self.recording.spans.append(Span(self.name, threading.get_ident(), -1, self.start, end, 0))


_OFF = _Off()
_listening: Recording | None = None


def span(name: str) -> _Off | _On:
    """Times a stretch of code that awaits nothing while other tasks have spans of their own."""
    return _OFF if _listening is None else _On(_listening, name)


def interval(name: str) -> _Off | _Interval:
    """Times something that is awaited; it may overlap everything else and counts in nobody's own time."""
    return _OFF if _listening is None else _Interval(_listening, name)


def timed(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A plain function whose every call is a span."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            if _listening is None:
                return function(*args, **kwargs)
            with _On(_listening, name):
                return function(*args, **kwargs)

        return call

    return decorate


@contextmanager
def recording(mark: Mark | None = None, clock: Callable[[], int] = time.perf_counter_ns) -> Iterator[Recording]:
    """Listen to the spans of the process; one listener at a time. mark: opened around each span, with its name.

    clock: nanoseconds. On a machine that does other work too, time.thread_time_ns tells what the code itself took; the
    spans of one thread alone may then be compared, and waiting takes no time.
    """
    global _listening
    if _listening is not None:
        raise RuntimeError("spans are being recorded already: one recording at a time")
    found = _listening = Recording(mark, clock)
    try:
        yield found
    finally:
        _listening = None
