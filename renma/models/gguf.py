"""GGUF weights become a safetensors folder, once: reading GGUF takes half a minute, safetensors a second."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from renma.errors import ModelError
from renma.models.folders import cached_model, one_line
from renma.models.known import KnownModel

FORMAT = 1
"""Raised when the conversion itself changes, so that folders made by an older one are not used."""


def packaged_folder(name: str, known: KnownModel, cache: Path | None = None) -> Path:
    """The safetensors folder of a model that is installed as a Python package, converted on first use.

    The key holds the checksum of the weights: another version of the package gets a folder of its own.

    Raises ModelError when the package cannot be read or the cache cannot be written.
    """
    assert known.package is not None
    package = importlib.import_module(known.package)

    def convert(folder: Path) -> None:
        source = folder / "weights.gguf"
        try:
            package.assemble(source)
        except (FileNotFoundError, ValueError) as error:  # a part is missing, or the checksum is wrong
            raise ModelError(
                f"the package {known.package} is damaged ({one_line(error)}): reinstall it with pip --force-reinstall"
            ) from error
        try:
            convert_gguf(source, folder)
        except ImportError as error:  # transformers reads GGUF through a package of its own
            raise ModelError(f"reading {name} needs the gguf package: pip install gguf") from error
        source.unlink()

    return cached_model(f"{name}-{package.EXPECTED_SHA256[:12]}-{FORMAT}", convert, cache)


def convert_gguf(source: Path, folder: Path) -> None:
    """Write the model and tokenizer of a GGUF file into `folder` as a Hugging Face folder with float32 safetensors.

    float32, because the weights that 4 bits and a scale expand to are not exact in bfloat16.
    """
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    loaded = AutoModelForCausalLM.from_pretrained(str(source.parent), gguf_file=source.name, dtype=torch.float32)
    assert isinstance(tokenizer, PreTrainedTokenizerFast), "a tokenizer read from GGUF is always a fast one"
    unquantised(loaded).save_pretrained(folder)
    plain_tokenizer(tokenizer).save_pretrained(folder)


def plain_tokenizer(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The same tokenizer in the class that just reads tokenizer.json.

    The model's own class builds its pipeline anew from Python lists each time: seconds, with 262,144 tokens.
    """
    marks = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, **marks)


def unquantised(loaded: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a model that no longer remembers its GGUF file, which `save_pretrained` would refuse.

    The fresh model is built without storage and takes over the loaded tensors: no second copy in memory.
    """
    config = copy.deepcopy(loaded.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        fresh = type(loaded)(config)
    fresh.load_state_dict(loaded.state_dict(), assign=True)
    fresh.tie_weights()
    fresh.generation_config = loaded.generation_config
    return fresh
