"""Running a coroutine to its end from plain code, wherever that code runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result, also from within a running event loop (a notebook), where it runs in a thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    results: list[T] = []
    errors: list[BaseException] = []

    def target() -> None:
        try:
            results.append(asyncio.run(work))
        except BaseException as error:  # carried over to the caller's thread
            errors.append(error)

    thread = threading.Thread(target=target, name="renma-loop")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


async def as_coroutine(awaitable: Awaitable[T]) -> T:
    """Any awaitable as a coroutine, which is what a loop runs."""
    return await awaitable
