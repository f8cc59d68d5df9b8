"""Trajectories as table rows, one row a step, and back exactly.

A trajectory without a single step (its environment failed at reset) is one row whose `turn` is null. Text columns are
always valid Unicode so that any reader of Parquet takes them; where a lone surrogate had to be replaced, the original
is kept in the JSON column `exact`. Values of any type (a task's answer, tool arguments) are strict JSON: what JSON has
no form for is written as an object with one `$` key, and what has no plain form at all as its type's name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from renma.errors import DataError
from renma.tape import Tape
from renma.types import Action, Floats, Group, Ids, Message, Observation, Routing, Step, Task, ToolCall, Trajectory

_DEEPEST = 64  # nesting past this is cut: model output reaches tool arguments, and a deep enough one ends the process
_LONGEST_INT = 4096  # bits; Python refuses to print integers of more than 4300 digits

_STRICT = json.JSONEncoder(allow_nan=False)
_parts = pa.map_(pa.string(), pa.float64())
_ids = pa.list_(pa.int32())
_floats = pa.list_(pa.float32())

SCHEMA = pa.schema(
    [
        # which row of the run: `step` is the training step, `group` the position in the batch
        ("step", pa.int64()),
        ("phase", pa.string()),
        ("group", pa.int32()),
        ("member", pa.int32()),
        ("turn", pa.int32()),
        # the task
        ("task_id", pa.string()),
        ("family", pa.string()),
        ("task_prompt", pa.string()),
        ("task_answer", pa.string()),  # JSON
        ("task_data", pa.string()),  # JSON
        # the trajectory, the same in each of its rows
        ("status", pa.string()),
        ("stop_reason", pa.string()),
        ("success", pa.bool_()),
        ("return", pa.float64()),
        ("outcome", _parts),
        ("seed", pa.uint64()),
        ("error", pa.string()),
        ("attempts", pa.int32()),
        ("trajectory_seconds", pa.float64()),
        ("reward_seconds", pa.float64()),
        ("next_prompt_ids", _ids),  # in the last row alone
        # the step
        ("agent", pa.string()),
        ("policy", pa.string()),
        # What is new of the prompt; before it stand the prompt and action of the row before, `prompt_shared` ids in all
        # (0 where the prompt is new from its first token): a long episode is written once, not once a turn.
        ("prompt_ids", _ids),
        ("prompt_shared", pa.int32()),
        ("action_ids", _ids),
        ("logprobs", _floats),
        ("versions", _ids),
        ("routing", pa.large_binary()),  # int16, little-endian, of the shape [P + A, layers, k] in the next column
        ("routing_shape", _ids),
        ("advantages", _floats),
        ("raw", pa.string()),
        ("text", pa.string()),
        ("thinking", pa.string()),
        ("tool_calls", pa.string()),  # JSON
        ("observation", pa.string()),  # text of all its messages
        ("messages", pa.string()),  # JSON: the observation as it was
        ("reward", _parts),
        ("terminated", pa.bool_()),
        ("truncated", pa.bool_()),
        ("sample_stop", pa.string()),
        ("state_key", pa.string()),
        ("seconds", _parts),
        ("exact", pa.string()),  # JSON of the text columns that were not valid Unicode
    ],
    metadata={"renma_trajectories": "2"},
)


@dataclass(frozen=True, slots=True)
class Record:
    """A stored trajectory: where in the run it belongs, and for each step the advantages [A] it was trained with."""

    step: int
    phase: str
    group: int
    trajectory: Trajectory
    advantages: tuple[Floats, ...] | None


def to_json(value: Any) -> str:
    """Strict ASCII JSON of any value; `from_json` gives back JSON types, tuples, bytes, non-finite floats, huge
    integers and mappings with any such keys exactly. numpy scalars and arrays come back as Python numbers and lists."""
    return _STRICT.encode(_plain(value, 0))


def from_json(text: str) -> Any:
    return json.loads(text, object_hook=_revive)


def _plain(value: Any, depth: int) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (str, bool)):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, int):
        return int(value) if value.bit_length() < _LONGEST_INT else {"$int": hex(value)}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, bytes):
        return {"$bytes": value.hex()}
    if depth >= _DEEPEST:
        return {"$cut": type(value).__name__}
    if isinstance(value, np.ndarray):
        return _plain(value.tolist(), depth)
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {str(key): _plain(item, depth + 1) for key, item in value.items()}
        return {"$map": [[_plain(k, depth + 1), _plain(v, depth + 1)] for k, v in value.items()]}
    if isinstance(value, tuple):
        return {"$tuple": [_plain(item, depth + 1) for item in value]}
    if isinstance(value, list):
        return [_plain(item, depth + 1) for item in value]
    return {"$object": type(value).__name__}


def _revive(found: dict[str, Any]) -> Any:
    if len(found) != 1:
        return found
    (key, value), *_ = found.items()
    match key:
        case "$int":
            return int(value, 16)
        case "$float":
            return float(value)
        case "$bytes":
            return bytes.fromhex(value)
        case "$tuple":
            return tuple(value)
        case "$map":
            return {k: v for k, v in value}
        case _:
            return found


def to_table(
    step: int, groups: Sequence[Group], advantages: Sequence[Sequence[Floats] | None] | None, phase: str
) -> pa.Table:
    """One row a step. advantages: for each group None, or for each of `group.trainable` [sampled tokens] float32.

    Raises ValueError when the advantages do not fit the groups.
    """
    rows: list[dict[str, Any]] = []
    per_group = [None] * len(groups) if advantages is None else advantages
    for index, (group, values) in enumerate(zip(groups, per_group, strict=True)):
        if values is not None and len(values) != len(group.trainable):
            raise ValueError(f"{len(values)} advantage arrays for {len(group.trainable)} trajectories of a group")
        remaining = iter(values or ())
        place = {"step": step, "phase": phase, "group": index} | _task_row(group.task)
        for trajectory in group.trajectories:
            value = next(remaining) if values is not None and trajectory.trainable else None
            own = place if trajectory.task is group.task else place | _task_row(trajectory.task)
            rows.extend(_rows(trajectory, value, own))
    return pa.table({name: [row.get(name) for row in rows] for name in SCHEMA.names}, schema=SCHEMA)


def _task_row(task: Task) -> dict[str, Any]:
    return {
        "task_id": task.id,
        "family": task.family,
        "task_prompt": task.prompt,
        "task_answer": to_json(task.answer),
        "task_data": to_json(task.data),
    }


def _rows(trajectory: Trajectory, advantages: Floats | None, place: dict[str, Any]) -> list[dict[str, Any]]:
    if advantages is not None and len(advantages) != trajectory.sampled_tokens:
        raise ValueError(
            f"{len(advantages)} advantages for {trajectory.sampled_tokens} sampled tokens of task "
            f"{trajectory.task.id!r}"
        )
    shared = place | {
        "member": trajectory.member,
        "status": trajectory.status,
        "stop_reason": trajectory.stop_reason,
        "success": trajectory.success,
        "return": trajectory.ret,
        "outcome": _numbers(trajectory.rewards),
        "seed": trajectory.seed,
        "error": trajectory.error,
        "attempts": trajectory.attempts,
        "trajectory_seconds": trajectory.seconds,
        "reward_seconds": trajectory.reward_seconds,
    }
    following = {"next_prompt_ids": trajectory.next_prompt_ids}
    if not trajectory.steps:
        return [_readable(shared | following)]
    rows: list[dict[str, Any]] = []
    start = 0
    for turn, step in enumerate(trajectory.steps):
        end = start + len(step.action_ids)
        piece = None if advantages is None else advantages[start:end]
        rows.append(_readable(shared | {"turn": turn, "advantages": piece} | _step_row(step, trajectory.steps, turn)))
        start = end
    rows[-1] |= following
    return rows


def _step_row(step: Step, steps: Sequence[Step], turn: int) -> dict[str, Any]:
    shared = 0
    if turn and step.goes_on_from(steps[turn - 1]):
        shared = len(steps[turn - 1].prompt_ids) + len(steps[turn - 1].action_ids)
    return {
        "prompt_ids": step.prompt_ids[shared:],
        "prompt_shared": shared,
        "agent": step.agent,
        "policy": step.policy,
        "action_ids": step.action_ids,
        "logprobs": step.logprobs,
        "versions": step.versions,
        "routing": None if step.routing is None else step.routing.astype("<i2").tobytes(),
        "routing_shape": None if step.routing is None else step.routing.shape,
        "raw": step.action.raw,
        "text": step.action.text,
        "thinking": step.action.thinking,
        "tool_calls": to_json([_call(c) for c in step.action.tool_calls]),
        "observation": "".join(message.text for message in step.observation.messages),
        "messages": to_json([_message(m) for m in step.observation.messages]),
        "reward": _numbers(step.reward),
        "terminated": step.terminated,
        "truncated": step.truncated,
        "sample_stop": step.sample_stop,
        "state_key": step.state_key,
        "seconds": _numbers(step.seconds),
    }


def _readable(row: dict[str, Any]) -> dict[str, Any]:
    """The row, changed so that every text is valid Unicode; originals of those that were not in `exact`."""
    exact: dict[str, str] = {}
    for name, value in row.items():
        if isinstance(value, str) and not value.isascii():
            safe = value.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
            if safe != value:
                exact[name], row[name] = value, safe
    row["exact"] = to_json(exact) if exact else None
    return row


def _numbers(parts: Mapping[str, float]) -> list[tuple[str, float]]:
    return [(name.encode("utf-8", "backslashreplace").decode(), float(value)) for name, value in parts.items()]


def _call(call: ToolCall) -> dict[str, Any]:
    return {"name": call.name, "arguments": call.arguments, "id": call.id, "error": call.error}


def _message(message: Message) -> dict[str, Any]:
    content = message.content
    return {
        "role": message.role,
        "content": content if isinstance(content, (str, tuple, list)) else list(content),
        "tool_calls": [_call(c) for c in message.tool_calls],
        "tool_call_id": message.tool_call_id,
        "name": message.name,
    }


def from_rows(rows: Sequence[dict[str, Any]]) -> Record:
    """One trajectory from its rows, in turn order."""
    rows = [row | (from_json(row["exact"]) if row["exact"] else {}) for row in rows]
    first = rows[0]
    task = Task(
        id=first["task_id"],
        prompt=first["task_prompt"],
        answer=from_json(first["task_answer"]),
        family=first["family"],
        data=from_json(first["task_data"]),
    )
    stepped = [row for row in rows if row["turn"] is not None]
    trajectory = Trajectory(
        task=task,
        member=first["member"],
        steps=tuple(_steps(stepped)),
        status=first["status"],
        stop_reason=first["stop_reason"],
        success=first["success"],
        rewards=dict(first["outcome"]),
        seed=first["seed"],
        error=first["error"],
        attempts=first["attempts"],
        next_prompt_ids=_next_prompt(rows[-1]),
        seconds=first["trajectory_seconds"],
        reward_seconds=first["reward_seconds"],
    )
    known = bool(stepped) and all(row["advantages"] is not None for row in stepped)
    advantages = tuple(np.array(row["advantages"], dtype=np.float32) for row in stepped) if known else None
    return Record(first["step"], first["phase"], first["group"], trajectory, advantages)


def _steps(rows: Sequence[dict[str, Any]]) -> Iterator[Step]:
    """The steps of rows in turn order; none of their prompts shares anything in files that were written before."""
    tape = Tape()
    for row in rows:
        shared = row.get("prompt_shared") or 0
        if not shared:
            tape = Tape()
        if shared != len(tape):
            raise DataError(
                f"turn {row['turn']} of task {row['task_id']!r} member {row['member']} goes on from {shared} tokens, "
                f"but the rows before it hold {len(tape)}: read all rows of a trajectory"
            )
        tape.extend(row["prompt_ids"])
        step = _step(row, tape.view())
        tape.extend(step.action_ids)
        yield step


def _step(row: dict[str, Any], prompt_ids: Ids) -> Step:
    return Step(
        prompt_ids=prompt_ids,
        action_ids=np.array(row["action_ids"], dtype=np.int32),
        logprobs=np.array(row["logprobs"], dtype=np.float32),
        versions=np.array(row["versions"], dtype=np.int32),
        action=Action(
            text=row["text"],
            tool_calls=tuple(ToolCall(**call) for call in from_json(row["tool_calls"])),
            thinking=row["thinking"],
            raw=row["raw"],
        ),
        observation=Observation(
            tuple(
                Message(**message | {"tool_calls": tuple(ToolCall(**call) for call in message["tool_calls"])})
                for message in from_json(row["messages"])
            )
        ),
        reward=dict(row["reward"]),
        terminated=row["terminated"],
        truncated=row["truncated"],
        sample_stop=row["sample_stop"],
        agent=row["agent"],
        policy=row["policy"],
        state_key=row["state_key"],
        routing=_routing(row),
        seconds=dict(row["seconds"]),
    )


def _next_prompt(row: dict[str, Any]) -> Ids | None:
    """None too in files that were written before these prompts were."""
    ids = row.get("next_prompt_ids")
    return None if ids is None else np.array(ids, dtype=np.int32)


def _routing(row: dict[str, Any]) -> Routing | None:
    """None too in files that were written before routes were."""
    if row.get("routing") is None:
        return None
    return np.frombuffer(row["routing"], "<i2").astype(np.int16).reshape(row["routing_shape"])
