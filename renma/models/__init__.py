"""Policies: models with their tokenizers, opened from a folder, a name or the hub, or made from scratch.

`renma.models.policy` opens and saves them; this file imports nothing heavy, so that listing the names is quick.
"""

from renma.models.known import MODELS, KnownModel

__all__ = ["MODELS", "KnownModel"]
