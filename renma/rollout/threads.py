"""Plain (blocking) user code beside the event loop, in daemon threads: a call that never returns cannot keep the
process from ending, as a pool's thread would."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any


async def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run function(*arguments) in a thread of its own and await the result (about 0.05 ms of cost).

    A cancelled call is abandoned: its thread goes on until the function returns, its result is dropped.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def deliver(method: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            method(value)

    def run() -> None:
        try:
            value = function(*arguments)
        except BaseException as error:  # handed to the awaiting task, whatever it is
            hand_over(future.set_exception, error)
        else:
            hand_over(future.set_result, value)

    def hand_over(method: Callable[[Any], None], value: Any) -> None:
        try:
            loop.call_soon_threadsafe(deliver, method, value)
        except RuntimeError:
            if not loop.is_closed():
                raise

    threading.Thread(target=run, name=f"renma-{getattr(function, '__name__', 'call')}", daemon=True).start()
    return await future
