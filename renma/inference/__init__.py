"""Engines: prompt ids in, sampled ids out, with the log-probability of each. See base.py for the contract."""

from __future__ import annotations

from renma.inference.base import Engine, Sample, SamplingParams
from renma.registry import Registry

ENGINES = Registry("engine", {"local": "renma.inference.local:LocalEngine"})

__all__ = ["ENGINES", "Engine", "Sample", "SamplingParams"]
