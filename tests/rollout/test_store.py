from __future__ import annotations

import dataclasses
import json
import resource
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from renma.errors import DataError, RunError
from renma.rollout import store as store_module
from renma.rollout.store import TrajectoryStore, export_jsonl, read_records, read_trajectories
from renma.rollout.trajectory_rows import from_json, to_json
from renma.tape import Tape
from renma.types import Action, Group, Message, Observation, Step, Task, ToolCall, Trajectory

any_text = st.text(st.characters(), max_size=8) | st.sampled_from(["\ud800", "a\udfffb", "練磨", "\x00", "{}'\"\\"])
numbers = st.dictionaries(st.sampled_from(["correct", "format", "長さ"]), st.floats(allow_nan=False), max_size=2)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | any_text | st.binary(max_size=3)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(any_text | st.integers(0, 5) | st.just("$int"), inner, max_size=3)
    ),
    max_leaves=6,
)
calls = st.builds(
    ToolCall,
    name=any_text,
    arguments=st.dictionaries(any_text, values, max_size=2),
    id=any_text,
    error=st.none() | any_text,
)
messages = st.builds(
    Message,
    role=st.sampled_from(["user", "tool", "system"]),
    content=any_text | st.just([{"type": "text", "text": "seen"}, {"type": "image_url", "image_url": {"url": "x"}}]),
    tool_calls=st.lists(calls, max_size=1).map(tuple),
    tool_call_id=st.none() | any_text,
    name=st.none() | any_text,
)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    size = draw(st.integers(0, 4))
    ids = st.integers(0, 2**31 - 1)
    return Step(
        prompt_ids=np.array(draw(st.lists(ids, max_size=5)), dtype=np.int32),
        action_ids=np.array(draw(st.lists(ids, min_size=size, max_size=size)), dtype=np.int32),
        logprobs=np.array(draw(st.lists(st.floats(-99, 0, width=32), min_size=size, max_size=size)), dtype=np.float32),
        versions=np.array(draw(st.lists(st.integers(0, 9), min_size=size, max_size=size)), dtype=np.int32),
        action=Action(draw(any_text), tuple(draw(st.lists(calls, max_size=2))), draw(any_text), draw(any_text)),
        observation=Observation(tuple(draw(st.lists(messages, max_size=2)))),
        reward=draw(numbers),
        terminated=draw(st.booleans()),
        truncated=draw(st.booleans()),
        sample_stop=draw(st.sampled_from(["stop", "length", "aborted"])),
        agent=draw(any_text),
        state_key=draw(st.none() | any_text),
        seconds=draw(numbers),
    )


def _int32(ids: list[int]) -> Any:
    return np.array(ids, dtype=np.int32)


tasks = st.builds(
    Task, id=any_text, prompt=any_text, answer=values, family=any_text, data=st.dictionaries(any_text, values)
)


@st.composite
def groups(draw: st.DrawFn) -> Group:
    task = draw(tasks)
    members = [
        Trajectory(
            task=task,
            member=member,
            steps=tuple(draw(st.lists(steps(), max_size=3))),
            status=draw(st.sampled_from(["done", "truncated", "failed"])),
            stop_reason=draw(st.sampled_from(["answer", "step_limit", "environment_error"])),
            success=draw(st.none() | st.booleans()),
            rewards=draw(numbers),
            seed=draw(st.integers(0, 2**63 - 1)),
            error=draw(st.none() | any_text),
            attempts=draw(st.integers(1, 3)),
            next_prompt_ids=draw(st.none() | st.lists(st.integers(0, 2**31 - 1), max_size=4).map(_int32)),
            seconds=draw(st.floats(0, 1e6)),
            reward_seconds=draw(st.floats(0, 1e6)),
        )
        for member in range(draw(st.integers(1, 3)))
    ]
    return Group(task, tuple(members))


def plain(thing: Any) -> Any:
    """Comparable: arrays as (dtype, list), dataclasses as dicts."""
    if isinstance(thing, np.ndarray):
        return (str(thing.dtype), thing.tolist())
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        return {field.name: plain(getattr(thing, field.name)) for field in dataclasses.fields(thing)}
    if isinstance(thing, (list, tuple)):
        return type(thing)(plain(item) for item in thing)
    return thing


def one_step(raw: str = "Answer: 4\n", n: int = 3, **changes: Any) -> Step:
    fields: dict[str, Any] = {
        "prompt_ids": np.arange(5, dtype=np.int32),
        "action_ids": np.arange(10, 10 + n, dtype=np.int32),
        "logprobs": np.full(n, -0.5, dtype=np.float32),
        "versions": np.zeros(n, dtype=np.int32),
        "action": Action(raw.strip(), raw=raw),
        "observation": Observation.of("Result: 4\n", "tool"),
        "reward": {"correct": 1.0},
    }
    return Step(**fields | changes)


def one_group(steps: int = 2, members: int = 2, **changes: Any) -> Group:
    task = Task("t1", "2 + 2", "4", "sums")
    made = (
        Trajectory(task, m, tuple(one_step() for _ in range(steps)), "done", "answer", True) for m in range(members)
    )
    return Group(task, tuple(dataclasses.replace(t, **changes) for t in made))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(batch=st.lists(groups(), max_size=2), phase=any_text)
def test_what_is_read_is_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, batch: list[Group], phase: str
) -> None:
    folder = tmp_path_factory.mktemp("store")
    advantages = [[np.arange(t.sampled_tokens, dtype=np.float32) for t in group.trainable] for group in batch]
    with TrajectoryStore(folder) as store:
        store.append(7, batch, advantages, phase)
    records = list(read_records(folder))
    written = [t for group in batch for t in group.trajectories]
    assert plain([r.trajectory for r in records]) == plain(written)
    assert [(r.step, r.phase) for r in records] == [(7, phase)] * len(written)
    for record in records:
        if record.trajectory.trainable:
            assert record.advantages is not None
            joined = np.concatenate(record.advantages)
            assert joined.tolist() == list(range(record.trajectory.sampled_tokens))
            assert [len(a) for a in record.advantages] == [len(s.action_ids) for s in record.trajectory.steps]
        else:
            assert record.advantages is None
    for line, trajectory in zip(export_jsonl(folder), written, strict=True):
        assert len(json.loads(line)["steps"]) == len(trajectory.steps)


@given(values)
def test_json_gives_back_any_plain_value(value: Any) -> None:
    text = to_json(value)
    assert from_json(text) == value
    assert text.isascii()


def test_json_survives_what_a_model_can_write() -> None:
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    assert "$cut" in to_json(deep)
    assert from_json(to_json(10**6000)) == 10**6000
    assert from_json(to_json(float("-inf"))) == float("-inf")
    assert to_json({"$float": "x"}) != to_json(float("nan"))
    assert from_json(to_json({"$float": "x"})) == {"$float": "x"}
    assert from_json(to_json([np.float32(0.5), np.arange(2)])) == [0.5, [0, 1]]
    assert from_json(to_json(object())) == {"$object": "object"}


def test_duckdb_reads_the_files(tmp_path: Path) -> None:
    with TrajectoryStore(tmp_path / "trajectories") as store:
        group = one_group(rewards={"solved": 0.25})
        store.append(3, [group], [[np.full(6, 2.0, dtype=np.float32), np.full(6, -2.0, dtype=np.float32)]])
        store.append(4, [one_group(steps=1)], phase="evaluation of svamp")
    files = f"{tmp_path}/trajectories/*.parquet"
    query = f"""select step, phase, member, turn, task_id, raw, observation, reward['correct'], outcome['solved'],
        "return", success, len(prompt_ids), action_ids[1], list_sum(advantages)
        from '{files}' order by step, member, turn"""
    assert duckdb.sql(query).fetchall()[1:4] == [
        (3, "train", 0, 1, "t1", "Answer: 4\n", "Result: 4\n", 1.0, 0.25, 2.25, True, 5, 10, 6.0),
        (3, "train", 1, 0, "t1", "Answer: 4\n", "Result: 4\n", 1.0, 0.25, 2.25, True, 5, 10, -6.0),
        (3, "train", 1, 1, "t1", "Answer: 4\n", "Result: 4\n", 1.0, 0.25, 2.25, True, 5, 10, -6.0),
    ]
    phases = duckdb.sql(f"select distinct phase from '{files}' order by 1").fetchall()
    assert phases == [("evaluation of svamp",), ("train",)]


def test_hostile_text_stays_readable_and_exact(tmp_path: Path) -> None:
    raw = "half a pair \ud83d and a nul \x00"
    task = Task("t", "p")
    with TrajectoryStore(tmp_path) as store:
        store.append(0, [Group(task, (Trajectory(task, 0, (one_step(raw),), "done", "answer"),))])
    (shown,) = duckdb.sql(f"select raw from '{tmp_path}/*.parquet'").fetchall()
    assert shown[0].startswith("half a pair \ufffd")
    assert read_trajectories(tmp_path)[0].steps[0].action.raw == raw


def test_the_next_prompt_is_stored_once_and_older_files_have_none(tmp_path: Path) -> None:
    cut = one_group(steps=3, members=1, status="truncated", next_prompt_ids=np.array([4, 5], np.int32))
    with TrajectoryStore(tmp_path) as store:
        store.append(1, [cut])
    (file,) = tmp_path.glob("*.parquet")
    query = f"select next_prompt_ids from '{file}' order by turn"
    assert duckdb.sql(query).fetchall() == [(None,), (None,), ([4, 5],)]
    table = pq.read_table(file)
    pq.write_table(table.drop_columns(["next_prompt_ids"]), file)
    assert read_trajectories(tmp_path)[0].next_prompt_ids is None


def growing(turns: int, on_tape: bool) -> Group:
    """An episode whose prompts go on from one another, 20 new tokens a turn, and begin anew at turn 3."""
    tape, steps = Tape(), []
    for turn in range(turns):
        if turn == 3:
            tape = Tape()
        tape.extend(np.arange(17, dtype=np.int32) + turn)
        prompt = tape.view() if on_tape else tape.view().copy()
        steps.append(one_step(prompt_ids=prompt))
        tape.extend(steps[-1].action_ids)
    task = Task("t1", "2 + 2")
    return Group(task, (Trajectory(task, 0, tuple(steps), "done", "answer", True),))


@pytest.mark.parametrize("on_tape", [True, False])
def test_a_long_episode_is_written_once_and_read_as_it_was(tmp_path: Path, on_tape: bool) -> None:
    group = growing(200, on_tape)
    with TrajectoryStore(tmp_path) as store:
        store.append(0, [group])
    (file,) = tmp_path.glob("*.parquet")
    query = f"select len(prompt_ids), prompt_shared from '{file}' order by turn"
    lengths = duckdb.sql(query).fetchall()
    assert [new for new, _ in lengths] == [17] * 200, "what is new in each turn, however long the episode"
    assert [shared for _, shared in lengths] == [0, 20, 40, *range(0, 197 * 20, 20)]
    (read,) = read_trajectories(tmp_path)
    assert plain(read) == plain(group.trajectories[0])
    memory = {id(step.prompt_ids.base): step.prompt_ids.base.nbytes for step in read.steps}
    assert sum(memory.values()) <= 4 * read.steps[-1].prompt_ids.nbytes + 4 * 256 * 4


def test_files_from_before_prompts_were_shared_are_read(tmp_path: Path) -> None:
    group = growing(3, False)
    with TrajectoryStore(tmp_path) as store:
        store.append(0, [group])
    (file,) = tmp_path.glob("*.parquet")
    table = pq.read_table(file)
    whole = pa.array([step.prompt_ids for step in group.trajectories[0].steps], pa.list_(pa.int32()))
    old = table.set_column(table.schema.get_field_index("prompt_ids"), "prompt_ids", whole)
    pq.write_table(old.drop_columns(["prompt_shared"]), file)
    assert plain(read_trajectories(tmp_path)) == plain(list(group.trajectories))


def test_rows_without_those_they_go_on_from_are_refused(tmp_path: Path) -> None:
    with TrajectoryStore(tmp_path) as store:
        store.append(0, [growing(3, True)])
    (file,) = tmp_path.glob("*.parquet")
    pq.write_table(pq.read_table(file, filters=[("turn", "!=", 1)]), file)
    with pytest.raises(DataError, match="turn 2 of task 't1' member 0 goes on from 40 tokens"):
        read_trajectories(tmp_path)


def test_a_trajectory_without_steps_is_kept(tmp_path: Path) -> None:
    failed = one_group(steps=0, status="failed", stop_reason="environment_error", error="boom", success=None)
    with TrajectoryStore(tmp_path) as store:
        store.append(1, [failed], [[]])
    assert plain(read_trajectories(tmp_path)) == plain(list(failed.trajectories))


def test_filters_choose_whole_trajectories(tmp_path: Path) -> None:
    with TrajectoryStore(tmp_path) as store:
        store.append(1, [one_group(), one_group(success=False)])
        store.append(1, [one_group()], phase="evaluation")
        store.append(2, [one_group(members=1)])
    assert len(read_trajectories(tmp_path, step=1, phase="train")) == 4
    assert len(read_trajectories(tmp_path, success=False)) == 2
    assert [len(t.steps) for t in read_trajectories(tmp_path, step=2)] == [2]
    assert read_trajectories(tmp_path, family="other") == []


def test_case_9_2_a_json_line_has_ids_mask_logprobs_and_reward_parts(tmp_path: Path) -> None:
    with TrajectoryStore(tmp_path) as store:
        store.append(1, [one_group(members=1, rewards={"solved": 1.0})], [[np.ones(6, dtype=np.float32)]])
    (text,) = export_jsonl(tmp_path)
    line = json.loads(text)
    assert line["rewards"] == {"solved": 1.0} and line["return"] == 3.0
    assert [step["rewards"] for step in line["steps"]] == [{"correct": 1.0}] * 2
    for step in line["steps"]:
        assert step["ids"] == [0, 1, 2, 3, 4, 10, 11, 12]
        assert step["mask"] == [0] * 5 + [1] * 3
        assert step["logprobs"] == [-0.5] * 3 and step["advantages"] == [1.0] * 3


def test_a_step_written_again_replaces_and_later_ones_are_forgotten(tmp_path: Path) -> None:
    with TrajectoryStore(tmp_path) as store:
        for step in (1, 2, 3):
            store.append(step, [one_group(members=3)])
        store.append(2, [one_group(members=1)])
        store.append(3, [one_group()], phase="evaluation")
        store.forget_after(2)
    assert [r.step for r in read_records(tmp_path)] == [1, 1, 1, 2]


def test_advantages_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    store.append(1, [one_group()], [[np.ones(5, dtype=np.float32)] * 2])
    with pytest.raises(ValueError, match="5 advantages for 6 sampled tokens"):
        store.flush()
    store.append(1, [one_group()], [[np.ones(6, dtype=np.float32)]])
    with pytest.raises(ValueError, match="1 advantage arrays for 2"):
        store.close()
    assert list(tmp_path.iterdir()) == []


def test_append_does_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = threading.Event()
    slow = store_module.pq.write_table

    def write(*arguments: Any, **options: Any) -> None:
        assert disk.wait(30)
        slow(*arguments, **options)

    monkeypatch.setattr(store_module.pq, "write_table", write)
    store = TrajectoryStore(tmp_path)
    for step in range(3):
        store.append(step, [one_group()])
    assert list(tmp_path.glob("*.parquet")) == []
    disk.set()
    store.close()
    assert len(list(tmp_path.glob("*.parquet"))) == 3


def test_batches_are_written_in_order_and_a_slow_disk_holds_up_only_a_full_backlog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, written = threading.Semaphore(0), []
    real = store_module.pq.write_table

    def write(table: pa.Table, *arguments: Any, **options: Any) -> None:
        assert disk.acquire(timeout=30)
        written.append(table["step"][0].as_py())
        real(table, *arguments, **options)

    monkeypatch.setattr(store_module.pq, "write_table", write)
    store = TrajectoryStore(tmp_path)
    full = threading.Event()

    def training() -> None:
        for step in range(store_module._BACKLOG):
            store.append(step, [one_group()])
        full.set()
        store.append(store_module._BACKLOG, [one_group()])

    thread = threading.Thread(target=training)
    thread.start()
    assert full.wait(30) and thread.is_alive() and not written, "a full backlog, nothing on disk, nothing waited for"
    for _ in range(store_module._BACKLOG + 1):
        disk.release()
    thread.join(30)
    store.close()
    assert written == list(range(store_module._BACKLOG + 1))


def test_an_error_of_the_writer_comes_up_at_the_next_step_or_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = threading.Event()
    real = store_module.pq.write_table

    def refuse(table: pa.Table, *arguments: Any, **options: Any) -> None:
        tried.set()
        if table["step"][0].as_py() in (0, 3):
            raise OSError(28, "No space left on device")
        real(table, *arguments, **options)

    monkeypatch.setattr(store_module.pq, "write_table", refuse)
    store = TrajectoryStore(tmp_path)
    store.append(0, [one_group()])
    assert tried.wait(30)
    wait([store._waiting[0]], 30)
    with pytest.raises(RunError, match=r"step 0 could not be written .*No space left"):
        store.append(1, [one_group()])
    store.append(2, [one_group()])
    store.append(3, [one_group()])
    with pytest.raises(RunError, match="step 3 could not be written"):
        store.close()
    assert {r.step for r in read_records(tmp_path)} == {2}


@contextmanager
def files_no_longer_than(size: int) -> Iterator[None]:
    """The kernel refuses writes past `size` bytes, as a full disk refuses them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    with files_no_longer_than(100):
        store.append(5, [one_group()])
        with pytest.raises(
            RunError, match=r"^trajectories of step 5 could not be written in .*renma resume`$"
        ) as raised:
            store.flush()
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []
    store.append(5, [one_group()])
    store.close()
    assert len(read_trajectories(tmp_path)) == 2


def test_leftovers_of_a_killed_run_go_and_other_files_are_named(tmp_path: Path) -> None:
    (tmp_path / ".step_000001.parquet.tmp").write_bytes(b"half")
    TrajectoryStore(tmp_path).close()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "step_000001.parquet").write_bytes(b"not parquet")
    with pytest.raises(DataError, match=r"step_000001\.parquet is not a trajectory file"):
        read_trajectories(tmp_path)
    with pytest.raises(RunError, match="cannot write trajectories"):
        TrajectoryStore(tmp_path / "step_000001.parquet" / "inside")
