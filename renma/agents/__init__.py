"""Turning observations into prompts and samples into actions: rendering, parsing, and the agent that joins them."""

from __future__ import annotations

from renma.registry import Registry

RENDERERS = Registry(
    "renderer",
    {
        "plain": "renma.agents.renderers.plain:PlainRenderer",
        "chat": "renma.agents.renderers.chat:ChatRenderer",
    },
)

PARSERS = Registry(
    "parser",
    {
        "plain": "renma.agents.parsers.plain:PlainParser",
        "json_tags": "renma.agents.parsers.json_tags:JsonTagsParser",
    },
)
