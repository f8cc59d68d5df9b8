"""Engines: prompt ids in, sampled ids out, with the log-probability of each. See base.py for the contract.

`ENGINES` holds the names that `rollout.engine` may use. An entry is called as `factory(policy, model, rollout,
**options)`: the policy (tokenizer, output tokens, device), the module to sample from, the recipe's rollout section, and
the options that stand beside `type` in the recipe; it returns an `Engine`.
"""

from __future__ import annotations

from renma.inference.base import Engine, Sample, SamplingParams
from renma.registry import Registry

ENGINES = Registry(
    "engine",
    {
        "local": "renma.inference.engines:local_engine",
        "vllm": "renma.inference.vllm.factory:vllm_engine",
    },
)

__all__ = ["ENGINES", "Engine", "Sample", "SamplingParams"]
