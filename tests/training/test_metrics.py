from __future__ import annotations

import json
import resource
from pathlib import Path

import duckdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from renma.errors import DataError, RecipeError, RunError
from renma.training.metrics import MetricsLog, read_events, read_metrics


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@given(st.lists(st.tuples(st.integers(0, 99), st.floats()), max_size=5))
def test_every_line_is_strict_json(tmp_path_factory: pytest.TempPathFactory, numbers: list[tuple[int, float]]) -> None:
    folder = tmp_path_factory.mktemp("run")
    with MetricsLog(folder) as log:
        for step, value in numbers:
            log.log(step, {"loss": value})
            assert read_metrics(folder)[-1]["step"] == step  # flushed at once

    def refuse(name: str) -> None:
        raise AssertionError(name)

    lines = [json.loads(line, parse_constant=refuse) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line, (step, value) in zip(lines, numbers, strict=True):
        finite = value == value and abs(value) != float("inf")
        assert line["step"] == step and line["phase"] == "train" and line["loss"] == (value if finite else None)


def test_resuming_removes_later_steps_and_the_torn_line(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        for step in range(6):
            log.log(step, {"loss": float(step)})
        log.log(2, {"success": 0.5}, phase="evaluation")
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "lo')  # a kill -9 in the middle of a write
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write('{"ev')
    assert len(read_metrics(tmp_path)) == 7
    with MetricsLog(tmp_path, resume_step=3) as log:
        log.log(4, {"loss": 40.0})
    assert [(line["step"], line["phase"]) for line in read_metrics(tmp_path)] == [
        (0, "train"),
        (1, "train"),
        (2, "train"),
        (3, "train"),
        (2, "evaluation"),
        (4, "train"),
    ]
    (event,) = read_events(tmp_path)
    assert (event["event"], event["step"], event["metric_lines_dropped"]) == ("resumed", 3, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["events.jsonl", "metrics.jsonl"]


def test_opening_again_without_resuming_keeps_whole_lines(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 9, "loss": 1}\n{"st')
    MetricsLog(tmp_path).close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 9, "loss": 1}\n'


def test_tensorboard_shows_the_same_numbers_also_after_a_resume(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, ["tensorboard"]) as log:
        for step in range(4):
            log.log(step, {"loss": step / 2, "ratio": float("nan")})
    with MetricsLog(tmp_path, ["tensorboard"], resume_step=1) as log:
        log.log(2, {"loss": 20.0})
    assert scalars(tmp_path / "tensorboard") == {"train/loss": [(0, 0.0), (1, 0.5), (2, 20.0)]}


def test_events_take_any_value(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.event("checkpoint", step=3, path=tmp_path, loss=float("inf"), parts={"a": [float("nan"), 1.0]})
    (event,) = read_events(tmp_path)
    assert event["path"] == str(tmp_path)
    assert event["loss"] is None and event["parts"] == {"a": [None, 1.0]}


def test_duckdb_reads_the_metrics(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.log(1, {"reward/correct": 0.25, "loss": float("nan")})
        log.log(2, {"reward/correct": 0.75, "loss": 0.5})
    query = f"""select max("reward/correct"), count(loss) from read_json('{tmp_path}/metrics.jsonl')"""
    assert duckdb.sql(query).fetchall() == [(0.75, 1)]


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="unknown tracker 'tensorbord'; did you mean 'tensorboard'"):
        MetricsLog(tmp_path, ["tensorbord"])
    with pytest.raises(RunError, match="cannot write metrics in .*/nowhere"):
        MetricsLog(tmp_path / "nowhere")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nstep 2\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2 is not JSON"):
        read_metrics(tmp_path)


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Without the with-block's exit hiding the reason: closing does not try to write again.
    with (
        pytest.raises(RunError, match=r"could not be written in .*; make room there and `renma resume`$"),
        MetricsLog(tmp_path) as log,
    ):
        log.log(1, {"loss": 1.0})
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        try:
            log.log(2, {f"metric_{i}": 1.0 for i in range(20)})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [line["step"] for line in read_metrics(tmp_path)] == [1]  # the torn second line is not shown
