"""What an algorithm is chosen by: the task, the reward, the model and the machine, as far as they are known."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from renma.errors import RecipeError
from renma.registry import nearest

REWARDS = ("sparse", "dense", "process", "preference")
STEPS = ("implicit", "explicit")
SCALES = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12, "": 1.0}
CRITIC_BYTES = 32  # a parameter's weight, gradient and two Adam moments in float32, in the policy and in a critic


@dataclass(frozen=True, slots=True)
class Situation:
    """The inputs of the rules; each is an option of `renma plan algorithm` of the same name.

    horizon: the most actions of an episode. reward: `sparse`, one outcome at the end; `dense`, a reward at most steps;
    `process`, a judgement of each step; `preference`, only which of two is better. verifiable: a program can tell
    whether an answer is right. group_size: attempts at one task. model_size: parameters; memory: GB of the device.
    tokens: the most sampled tokens of an episode. steps: `explicit` when each action is one whole step of the task.
    repeated_states: attempts at a task come back to the same states. staleness: the most versions a sampled token may
    be behind. moe: a mixture of experts. teacher: a better policy of the same vocabulary gives log-probabilities.
    success: the share of attempts that succeed before training. demonstrations: somebody can show how it is done.
    online: the policy can act in the environment; otherwise there are only records. families: kinds of task in the mix.

    Raises RecipeError for a value that cannot be.
    """

    horizon: int = 10
    reward: str = "sparse"
    verifiable: bool = True
    group_size: int = 8
    model_size: float | None = None
    memory: float | None = None
    tokens: int | None = None
    steps: str = "implicit"
    repeated_states: bool = False
    staleness: int = 0
    moe: bool = False
    teacher: bool = False
    success: float | None = None
    demonstrations: bool = False
    online: bool = True
    families: int = 1

    def __post_init__(self) -> None:
        for name, known in (("reward", REWARDS), ("steps", STEPS)):
            value = getattr(self, name)
            if value not in known:
                raise RecipeError(f"--{name} {value!r} is not known; {nearest(value, list(known))}")
        for name, least in (("horizon", 1), ("group_size", 1), ("tokens", 1), ("families", 1), ("staleness", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise RecipeError(f"{flag(name)} {value} is too small: give {least} or more")
        for name in ("model_size", "memory"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise RecipeError(f"{flag(name)} {value:g} is no size: give a number above 0")
        if self.success is not None and not 0 <= self.success <= 1:
            raise RecipeError(f"--success {self.success:g} is no share: give a number from 0 to 1, such as 0.3")

    @property
    def critic_gb(self) -> float | None:
        """GB that policy and critic with their optimisers take, without activations; None for an unknown model."""
        return None if self.model_size is None else self.model_size * CRITIC_BYTES / 1e9

    @property
    def tight(self) -> bool:
        """Whether a critic as large as the policy does not fit the memory (False when either is unknown)."""
        return self.critic_gb is not None and self.memory is not None and self.critic_gb > self.memory

    def shown(self, name: str) -> str:
        """An input as text for a person."""
        value = getattr(self, name)
        if name == "model_size" and value is not None:
            return f"{value / 1e9:.3g}B" if value >= 1e9 else f"{value / 1e6:.3g}M"
        if value is None:
            return "unknown"
        if isinstance(value, bool):
            return "yes" if value else "no"
        return f"{value:g} GB" if name == "memory" else f"{value}"


INPUTS = tuple(field.name for field in fields(Situation))


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def situation(*sources: Mapping[str, Any]) -> tuple[Situation, list[str]]:
    """A situation from mappings of inputs, the first that knows one before the next; and the inputs none of them knew.

    A value of None is not known.
    """
    known: dict[str, Any] = {}
    for source in sources:
        for name, value in source.items():
            if value is not None:
                known.setdefault(name, value)
    return Situation(**known), [name for name in INPUTS if name not in known]


def parameters(text: str) -> float:
    """A number of parameters from text such as 270M, 1.5B or 600000. Raises RecipeError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmbt]?)", text.strip().lower())
    if match is None:
        raise RecipeError(f"--model-size {text!r} is no size: write parameters such as 270M or 7B")
    return float(match[1]) * SCALES[match[2]]
