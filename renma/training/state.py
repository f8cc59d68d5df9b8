"""What a run must remember to go on as if it had never stopped: weights, optimiser, position, random generators."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors.torch import load_file, save_file

from renma.errors import RunError
from renma.models.policy import Policy, save_policy
from renma.training.rng import rng_state, set_rng_state

POLICY = "policy"
STATE = "state.json"


@runtime_checkable
class Stateful(Protocol):
    """What goes on exactly where it was, from tensors and plain values: the learner, the critic, a pool of policies,
    an estimator with a memory."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


@dataclass(frozen=True, slots=True)
class Progression:
    """version: training steps done, which is also the weights' version. position: the data cursor, where the next
    batch begins in the order of tasks.

    seconds: time spent so far, over all the run's processes. evaluated: the last version whose evaluation, where one
    was due, is done: an interrupt may come in the middle of one.
    """

    version: int = 0
    position: int = 0
    seconds: float = 0.0
    evaluated: int = 0


def write_state(folder: Path, policy: Policy, states: Mapping[str, Stateful], progression: Progression) -> None:
    """Write the whole state into an empty folder (the caller makes it atomic); `states` by a name for each."""
    save_policy(policy, folder / POLICY)
    plain: dict[str, Any] = {}
    for name, part in states.items():
        tensors, plain[name] = flatten(part.state_dict())
        save_file(tensors, folder / f"{name}.safetensors")
    state = {"progression": asdict(progression), "states": plain, "rng": rng_state()}
    (folder / STATE).write_text(json.dumps(state), encoding="utf-8")


def read_progression(folder: Path) -> Progression:
    try:
        return Progression(**json.loads((folder / STATE).read_text(encoding="utf-8"))["progression"])
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise RunError(
            f"the checkpoint {folder} cannot be read: {error}; remove it to resume from an earlier one"
        ) from error


def restore_states(folder: Path, states: Mapping[str, Stateful]) -> None:
    """Optimisers, masters, random generators, as they were. The policy's weights are loaded with the policy.

    Raises RunError when the checkpoint has not the same parts: the recipe has changed since.
    """
    state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    saved = state["states"]
    if set(saved) != set(states):
        raise RunError(
            f"the checkpoint {folder} holds the state of {', '.join(sorted(saved))}; this recipe needs "
            f"{', '.join(sorted(states))}: resume with the algorithm it was trained with"
        )
    for name, part in states.items():
        part.load_state_dict(unflatten(load_file(folder / f"{name}.safetensors"), saved[name]))
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
