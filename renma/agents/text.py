"""Text that any tokenizer and any UTF-8 file can take."""

from __future__ import annotations

import re

BREAK = "\ufdd0"
"""A Unicode noncharacter that renderers put inside text that spells a control token, so that it stays text."""

_SURROGATE = re.compile("[\ud800-\udfff]")


def well_formed(text: str) -> str:
    """`text` with surrogate pairs joined and lone surrogates (and `BREAK`, which is ours) turned into U+FFFD.

    Model output and tools can hold lone surrogates (a JSON escape cut in half); tokenizers and files refuse them.
    """
    if text.isascii():
        return text
    if _SURROGATE.search(text):
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text.replace(BREAK, "\ufffd")
