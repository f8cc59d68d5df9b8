"""Which of two attempts is better: pairs to learn from, recorded or sampled, and judgements of single steps.

A pair is a `Group` of exactly two trajectories, the chosen one with the higher return, so that all of Renma takes it:
the estimator `pairs`, the store, the reward model. `PREFERENCES` holds the sources that a recipe may name.
"""

from __future__ import annotations

from renma.preferences.base import LABEL, PREFERENCE, Judgements, Preferences
from renma.registry import Registry

PREFERENCES = Registry(
    "preference source",
    {
        "run": "renma.preferences.recorded:RecordedPreferences",
        "sampled": "renma.preferences.sampled:SampledPreferences",
        "jsonl": "renma.preferences.files:JsonlPreferences",
        "step_labels": "renma.preferences.files:JsonlStepLabels",
    },
)
SUPPLIED = frozenset({"runner", "renderer", "tokenizer", "task_at", "seed"})
"""What Renma gives a source itself: those of them that its constructor has a parameter for."""

__all__ = ["LABEL", "PREFERENCE", "PREFERENCES", "SUPPLIED", "Judgements", "Preferences"]
