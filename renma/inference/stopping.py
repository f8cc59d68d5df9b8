"""Stop strings, found without decoding the whole action again at every token."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

# A token that ends inside a character decodes to this; the character is complete only with a later token.
_PARTIAL = "\ufffd"


class Stoppers:
    """The `StopStrings` of one tokenizer, each set of strings once: what is learnt of tokens serves all requests."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._known: dict[tuple[str, ...], StopStrings] = {}

    def of(self, strings: tuple[str, ...]) -> StopStrings | None:
        """None for no strings."""
        if not strings:
            return None
        if strings not in self._known:
            self._known[strings] = StopStrings(self._tokenizer, strings)
        return self._known[strings]


class StopStrings:
    """Finds whether the last token of an action completes one of `strings`.

    Most tokens are dismissed by a look-up: only one whose own text holds the last character of a string (or ends inside
    a character, when that last one is not ASCII) can complete it. Then the tail that could hold the string is decoded.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: tuple[str, ...]) -> None:
        self.strings = strings
        self._tokenizer = tokenizer
        self._last = {string[-1] for string in strings}
        if any(not character.isascii() for character in self._last):
            self._last.add(_PARTIAL)
        # A token of text has a byte at least; four more tokens give a character cut in two its beginning.
        self.tail = max(len(string.encode()) for string in strings) + 4
        self._may_end: dict[int, bool] = {}

    def may_end(self, token: int) -> bool:
        """Whether `token` can complete a stop string at all."""
        known = self._may_end.get(token)
        if known is None:
            # Twice: a tokenizer may drop the space at the start of a text.
            known = self._may_end[token] = not self._last.isdisjoint(self._decode([token, token]))
        return known

    def completed(self, tail: Sequence[int]) -> bool:
        """Whether the text of `tail`, the action's last tokens, holds a stop string."""
        text = self._decode(list(tail))
        return any(string in text for string in self.strings)

    def _decode(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text
