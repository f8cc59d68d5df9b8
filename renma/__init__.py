"""Renma trains language-model agents by reinforcement learning.

Names are loaded when first used, so that `import renma` and the command line stay quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from renma.environments import ENVIRONMENTS as ENVIRONMENTS
    from renma.environments.base import Environment as Environment
    from renma.recipe import Recipe as Recipe
    from renma.recipe_load import load_recipe as load_recipe
    from renma.rewards import REWARDS as REWARDS
    from renma.tasks import TASKS as TASKS
    from renma.tools.base import tool as tool
    from renma.training.trainer import Trainer as Trainer
    from renma.types import Action as Action
    from renma.types import Group as Group
    from renma.types import Message as Message
    from renma.types import Observation as Observation
    from renma.types import Step as Step
    from renma.types import StepResult as StepResult
    from renma.types import Task as Task
    from renma.types import ToolCall as ToolCall
    from renma.types import Trajectory as Trajectory

__version__ = "0.1.0"

_TYPES = ("Action", "Group", "Message", "Observation", "Step", "StepResult", "Task", "ToolCall", "Trajectory")
_WHERE = {
    **dict.fromkeys(_TYPES, "renma.types"),
    "Environment": "renma.environments.base",
    "Recipe": "renma.recipe",
    "load_recipe": "renma.recipe_load",
    "Trainer": "renma.training.trainer",
    "tool": "renma.tools.base",
    "ENVIRONMENTS": "renma.environments",
    "REWARDS": "renma.rewards",
    "TASKS": "renma.tasks",
}

__all__ = [*_WHERE, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'renma' has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)
