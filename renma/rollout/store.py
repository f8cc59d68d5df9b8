"""The trajectories of a run as Parquet files, one row a step, readable by anything that reads Parquet:

    duckdb -c "select step, avg(success::int) from 'runs/quickstart/trajectories/*.parquet' where turn = 0 group by 1"

Files are written by a thread of their own, aside and then renamed, so that the loop does not wait for the disk and a
killed run leaves no half file. Writing a training step again (a resumed run does) replaces its file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from renma.errors import DataError, RunError
from renma.profiling import timed
from renma.rollout.trajectory_rows import Record, from_rows, to_table
from renma.types import Floats, Group, Step, Trajectory

_BACKLOG = 4  # batches in memory that wait to be written; a slower disk than that holds the loop up
_FILE = re.compile(r"step_(\d+)(-.*)?\.parquet")


class TrajectoryStore:
    """Writes batches of groups under `folder` (a run's `trajectories`), which is made when missing.

    A failed write is raised by the next `append`, `flush` or `close`, once, as a RunError. Use as a context manager or
    call `close`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for leftover in folder.glob(".*.parquet.tmp"):
                leftover.unlink()
        except OSError as error:
            raise RunError(f"cannot write trajectories in {folder}: {error.strerror}; check its owner") from error
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="renma-trajectories")
        self._waiting: deque[Future[None]] = deque()

    def append(
        self,
        step: int,
        groups: Sequence[Group],
        advantages: Sequence[Sequence[Floats] | None] | None = None,
        phase: str = "train",
    ) -> None:
        """Store the groups of one training step; returns at once. One file for each (step, phase).

        advantages: for each group None, or for each of `group.trainable`, in order, float32 [sampled tokens of all its
        steps]. Phase "train" goes to step_000012.parquet, phase "evaluation" to step_000012-evaluation.parquet.
        """
        while self._waiting and (self._waiting[0].done() or len(self._waiting) >= _BACKLOG):
            self._waiting.popleft().result()
        self._waiting.append(self._thread.submit(self._write, step, groups, advantages, phase))

    def flush(self) -> None:
        """Wait until everything is on disk."""
        while self._waiting:
            self._waiting.popleft().result()

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._thread.shutdown()

    def forget_after(self, step: int) -> None:
        """Remove the files of steps later than `step`: a resumed run makes them again."""
        self.flush()
        for found, file in _files(self.folder):
            if found > step:
                file.unlink()

    def __enter__(self) -> TrajectoryStore:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    @timed("writer")
    def _write(
        self, step: int, groups: Sequence[Group], advantages: Sequence[Sequence[Floats] | None] | None, phase: str
    ) -> None:
        table = to_table(step, groups, advantages, phase)
        name = f"step_{step:06d}{'' if phase == 'train' else '-' + _slug(phase)}.parquet"
        aside = self.folder / f".{name}.tmp"
        try:
            try:
                with open(aside, "wb") as file:
                    pq.write_table(table, file, compression="zstd")
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(aside, self.folder / name)
            except BaseException:
                aside.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise RunError(
                f"trajectories of step {step} could not be written in {self.folder}: {error.strerror or error}; "
                f"make room there and `renma resume`"
            ) from error


def _slug(phase: str) -> str:
    """A file name for any phase; phases that differ never share one."""
    plain = re.sub(r"[^A-Za-z0-9_.]+", "-", phase)[:80]
    digest = hashlib.sha256(phase.encode("utf-8", "surrogatepass")).hexdigest()
    return plain if plain == phase else f"{plain}-{digest[:6]}"


def _files(folder: Path) -> list[tuple[int, Path]]:
    found = [(_FILE.fullmatch(file.name), file) for file in folder.glob("step_*.parquet")]
    return sorted((int(match[1]), file) for match, file in found if match)


def read_records(
    folder: Path,
    *,
    step: int | None = None,
    phase: str | None = None,
    task_id: str | None = None,
    family: str | None = None,
    status: str | None = None,
    success: bool | None = None,
) -> Iterator[Record]:
    """The stored trajectories that match, in the order of steps, phases, groups and members. One file in memory.

    Raises DataError for a file that is not a trajectory table.
    """
    wanted = {"step": step, "phase": phase, "task_id": task_id, "family": family, "status": status, "success": success}
    filters = [(name, "==", value) for name, value in wanted.items() if value is not None]
    for number, file in _files(folder):
        if step is not None and number != step:
            continue
        try:
            rows = pq.read_table(file, filters=filters or None, partitioning=None).to_pylist()
            for _, lines in groupby(rows, key=lambda row: (row["step"], row["phase"], row["group"], row["member"])):
                yield from_rows(list(lines))
        except (pa.ArrowInvalid, KeyError) as error:
            reason = str(error).splitlines()[0]
            raise DataError(f"{file} is not a trajectory file of Renma ({reason}); remove it") from error


def read_trajectories(folder: Path, **where: Any) -> list[Trajectory]:
    """The stored trajectories, equal to those that were appended. `where` as in `read_records`."""
    return [record.trajectory for record in read_records(folder, **where)]


def export_jsonl(folder: Path, **where: Any) -> Iterator[str]:
    """One line of `trajectory_json` for each stored trajectory. `where` as in `read_records`."""
    for record in read_records(folder, **where):
        place: dict[str, int | str] = {"step": record.step, "phase": record.phase, "group": record.group}
        yield trajectory_json(record.trajectory, record.advantages, **place)


def trajectory_json(trajectory: Trajectory, advantages: Sequence[Floats] | None = None, **place: int | str) -> str:
    """A trajectory with all of its steps as one line of strict JSON, which begins with `place`.

    In a step, `ids` are the prompt's then the action's; `mask` is 1 where the policy sampled the id; `logprobs`,
    `versions` and `advantages` have one entry for each sampled id. `next_prompt` has the ids of the prompt that a limit
    kept from coming. The routing of a mixture of experts is in the Parquet files only. advantages: for each step [A].
    """
    per_step = [None] * len(trajectory.steps) if advantages is None else advantages
    line = place | {
        "member": trajectory.member,
        "task": {"id": trajectory.task.id, "family": trajectory.task.family, "prompt": trajectory.task.prompt},
        "status": trajectory.status,
        "stop_reason": trajectory.stop_reason,
        "success": trajectory.success,
        "return": _number(trajectory.ret),
        "rewards": {name: _number(value) for name, value in trajectory.rewards.items()},
        "seed": trajectory.seed,
        "error": trajectory.error,
        "next_prompt": None if trajectory.next_prompt_ids is None else trajectory.next_prompt_ids.tolist(),
        "steps": [_line(*pair) for pair in zip(trajectory.steps, per_step, strict=True)],
    }
    return json.dumps(line, allow_nan=False)


def _line(step: Step, advantages: Floats | None) -> dict[str, Any]:
    return {
        "agent": step.agent,
        "policy": step.policy,
        "ids": [*step.prompt_ids.tolist(), *step.action_ids.tolist()],
        "mask": [0] * len(step.prompt_ids) + [1] * len(step.action_ids),
        "logprobs": [_number(value) for value in step.logprobs.tolist()],
        "versions": step.versions.tolist(),
        "advantages": None if advantages is None else [_number(value) for value in advantages.tolist()],
        "action": step.action.raw,
        "observation": "".join(message.text for message in step.observation.messages),
        "rewards": {name: _number(value) for name, value in step.reward.items()},
    }


def _number(value: float) -> float | None:
    """JSON has no infinities."""
    return value if abs(value) < float("inf") else None
