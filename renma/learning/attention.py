"""Which of the attentions known to transformers a model runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def attending(config: Any, name: str) -> Iterator[None]:
    """Inside, a model of `config` runs the attention registered as `name`; its own is put back after."""
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before
