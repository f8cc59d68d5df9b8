"""Checkpoints that are whole or not there: `checkpoints/step_N`, written aside, fsynced, marked, renamed.

The marker, `complete`, is written last and lists every file with its size and checksum, so that a checkpoint whose
files were damaged later is passed over too. Only the process that holds the run's lock saves.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

from renma.errors import RunError
from renma.training.run_folder import RunFolder

MARKER = "complete"
_NAME = re.compile(r"step_(\d+)|\.step_(\d+)\.old")
_FULL_BYTES = 16 * 2**20  # torch and safetensors report a full disk as errors of their own kinds


def save_checkpoint(run: RunFolder, step: int, write: Callable[[Path], None], keep: int = 2) -> Path:
    """Let `write` fill a folder, and make it `checkpoints/step_N`. Gives that folder.

    Afterwards the newest `keep` up to this step are left; damaged ones go, and so do those of later steps, which belong
    to a course of the run that was given up by resuming before them.

    At no moment, kill -9 and power cut included, does `checkpoints` show part of a checkpoint, or fewer than were
    complete before. Raises RunError when the disk is full; whatever else `write` raises goes through. Both leave the
    earlier checkpoints as they were.
    """
    folder = run.checkpoints
    final = folder / f"step_{step}"
    aside = folder / f".step_{step}.tmp-{os.getpid()}"
    replaced = folder / f".step_{step}.old"
    _clear_leftovers(folder)
    try:
        aside.mkdir(parents=True)
        write(aside)
        _seal(aside)
        if final.exists():  # the same step again: the old one counts until the new one is in its place
            if _whole(final, verify=False):
                final.rename(replaced)
            else:
                _discard(final)
        aside.rename(final)
        _sync_folder(folder)
    except BaseException as error:
        full = isinstance(error, OSError) or (
            isinstance(error, Exception) and shutil.disk_usage(run.path).free < _FULL_BYTES
        )
        shutil.rmtree(aside, ignore_errors=True)
        if not full:
            raise
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise RunError(
            f"checkpoint of step {step} could not be written in {folder}: {reason}; make room there and `renma resume`"
        ) from error
    if replaced.exists():
        _discard(replaced)
    kept = [path for saved, path in checkpoints(run) if saved <= step][-keep:]
    for entry in folder.glob("step_*"):
        if entry not in kept:
            _discard(entry)
    return final


def checkpoints(run: RunFolder) -> list[tuple[int, Path]]:
    """(step, folder) of the complete checkpoints, oldest first; changes nothing. Checksums are not verified."""
    found: dict[int, Path] = {}
    for entry in sorted(run.checkpoints.glob("*step_*"), reverse=True):  # `.step_N.old` after `step_N`
        match = _NAME.fullmatch(entry.name)
        if match and (step := int(match[1] or match[2])) not in found and _whole(entry, verify=False):
            found[step] = entry
    return sorted(found.items())


def latest_checkpoint(run: RunFolder) -> tuple[int, Path] | None:
    """The newest checkpoint that is complete and whose every file has its checksum, or None. Changes nothing."""
    for step, folder in reversed(checkpoints(run)):
        if _whole(folder, verify=True):
            return step, folder
    return None


def _seal(folder: Path) -> None:
    """fsync everything in `folder`, then the marker, then the folders."""
    contents: dict[str, list[int]] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            _sync_folder(path)
            continue
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        contents[path.relative_to(folder).as_posix()] = [path.stat().st_size, _checksum(path)]
    with open(folder / MARKER, "w", encoding="utf-8") as file:
        json.dump({"files": contents}, file)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(folder)


def _whole(folder: Path, *, verify: bool) -> bool:
    try:
        contents = json.loads((folder / MARKER).read_text(encoding="utf-8"))["files"]
        return all(
            (folder / name).stat().st_size == size and (not verify or _checksum(folder / name) == checksum)
            for name, (size, checksum) in contents.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False  # no marker, a torn marker, a file gone: not a checkpoint


def _checksum(path: Path) -> int:
    value = 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            value = zlib.crc32(chunk, value)
    return value


def _discard(folder: Path) -> None:
    """Out of sight first: a kill in the middle of the removal then leaves no part of a checkpoint."""
    trash = folder.parent / f".trash-{folder.name.strip('.')}"
    shutil.rmtree(trash, ignore_errors=True)
    folder.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def _clear_leftovers(folder: Path) -> None:
    """What killed processes left. A `.step_N.old` without its successor goes back to its place."""
    for entry in [*folder.glob(".step_*.tmp-*"), *folder.glob(".trash-*")]:
        shutil.rmtree(entry, ignore_errors=True)
    for entry in folder.glob(".step_*.old"):
        original = folder / entry.name.removeprefix(".").removesuffix(".old")
        if _whole(original, verify=False):
            _discard(entry)
            continue
        if original.exists():
            _discard(original)
        entry.rename(original)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
