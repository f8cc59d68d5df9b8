"""The engine inside the process: it samples with the very weights the learner trains, by continuous batching.

engine.py schedules requests; slots.py holds their tokens; prefix.py finds what is computed already; policy.py runs the
model over the keys and values that cache.py keeps; head.py makes logits of the hidden states; sampler.py draws from
them; stopping.py watches for stop strings.
"""

from __future__ import annotations

from renma.inference.local.engine import LocalEngine

__all__ = ["LocalEngine"]
