"""What a run must remember to go on as if it had never stopped: weights, optimiser, position, random generators."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from renma.errors import RunError
from renma.learning.learner import Learner
from renma.models.policy import Policy, save_policy
from renma.training.rng import rng_state, set_rng_state

POLICY = "policy"
LEARNER = "learner.safetensors"
STATE = "state.json"


@dataclass(frozen=True, slots=True)
class Progression:
    """version: training steps done, which is also the weights' version. The data cursor is version * tasks_per_step.

    seconds: time spent so far, over all the run's processes. evaluated: the last version whose evaluation, where one
    was due, is done: an interrupt may come in the middle of one.
    """

    version: int = 0
    seconds: float = 0.0
    evaluated: int = 0


def write_state(folder: Path, policy: Policy, learner: Learner, progression: Progression) -> None:
    """Write the whole state into an empty folder (the caller makes it atomic)."""
    save_policy(policy, folder / POLICY)
    tensors, scalars = flatten(learner.state_dict())
    save_file(tensors, folder / LEARNER)
    state = {"progression": asdict(progression), "learner": scalars, "rng": rng_state()}
    (folder / STATE).write_text(json.dumps(state), encoding="utf-8")


def read_progression(folder: Path) -> Progression:
    try:
        return Progression(**json.loads((folder / STATE).read_text(encoding="utf-8"))["progression"])
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise RunError(
            f"the checkpoint {folder} cannot be read: {error}; remove it to resume from an earlier one"
        ) from error


def restore_learner(folder: Path, learner: Learner) -> None:
    """Optimiser, masters and random generators, as they were. The policy's weights are loaded with the policy."""
    state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    learner.load_state_dict(unflatten(load_file(folder / LEARNER), state["learner"]))
    set_rng_state(state["rng"])


def flatten(tree: Any, prefix: str = "") -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """A nested state as tensors and JSON-able scalars by path; no pickle anywhere.

    In a path, `#3` is a list's fourth entry and `@3` the integer key 3 of a dict (torch's optimiser state has both).
    """
    tensors: dict[str, torch.Tensor] = {}
    scalars: dict[str, Any] = {}
    named = isinstance(tree, dict)
    for key, value in tree.items() if named else enumerate(tree):
        path = prefix + (f"{'@' if named else '#'}{key}" if isinstance(key, int) else str(key))
        if isinstance(value, torch.Tensor):
            tensors[path] = value.detach().contiguous()
        elif isinstance(value, dict | list | tuple) and value:
            inner, leaves = flatten(value, path + "/")
            tensors |= inner
            scalars |= leaves
        else:
            scalars[path] = list(value) if isinstance(value, tuple) else value
    return tensors, scalars


def unflatten(tensors: dict[str, torch.Tensor], scalars: dict[str, Any]) -> Any:
    """The inverse of `flatten` (tuples come back as lists)."""
    root: dict[str, Any] = {}
    for path, value in {**scalars, **tensors}.items():
        node = root
        *parents, leaf = path.split("/")
        for name in parents:
            node = node.setdefault(name, {})
        node[leaf] = value
    return _shaped(root)


def _shaped(node: Any) -> Any:
    if not isinstance(node, dict) or not node:
        return node
    inner = {key: _shaped(value) for key, value in node.items()}
    if all(key.startswith("#") for key in inner):
        return [value for _, value in sorted((int(key[1:]), value) for key, value in inner.items())]
    return {int(key[1:]) if key.startswith("@") else key: value for key, value in inner.items()}
