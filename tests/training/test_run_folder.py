from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from renma.errors import RunError
from renma.training.run_folder import RunFolder, next_name


def everything(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*"))


def test_create_makes_the_layout_and_open_reads_it(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "runs", "first") as run:
        assert everything(tmp_path) == [
            "runs",
            "runs/first",
            "runs/first/.lock",
            "runs/first/checkpoints",
            "runs/first/trajectories",
        ]
        run.recipe.write_text("name: first\n")
    assert RunFolder.open(run.path).metrics == tmp_path / "runs/first/metrics.jsonl"
    assert os.fspath(run) == str(run.path)


def test_a_run_is_never_written_over(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, "a") as run:
        run.recipe.write_text("name: a\n")
    with pytest.raises(RunError, match=r"already holds a run; go on with `renma resume .*/a`"):
        RunFolder.create(tmp_path, "a")
    with RunFolder.create(tmp_path, "a", resume=True) as again:
        assert again.recipe.read_text() == "name: a\n"
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.tex").write_text("mine")
    with pytest.raises(RunError, match="not empty and holds no run"):
        RunFolder.create(tmp_path, "b")
    assert everything(tmp_path / "b") == ["thesis.tex"]


def test_a_run_that_never_began_does_not_block_its_name(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, "a").unlock()
    RunFolder.create(tmp_path, "a").unlock()


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "a b", "-x"])
def test_bad_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunError, match="bad run name"):
        RunFolder.create(tmp_path, name)
    assert everything(tmp_path) == []


def test_too_little_disk_space_is_said_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"the disk has [\d,]+ MB free and this run may take [\d,]+ MB; make room"):
        RunFolder.create(tmp_path / "new", "a", need_bytes=10**18)
    assert everything(tmp_path) == []


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write the run folder .*: Not a directory"):
        RunFolder.create(tmp_path / "file", "a")
    tmp_path.chmod(0o555)
    root = os.geteuid() == 0
    try:
        if root:  # whom permissions do not stop
            os.seteuid(65534)
        with pytest.raises(RunError, match=r"cannot write the run folder .*: Permission denied; choose"):
            RunFolder.create(tmp_path / "runs", "a")
    finally:
        if root:
            os.seteuid(0)
        tmp_path.chmod(0o755)
    assert everything(tmp_path) == ["file"]


def test_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"is not a run: it has no recipe\.yaml"):
        RunFolder.open(tmp_path)
    with pytest.raises(RunError, match=r"is not a run: it has no recipe\.yaml"):
        RunFolder.create(tmp_path, "nothing", resume=True)
    assert everything(tmp_path) == []


HOLD = """
import sys
from pathlib import Path
from renma.training.run_folder import RunFolder
run = RunFolder.create(Path(sys.argv[1]), "a")
run.recipe.write_text("name: a")
print("locked", flush=True)
sys.stdin.read()
"""


def test_two_processes_cannot_use_a_run_and_a_killed_one_lets_go(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdin and holder.stdout
    try:
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(RunError, match=f"/a is in use by process {holder.pid}; wait for it"):
            RunFolder.create(tmp_path, "a", resume=True)
        assert RunFolder.open(tmp_path / "a").path == tmp_path / "a"  # reading needs no lock
    finally:
        holder.kill()
        holder.wait()
        holder.stdin.close()
        holder.stdout.close()
    with RunFolder.create(tmp_path, "a", resume=True) as run:
        with pytest.raises(RunError, match="in use by this process already"):
            RunFolder.create(tmp_path, "a", resume=True)
        run.lock()  # having it already is fine
    RunFolder.create(tmp_path, "a", resume=True).unlock()


def test_losing_the_race_for_a_new_name_leaves_the_winner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    winner: list[RunFolder] = []
    lock = RunFolder.lock

    def late(self: RunFolder) -> None:
        if not winner:  # the other trainer comes just before the lock is taken
            winner.append(RunFolder(self.path))
            lock(winner[0])
        lock(self)

    monkeypatch.setattr(RunFolder, "lock", late)
    with pytest.raises(RunError, match="in use"):
        RunFolder.create(tmp_path, "a")
    assert everything(tmp_path) == ["a", "a/.lock"]
    winner[0].unlock()


def test_next_name(tmp_path: Path) -> None:
    assert next_name(tmp_path / "none", "quickstart") == "quickstart"
    for name in ("quickstart", "quickstart-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.yaml").write_text("")
    assert next_name(tmp_path, "quickstart") == "quickstart-3"
    (tmp_path / "file").write_text("")
    assert next_name(tmp_path, "file") == "file-2"
