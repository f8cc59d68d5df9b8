"""A token sequence that only grows, and whose earlier states are views of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from renma.types import Ids

_ROOM = 256


class Tape:
    """The tokens of an episode, turn after turn: each prompt is all that came before it and what is new.

    `view` gives the tokens so far without a copy; what is written later does not change it. So the prompts of a long
    episode take the memory of the last one, and making one takes the time of what is new in it.
    """

    __slots__ = ("_buffer", "_length")

    def __init__(self, ids: Sequence[int] | Ids = ()) -> None:
        self._buffer = np.empty(_ROOM, np.int32)
        self._length = 0
        self.extend(ids)

    def __len__(self) -> int:
        return self._length

    def extend(self, ids: Sequence[int] | Ids) -> None:
        """Add `ids` at the end."""
        end = self._length + len(ids)
        if end > len(self._buffer):  # twice as much: all copies together cost as much as the last
            larger = np.empty(max(end, 2 * len(self._buffer)), np.int32)
            larger[: self._length] = self._buffer[: self._length]
            self._buffer = larger
        self._buffer[self._length : end] = ids
        self._length = end

    def view(self) -> Ids:
        """[length] int32, not to be written to."""
        seen = self._buffer[: self._length]
        seen.flags.writeable = False
        return seen

    def cut(self, length: int) -> None:
        """Go back to the first `length` tokens. What comes next is written elsewhere: views keep what they show."""
        if not 0 <= length <= self._length:
            raise ValueError(f"a tape of {self._length} tokens cannot be cut to {length}")
        if length < self._length:
            self._buffer = self._buffer[:length].copy()
            self._length = length
