"""A run is a folder; nothing else is needed to resume, view, evaluate or serve it.

recipe.yaml              as resolved
metrics.jsonl            one line a step            (training/metrics.py)
events.jsonl             what happened              (training/metrics.py)
trajectories/*.parquet   one row a step             (rollout/store.py)
checkpoints/step_N/      complete ones only         (training/checkpoints.py)
tensorboard/             event files
profile/                 traces of a few steps      (training/profile.py)
report.html
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from pathlib import Path

from renma.errors import RunError

SPARE_BYTES = 200 * 2**20  # metrics, trajectories and a small model's checkpoints
_LOCK = ".lock"
_locked: set[Path] = set()  # by this process: fcntl's locks do not exclude their own process


class RunFolder:
    """The paths of one run. Made by `create` (to train, locked) or `open` (to read)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def trajectories(self) -> Path:
        return self.path / "trajectories"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @classmethod
    def create(cls, base: Path, name: str, *, resume: bool = False, need_bytes: int = SPARE_BYTES) -> RunFolder:
        """Make `base/name` (with resume, take up the run that is there) and lock it for this process.

        need_bytes: disk space the run is expected to take. Raises RunError, with nothing left behind, when the folder
        is not empty (unless resume), cannot be written, is used by another process, or the disk is too full.
        """
        if not resume and not re.fullmatch(r"[\w][\w.-]*", name):
            raise RunError(f"bad run name {name!r}; use letters, digits, '_', '-' and '.'")
        path = base / name
        made = _missing_folders(path)
        run = cls(path)
        try:
            if resume and not run.recipe.is_file():
                raise RunError(f"{path} is not a run: it has no recipe.yaml; see what {base} holds")
            path.mkdir(parents=True, exist_ok=True)
            if not resume:
                _check_empty(path)
            free = shutil.disk_usage(path).free
            if free < need_bytes:
                raise RunError(
                    f"{path}: the disk has {free / 2**20:,.0f} MB free and this run may take "
                    f"{need_bytes / 2**20:,.0f} MB; make room or choose another folder"
                )
            run.lock()
            if not resume:
                _check_empty(path)  # again: another process may have come and gone before the lock
            for folder in (run.trajectories, run.checkpoints):
                folder.mkdir(exist_ok=True)
        except (OSError, RunError) as error:
            if run._lock is not None and made:
                (path / _LOCK).unlink(missing_ok=True)
            run.unlock()
            _remove_empty(made)
            if isinstance(error, RunError):
                raise
            raise RunError(
                f"cannot write the run folder {path}: {error.strerror}; choose another folder or mend its permissions"
            ) from error
        return run

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """A run to read. Raises RunError when `path` is not one."""
        try:
            known = (path / "recipe.yaml").is_file()
        except OSError as error:
            raise RunError(f"cannot read the run folder {path}: {error.strerror}; mend its permissions") from error
        if not known:
            raise RunError(f"{path} is not a run: it has no recipe.yaml; give a folder such as runs/quickstart")
        return cls(path)

    def lock(self) -> None:
        """Keep other processes from training in this folder. The lock ends with the process, however it ends.

        Raises RunError when another process, or another trainer in this one, has it.
        """
        if self._lock is not None:
            return
        key = self.path.resolve()
        if key in _locked:
            raise RunError(f"{self.path} is in use by this process already; close the other trainer first")
        # Not flock: its lock would live on in a forked worker that outlasts a killed trainer.
        handle = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            owner = os.read(handle, 32).decode(errors="replace").strip()
            os.close(handle)
            raise RunError(
                f"{self.path} is in use by process {owner or '?'}; wait for it, stop it, or choose another name"
            ) from error
        os.ftruncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
        self._lock = handle
        _locked.add(key)

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
            _locked.discard(self.path.resolve())

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *raised: object) -> None:
        self.unlock()

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old text or the new, never a part."""
    aside = path.with_name(f".{path.name}.tmp")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def next_name(base: Path, name: str) -> str:
    """`name`, or the first of name-2, name-3, … that no run under `base` has."""
    number = 1
    candidate = name
    while (base / candidate).exists() and (not (base / candidate).is_dir() or any((base / candidate).iterdir())):
        number += 1
        candidate = f"{name}-{number}"
    return candidate


def _check_empty(path: Path) -> None:
    """What a run that never began leaves (its lock, empty folders) counts as nothing."""
    if (path / "recipe.yaml").exists():
        raise RunError(f"{path} already holds a run; go on with `renma resume {path}`, or choose another name")
    if any(not found.is_dir() and found.name != _LOCK for found in path.rglob("*")):
        raise RunError(f"{path} is not empty and holds no run; choose another name")


def _missing_folders(path: Path) -> list[Path]:
    """path and those of its parents that do not exist, innermost first."""
    missing = []
    for folder in (path, *path.parents):
        if os.path.lexists(folder):
            break
        missing.append(folder)
    return missing


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        for inside in (folder / "trajectories", folder / "checkpoints", folder):
            try:
                inside.rmdir()
            except OSError:  # not there, or somebody has begun to use it
                pass
