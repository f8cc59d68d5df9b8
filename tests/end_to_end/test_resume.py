"""A killed run goes on as if nothing had happened: bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import duckdb
import pytest
import yaml
from safetensors.numpy import load_file

from renma.training.checkpoints import latest_checkpoint
from renma.training.run_folder import RunFolder
from tests.end_to_end.tiny import TINY

TIMES = ("time", "seconds", "tokens_per_second")


def renma(*arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "renma.cli", *arguments, "--progress", "plain"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def finished(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 0, output
    return output


def numbers(run: Path) -> list[dict[str, Any]]:
    """Every metric that is not a time, in order."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not any(t in k for t in TIMES)} for line in lines]


def weights(run: Path) -> dict[str, Any]:
    found = latest_checkpoint(RunFolder.open(run))
    assert found is not None
    return load_file(found[1] / "policy" / "model.safetensors")


def recipe_file(folder: Path, **training: Any) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump({**TINY, "training": {**TINY["training"], **training}}))
    return path


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    finished(renma("train", str(recipe_file(folder)), "--output", str(folder)))
    return folder / "tiny"


def assert_same(run: Path, whole: Path) -> None:
    assert numbers(run) == numbers(whole)
    ours, theirs = weights(run), weights(whole)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert (ours[name] == theirs[name]).all(), name
    query = "select step, phase, task_id, member, turn, action_ids from '{}/trajectories/*.parquet' order by all"
    assert duckdb.sql(query.format(run)).fetchall() == duckdb.sql(query.format(whole)).fetchall()


def test_case_7_5_and_7_1_a_killed_run_resumes_bit_for_bit(uninterrupted: Path, tmp_path: Path) -> None:
    """kill -9 at moments drawn at random (a new draw each time this test runs), until the run is through."""
    seed = random.SystemRandom().randrange(10**6)
    rng = random.Random(seed)
    run = tmp_path / "tiny"
    process = renma("train", str(recipe_file(tmp_path)), "--output", str(tmp_path))
    for _ in range(2):
        wanted = rng.randrange(0, 12)
        assert process.stdout is not None
        for line, _ in enumerate(process.stdout):  # an event to wait for: so many lines of progress
            if line >= wanted:
                break
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        if (run / "recipe.yaml").exists():
            process = renma("resume", str(run))
        else:  # killed before there was anything to resume
            process = renma("train", str(recipe_file(tmp_path)), "--output", str(tmp_path))
    finished(process)
    print(f"kills drawn with seed {seed}")
    assert_same(run, uninterrupted)


def test_an_interrupted_run_says_how_to_go_on(uninterrupted: Path, tmp_path: Path) -> None:
    process = renma("train", str(recipe_file(tmp_path)), "--output", str(tmp_path))
    assert process.stdout is not None
    for line in process.stdout:
        if "step 3" in line or "3/6" in line:
            process.send_signal(signal.SIGINT)
            break
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert f"renma resume {tmp_path / 'tiny'}" in output
    finished(renma("resume", str(tmp_path / "tiny")))
    assert_same(tmp_path / "tiny", uninterrupted)


def test_resuming_a_finished_run_changes_no_number(uninterrupted: Path) -> None:
    before = numbers(uninterrupted)
    finished(renma("resume", str(uninterrupted)))
    assert [line for line in numbers(uninterrupted) if line["phase"] == "train"] == [
        line for line in before if line["phase"] == "train"
    ]
