from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from renma.errors import RunError
from renma.training.checkpoints import checkpoints, latest_checkpoint, save_checkpoint
from renma.training.run_folder import RunFolder


def weights(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model").mkdir()
        (folder / "model" / "weights.bin").write_text(text * 100)
        (folder / "state.json").write_text(json.dumps({"text": text}))

    return write


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path)
    run.checkpoints.mkdir()
    return run


def names(run: RunFolder) -> list[str]:
    return sorted(entry.name for entry in run.checkpoints.iterdir())


def text_of(folder: Path) -> str:
    return json.loads((folder / "state.json").read_text())["text"]


def test_the_newest_is_found_and_older_ones_are_pruned(run: RunFolder) -> None:
    assert latest_checkpoint(run) is None
    for step in (5, 10, 100, 1000):
        assert save_checkpoint(run, step, weights(str(step)), keep=2) == run.checkpoints / f"step_{step}"
    assert names(run) == ["step_100", "step_1000"]
    found = latest_checkpoint(run)
    assert found is not None and found[0] == 1000 and text_of(found[1]) == "1000"


def test_incomplete_and_damaged_ones_are_passed_over(run: RunFolder) -> None:
    for step in (1, 2, 3, 4, 5):
        save_checkpoint(run, step, weights(str(step)), keep=9)
    (run.checkpoints / "step_5" / "complete").unlink()
    (run.checkpoints / "step_4" / "state.json").unlink()
    (run.checkpoints / "step_3" / "model" / "weights.bin").write_text("X" * 100)  # same size, other content
    (run.checkpoints / "step_6").mkdir()
    (run.checkpoints / "step_x").mkdir()
    assert [step for step, _ in checkpoints(run)] == [1, 2, 3]
    assert latest_checkpoint(run) == (2, run.checkpoints / "step_2")
    (run.checkpoints / "step_2" / "complete").write_text('{"files": [')
    assert latest_checkpoint(run) == (1, run.checkpoints / "step_1")
    save_checkpoint(run, 4, weights("again"), keep=9)
    assert latest_checkpoint(run) == (4, run.checkpoints / "step_4")
    assert names(run) == ["step_1", "step_3", "step_4"]


def test_saving_a_step_again_replaces_it_and_later_ones_go(run: RunFolder) -> None:
    for step in (1, 2, 3):
        save_checkpoint(run, step, weights("old"), keep=3)
    save_checkpoint(run, 2, weights("new"), keep=1)
    assert names(run) == ["step_2"]
    assert text_of(run.checkpoints / "step_2") == "new"


def test_leftovers_of_killed_processes_are_cleared(run: RunFolder) -> None:
    save_checkpoint(run, 1, weights("one"), keep=1)
    (run.checkpoints / ".step_2.tmp-12345" / "model").mkdir(parents=True)
    (run.checkpoints / ".trash-step_0").mkdir()
    (run.checkpoints / "step_1").rename(run.checkpoints / ".step_1.old")  # killed while replacing step 1
    found = latest_checkpoint(run)
    assert found is not None and found[0] == 1 and text_of(found[1]) == "one"
    save_checkpoint(run, 2, weights("two"), keep=2)
    assert names(run) == ["step_1", "step_2"]


def test_a_failed_write_leaves_what_was_there(run: RunFolder) -> None:
    save_checkpoint(run, 1, weights("one"))

    def broken(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise RuntimeError("a fault in the learner")

    with pytest.raises(RuntimeError, match="a fault in the learner"):
        save_checkpoint(run, 2, broken)
    assert names(run) == ["step_1"]


def test_a_full_disk_is_one_line_and_leaves_what_was_there(run: RunFolder) -> None:
    save_checkpoint(run, 1, weights("one"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))  # the kernel refuses longer files, as a full disk does
    try:
        with pytest.raises(RunError, match=r"checkpoint of step 2 could not be written .*make room there") as raised:
            save_checkpoint(run, 2, weights("two"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(raised.value)
    assert names(run) == ["step_1"]


# A child process is killed at its n-th touch of the file system, for every n until it gets through: between any two
# of them the folder must show the checkpoint before or the one after. The child forks itself to save start-up time.
KILLED = """
import json, os, random, signal, sys, time
from pathlib import Path
from renma.training.checkpoints import checkpoints, latest_checkpoint, save_checkpoint
from renma.training.run_folder import RunFolder

mode, seed = sys.argv[2], int(sys.argv[3])
base = Path(sys.argv[1])
TOUCHES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir", "shutil.rmtree"}

def write(text):
    def fill(folder):
        for name in ("a", "b"):
            with open(folder / name, "w", buffering=1) as file:
                for _ in range(3):
                    file.write(text + "\\n")
                    sys.audit("open", "between two writes", "w", 0)
    return fill

def die_at(count):
    left = [count]
    def hook(event, arguments):
        if event in TOUCHES:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)

def die_within(seconds):
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)

def content(folder):
    texts = {p.name: set(p.read_text().split()) for p in folder.iterdir() if p.name != "complete"}
    assert texts.keys() == {"a", "b"} and texts["a"] == texts["b"] and len(texts["a"]) == 1, texts
    assert all(len((folder / n).read_text().split()) == 3 for n in "ab")
    return texts["a"].pop()

rng = random.Random(seed)
outcomes = []
for attempt in range(1, 400):
    run = RunFolder(base / f"{mode}{attempt}")
    run.checkpoints.mkdir(parents=True)
    began = time.perf_counter()
    save_checkpoint(run, 1, write("old"), keep=1)
    took = time.perf_counter() - began
    again = 1 if mode == "same" else 2
    moment = rng.uniform(0.01, 1.3)
    child = os.fork()
    if child == 0:
        if mode == "random":
            die_within(moment * took)
        else:
            die_at(attempt)
        save_checkpoint(run, again, write("new"), keep=1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    for step, folder in checkpoints(run):
        content(folder)
    step, folder = latest_checkpoint(run)
    found = content(folder)
    assert (step, found) in [(1, "old"), (again, "new")], (attempt, step, found)
    outcomes.append(found)
    save_checkpoint(run, 3, write("next"), keep=1)
    assert sorted(os.listdir(run.checkpoints)) == ["step_3"], os.listdir(run.checkpoints)
    if mode == "random" and attempt == 40 or mode != "random" and status == 0:
        break
else:
    raise AssertionError("never got through")
print(json.dumps(outcomes))
"""


@pytest.mark.parametrize("mode", ["other", "same", "random"])
def test_case_7_4_killed_at_any_moment_no_half_checkpoint_is_visible(tmp_path: Path, mode: str) -> None:
    child = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), mode, "7"], capture_output=True, text=True, timeout=100
    )
    assert child.returncode == 0, child.stderr
    outcomes = json.loads(child.stdout)
    if mode == "random":
        assert len(outcomes) == 40
    else:
        assert outcomes[0] == "old" and outcomes[-1] == "new" and len(outcomes) > 20
        assert outcomes == sorted(outcomes, reverse=True)  # once the new one shows, it stays
