"""Text to ids, with control tokens only where the format itself writes them."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase, TokenizersBackend

from renma.agents.text import BREAK, well_formed
from renma.types import Ids

_KEPT, _KEPT_CHARACTERS = 1024, 8192  # texts whose ids are remembered, and how long the longest may be

_STRAIGHT = (TokenizersBackend.decode, TokenizersBackend._decode)


class TextEncoder:
    """Encodes pieces of a transcript with one tokenizer.

    A control token is an added token that means something to the model beyond its spelling: every special token, and
    those named in `markup` (the added tokens that a chat template writes, such as <tool_call>). Content that spells
    one, from a user, a tool or the model, must stay text, or a tool result could end a turn and begin another.

    `control_ids` are the ids of all control tokens. What was encoded lately is remembered: the members of a group have
    one first prompt, and results of tools come again and again. So the tokenizer must stay as it is.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, markup: str = "") -> None:
        self.tokenizer = tokenizer
        self._remembered = lru_cache(_KEPT)(self._encoded)
        added = tokenizer.added_tokens_decoder
        special = {i: t.content for i, t in added.items() if t.special and t.content}
        special.update(
            {i: t for i, t in zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True) if t}
        )
        written = {i: t.content for i, t in added.items() if t.content.strip() and t.content in markup}
        self.control_ids: frozenset[int] = frozenset(special) | frozenset(written)
        self._special = _any_of(special.values())
        self._control = _any_of([*special.values(), *written.values()])
        # The unknown token is what unknown characters become: finding it in encoded text betrays no control token.
        self._forbidden = frozenset(special) - {tokenizer.unk_token_id}
        newline = self._ids("\n")
        self._newline = newline if self._ids("\na") != newline + self._ids("a") else None

    def text(self, text: str, *, first: bool = False) -> list[int]:
        """The ids of `text`, read as text from end to end: special tokens spelled in it are not honoured.

        `first`: nothing stands before it (a tokenizer that writes a space before the first word then does so).
        """
        text = well_formed(text)
        ids = self._piece(text, first, split_special_tokens=True)
        if not self._forbidden.isdisjoint(ids):  # a tokenizer whose own merges spell a special token
            return self.markup(self.escape(text), first=first)
        return ids

    def markup(self, text: str, *, first: bool = False) -> list[int]:
        """The ids of `text`, control tokens honoured except where `escape` broke them."""
        pieces = text.split(BREAK)
        ids = self._piece(pieces[0], first)
        for piece in pieces[1:]:
            ids += self._piece(piece, first=False)
        return ids

    def escape(self, text: str, *, special_only: bool = False) -> str:
        """`text` with each control token in it broken by `BREAK`, so that `markup` reads it as text.

        `special_only` leaves the added tokens that are not special: a policy's own turn may hold its markup.
        A control token of a single character cannot be broken; it becomes U+FFFD.
        """
        text = well_formed(text)
        pattern = self._special if special_only else self._control
        while pattern.search(text):  # breaking one can uncover another
            text = pattern.sub(_broken, text)
        return text

    def escape_all(self, value: Any, *, special_only: bool = False) -> Any:
        """`escape` on every string of a JSON-like value, keys included."""
        if isinstance(value, str):
            return self.escape(value, special_only=special_only)
        if isinstance(value, dict):
            return {
                self.escape(str(key), special_only=special_only): self.escape_all(item, special_only=special_only)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.escape_all(item, special_only=special_only) for item in value]
        return value

    def decode(self, ids: Sequence[int] | Ids) -> str:
        return decode(self.tokenizer, ids)

    def _piece(self, text: str, first: bool, split_special_tokens: bool = False) -> list[int]:
        if not text:
            return []
        if first or self._newline is None:
            return self._ids(text, split_special_tokens)
        ids = self._ids("\n" + text, split_special_tokens)
        if ids[: len(self._newline)] == self._newline:
            return ids[len(self._newline) :]
        return self._ids(text, split_special_tokens)

    def _ids(self, text: str, split_special_tokens: bool = False) -> list[int]:
        if len(text) > _KEPT_CHARACTERS:
            return list(self._encoded(text, split_special_tokens))
        return list(self._remembered(text, split_special_tokens))

    def _encoded(self, text: str, split_special_tokens: bool) -> tuple[int, ...]:
        # The option is given only where it is on: not every tokenizer knows it.
        options = {"split_special_tokens": True} if split_special_tokens else {}
        return tuple(self.tokenizer.encode(text, add_special_tokens=False, verbose=False, **options))


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int] | Ids) -> str:
    """The text of `ids`, control tokens spelled out and nothing tidied. For reading, never to be encoded again."""
    plain = ids.tolist() if isinstance(ids, np.ndarray) else list(map(int, ids))
    kind = type(tokenizer)
    if isinstance(tokenizer, TokenizersBackend) and (kind.decode, kind._decode) == _STRAIGHT:
        # What it goes on to call: the way there takes four times as long.
        return str(tokenizer.backend_tokenizer.decode(plain, skip_special_tokens=False))
    text = tokenizer.decode(plain, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return str(text)


def _any_of(texts: Collection[str]) -> re.Pattern[str]:
    longest_first = sorted(set(texts), key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _broken(match: re.Match[str]) -> str:
    token = match.group()
    return token[0] + BREAK + token[1:] if len(token) > 1 else "\ufffd"
