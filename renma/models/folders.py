"""Model folders on disk: written aside and renamed, converted once, and checked before anything reads them."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock
from safetensors import SafetensorError, safe_open

from renma.errors import ModelError, RunError

SIDECAR = "renma.json"
"""Renma's own file in a model folder: the tokens the policy can emit, and where the weights came from."""

_TOKENIZER_FILES = (
    ("tokenizer.json",),
    ("tokenizer.model",),
    ("spiece.model",),
    ("vocab.json", "merges.txt"),
    ("vocab.txt",),
)


def cache_root(cache: Path | None = None) -> Path:
    """The folder for converted models: the one given, else $RENMA_CACHE, else ~/.cache/renma."""
    if cache is not None:
        return cache
    named = os.environ.get("RENMA_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "renma"


def cached_model(key: str, convert: Callable[[Path], None], cache: Path | None = None) -> Path:
    """The folder `models/<key>` of the cache, made by `convert(empty_folder)` if it is not there yet.

    `convert` writes aside and the finished folder is renamed, so a killed process leaves no half-made model; a lock
    makes a second process wait for the first instead of converting too.
    """
    models = cache_root(cache) / "models"
    final = models / key
    if final.is_dir():
        return final
    try:
        models.mkdir(parents=True, exist_ok=True)
        with FileLock(models / f".{key}.lock"):
            if final.is_dir():
                return final
            for left_over in models.glob(f".{key}.making-*"):  # of a process killed at work: we hold its lock now
                shutil.rmtree(left_over)
            making = _beside(final, "making")
            making.mkdir()
            try:
                convert(making)
                try:
                    making.rename(final)
                except OSError:
                    if not final.is_dir():
                        raise
                    # A file system without locks let another process finish first: its folder is as good.
            finally:
                if making.is_dir():
                    shutil.rmtree(making)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"cannot write the converted model to {final} ({one_line(error)}): free space or set RENMA_CACHE to "
            f"another folder"
        ) from error
    return final


@contextmanager
def written_aside(folder: Path) -> Iterator[Path]:
    """A new empty folder next to `folder` that takes its name when the block ends well, and is removed when it fails.

    A `folder` that is there already is replaced if it is empty or a model that Renma saved.

    Raises RunError when it is something else, or when it cannot be written.
    """
    if folder.exists() and not (folder / SIDECAR).is_file() and not (folder.is_dir() and not any(folder.iterdir())):
        raise RunError(f"{folder} is there and is no model that renma saved: name another folder to save to")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = _beside(folder, "making")
        aside.mkdir()
        try:
            yield aside
            if folder.exists():
                old = _beside(folder, "old")
                folder.rename(old)
                aside.rename(folder)
                shutil.rmtree(old)
            else:
                aside.rename(folder)
        finally:
            if aside.is_dir():
                shutil.rmtree(aside)
    except (OSError, SafetensorError) as error:
        raise RunError(f"cannot save the model to {folder}: {one_line(error)}; free space or name another") from error


def _beside(folder: Path, purpose: str) -> Path:
    """A hidden name of this process's own, on the same file system, so that a rename is atomic."""
    return folder.parent / f".{folder.name}.{purpose}-{os.getpid()}-{secrets.token_hex(4)}"


def one_line(error: BaseException, limit: int = 200) -> str:
    """The error's message on one line, cut at `limit` characters; its kind when it has no message."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"


def check_model_folder(folder: Path) -> None:
    """Look at the files of a model folder before anything loads them.

    Raises ModelError, naming the folder and the fix, for: no such folder, no or unreadable config.json, no tokenizer,
    no safetensors weights, a missing shard, a damaged weights file.
    """
    if not folder.exists():
        raise ModelError(f"model folder {folder} does not exist: check the path in model.source")
    if not folder.is_dir():
        raise ModelError(f"model.source {folder} is a file: give the folder that holds config.json and the weights")
    read_json(folder / "config.json", "copy it from where the model came, or save it with save_pretrained")
    if not any(all((folder / name).is_file() for name in names) for names in _TOKENIZER_FILES):
        raise ModelError(
            f"model folder {folder} has no tokenizer (tokenizer.json): copy the base model's tokenizer files into it, "
            f"or run tokenizer.save_pretrained({str(folder)!r})"
        )
    for weights in _weight_files(folder):
        _check_weights(weights)


def read_json(file: Path, fix: str) -> dict[str, object]:
    """The JSON object in `file`. Raises ModelError, ending in `fix`, when it is missing or no JSON object."""
    if not file.is_file():
        raise ModelError(f"model folder {file.parent} has no {file.name}: {fix}")
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read ({one_line(error)}): {fix}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} holds no JSON object: {fix}")
    return value


def _weight_files(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        other = next((f.name for pattern in ("*.bin", "*.pt", "*.pth") for f in folder.glob(pattern)), None)
        what = f"only {other}, which is a pickle and can run code" if other else "no model.safetensors"
        raise ModelError(f"model folder {folder} has {what}: save the weights with save_pretrained, as safetensors")
    weight_map = read_json(index, "copy it again from where the model came").get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(f"{index} has no weight_map: copy it again from where the model came")
    shards = [folder / Path(name).name for name in sorted(set(weight_map.values()))]
    for shard in shards:
        if not shard.is_file():
            raise ModelError(f"model folder {folder} lacks {shard.name}: copy that file too ({len(shards)} in all)")
    return shards


def _check_weights(file: Path) -> None:
    """The header is read and held against the file's size: cheap, and it finds a cut-off or overwritten file."""
    try:
        with safe_open(file, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"weights file {file} is damaged ({one_line(error)}): delete it and copy, download or convert it again"
        ) from error
