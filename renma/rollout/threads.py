"""Plain (blocking) user code beside the event loop, in daemon threads: a call that never returns cannot keep the
process from ending, as a pool's thread would."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Callable, Mapping
from typing import Any


def unwrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """What a partial calls."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def may_block(function: Callable[..., Any]) -> bool:
    """Whether calling it could hold the event loop up, so that it needs a thread.

    Not so for `async` code, nor for what says `blocking = False`: on a function, or on the class of an instance or of a
    method's owner (there for itself alone: a subclass brings code of its own).
    """
    return _told(unwrapped(function)).get("blocking", True) is not False and not is_async(function)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether it is `async`, or an instance of a class that is called so."""
    function = unwrapped(function)
    called = function if inspect.isroutine(function) else type(function).__call__
    return inspect.iscoroutinefunction(called)


def _told(function: Callable[..., Any]) -> Mapping[str, Any]:
    """What the function says of itself, or the class that it is, is an instance of, or belongs to."""
    if inspect.isclass(function) or inspect.isfunction(function):
        return vars(function)
    return vars(type(getattr(function, "__self__", function)))


async def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run function(*arguments) in a thread of its own and await the result (about 0.1 ms of cost).

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
        except StopIteration as error:  # no future can hold one
            stopped = RuntimeError(f"{type(error).__name__} from {getattr(function, '__name__', function)!r}")
            stopped.__cause__ = error
            hand_over(future.set_exception, stopped)
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
