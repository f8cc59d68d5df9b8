"""Spans: nothing when nobody listens, nested and adding up when somebody does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from renma.profiling import interval, recording, span, timed

trees = st.recursive(st.just([]), lambda inner: st.lists(inner, max_size=3), max_leaves=12)


class Clock:
    """A nanosecond for each look."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        self.now += 1
        return self.now


def test_nobody_listens_and_nothing_is_kept() -> None:
    with span("a") as one, span("b") as other, interval("c") as third:
        assert one is other is third is None
    assert span("a") is span("b") is interval("c"), "one object that does nothing, made once"
    assert timed("a")(len)([1]) == 1


@given(trees)
def test_own_times_add_up_to_the_outermost(tree: list) -> None:
    def walk(node: list) -> None:
        with span(f"{len(node)} inside"):
            for child in node:
                walk(child)

    with recording(clock=Clock()) as found:
        walk(tree)
    whole = found.spans[-1]
    assert whole.depth == 0 and whole.own + sum(s.own for s in found.spans[:-1]) == whole.end - whole.start
    assert sum(found.own_seconds().values()) == pytest.approx((whole.end - whole.start) / 1e9)
    for one in found.spans:
        around = [s for s in found.spans if s.start < one.start and one.end < s.end]
        assert len(around) == one.depth
        inside = [s for s in found.spans if one.start < s.start and s.end < one.end]
        apart = [s for s in found.spans if s.end < one.start or one.end < s.start]
        assert len(around) + len(inside) + len(apart) + 1 == len(found.spans), "none straddles another"


def test_a_decorated_function_is_a_span_that_ends_with_an_error_too() -> None:
    @timed("work")
    def work(fail: bool) -> str:
        if fail:
            raise ValueError("no")
        return "done"

    with recording() as found:
        assert work(False) == "done"
        with pytest.raises(ValueError, match="no"):
            work(True)
    assert found.counts() == {"work": 2}
    assert work(False) == "done" and len(found.spans) == 2


def test_intervals_may_overlap_and_count_in_nobodys_own_time() -> None:
    async def wait(turns: int) -> None:
        with interval("wait"):
            for _ in range(turns):
                await asyncio.sleep(0)
                with span("look"):
                    pass

    async def main() -> None:
        with span("step"):
            await asyncio.gather(wait(3), wait(5))

    with recording(clock=Clock()) as found:
        asyncio.run(main())
    assert set(found.own_seconds()) == {"step", "look"}
    first, second = [s for s in found.spans if s.name == "wait"]
    assert first.depth == second.depth == -1 and second.start < first.end, "they overlap"
    assert found.beside_seconds()["wait"] == pytest.approx((first.end - first.start + second.end - second.start) / 1e9)


def test_a_span_that_is_held_while_another_task_runs_is_told() -> None:
    async def held() -> None:
        with span("held"):
            await asyncio.sleep(0)

    async def main() -> None:
        await asyncio.gather(held(), held())

    with recording(), pytest.raises(RuntimeError, match="'held' was held while another task ran: use an interval"):
        asyncio.run(main())


def test_another_thread_has_spans_of_its_own() -> None:
    with recording(clock=Clock()) as found, span("step"):
        thread = threading.Thread(target=timed("writer")(lambda: None))
        thread.start()
        thread.join()
    assert set(found.own_seconds()) == {"step"} and set(found.beside_seconds()) == {"writer"}
    assert [s.depth for s in found.spans] == [0, 0]


def test_marks_are_open_as_long_as_their_span() -> None:
    seen: list[str] = []

    @contextmanager
    def mark(name: str) -> Iterator[None]:
        seen.append(f"+{name}")
        yield
        seen.append(f"-{name}")

    with recording(mark), span("a"), span("b"):
        pass
    assert seen == ["+a", "+b", "-b", "-a"]


def test_one_recording_at_a_time() -> None:
    with recording(), pytest.raises(RuntimeError, match="one recording at a time"), recording():
        pass
    with recording() as found, span("a"):
        pass
    assert found.counts() == {"a": 1}
