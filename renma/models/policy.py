"""A policy: the model that is trained, its tokenizer, and the tokens it can emit."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from renma.errors import ModelError
from renma.models.devices import pick_device, pick_dtype
from renma.models.folders import SIDECAR, read_json, written_aside
from renma.models.output_tokens import output_tokens
from renma.models.pretrained import embedding_rows, no_progress_bars, open_pretrained
from renma.models.scratch import build_llama, llama_config, train_tokenizer
from renma.recipe import PretrainedModel, ScratchModel
from renma.seeding import seed_for

_FORMAT = 1
ALIGNMENT = 64  # bytes, of memory that torch allocates itself


@dataclass(slots=True)
class Policy:
    """A model with its tokenizer, on `device` in `compute_dtype`.

    `output_ids`: the sorted int64 ids [V'] that the policy can emit, on `device`; None for all. Engine and learner
    compute logits for these rows of the output embedding only, and normalise over them. `source`: where the weights
    came from, for people to read.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    output_ids: torch.Tensor | None
    device: torch.device
    compute_dtype: torch.dtype
    source: str

    @property
    def parameters(self) -> int:
        """Number of parameters, tied ones counted once."""
        return sum(p.numel() for p in self.model.parameters())

    @property
    def description(self) -> str:
        """One line: source, kind, size, type, device, and how many tokens it can emit."""
        rows = self.model.config.get_text_config().vocab_size
        emits = "all" if self.output_ids is None else f"{len(self.output_ids):,} of"
        return (
            f"{self.source}: {self.model.config.model_type}, {self.parameters / 1e6:.1f} M parameters, "
            f"{str(self.compute_dtype).removeprefix('torch.')} on {self.device}, emits {emits} {rows:,} tokens"
        )


def load_policy(
    section: PretrainedModel | ScratchModel,
    *,
    texts: Callable[[], list[str]] = list,
    cache: Path | None = None,
    seed: int = 0,
) -> Policy:
    """The policy that a recipe's `model` section describes. LoRA is not applied here.

    `texts` is called where text is needed: to train a scratch model's tokenizer, and for `output_tokens: tasks`.
    `cache`: the folder for converted models instead of $RENMA_CACHE or ~/.cache/renma. `seed` decides a scratch
    model's first weights and nothing else.

    The token set that a saved policy carries is part of it: it is kept, and `output_tokens: tasks` adds to it.

    Raises ModelError (it cannot be found, read or used here), RecipeError (sizes that do not fit), DataError (no text).
    """
    device = pick_device(section.device)
    dtype = pick_dtype(section.dtype, device)
    stored: torch.Tensor | None = None
    corpus: list[str] | None = None
    if isinstance(section, ScratchModel):
        corpus = texts()
        tokenizer = train_tokenizer(corpus, section.vocabulary, section.context)
        model: PreTrainedModel = build_llama(llama_config(section, tokenizer), seed_for("model", seed), dtype)
        model = model.to(device)  # type: ignore[arg-type]
        source = "from scratch"
    else:
        model, tokenizer, folder = open_pretrained(
            section.source, section.revision, dtype=dtype, device=device, cache=cache
        )
        for weights in model.parameters():
            # Weights lie in a file at any offset, and a product of one row rounds by the alignment of its memory: a
            # resumed run would sample with other last bits than the uninterrupted one.
            if weights.data_ptr() % ALIGNMENT:
                weights.data = weights.data.clone()
        stored = _read_output_ids(folder, rows=embedding_rows(model))
        source = section.source
    ids = stored
    if section.output_tokens == "tasks":
        found = output_tokens(tokenizer, texts() if corpus is None else corpus)
        ids = torch.cat([found, *_stop_ids(model), *([] if stored is None else [stored])]).unique()
    return Policy(model, tokenizer, None if ids is None else ids.to(device), device, dtype, source)


def _stop_ids(model: PreTrainedModel) -> list[torch.Tensor]:
    """The ids the model's own generation settings stop at (a chat model's end of turn): it must be able to stop."""
    settings = getattr(model, "generation_config", None)
    stop = None if settings is None else settings.eos_token_id
    return [] if stop is None else [torch.tensor([stop] if isinstance(stop, int) else stop, dtype=torch.int64)]


def save_policy(policy: Policy, folder: Path) -> None:
    """Write a complete Hugging Face folder: config, safetensors, tokenizer, and renma.json with the token set.

    transformers opens it, and so does `load_policy(PretrainedModel(source=folder))`, with the same logits bit for
    bit in the same dtype. It is written aside and renamed; a model that was saved under this name is replaced. LoRA
    weights are merged into a copy: the policy itself goes on unmerged.

    Raises RunError when the folder cannot be written or is something else than a saved model.
    """
    model = merged_copy(policy.model)
    ids = policy.output_ids
    record = {"format": _FORMAT, "source": policy.source, "output_ids": None if ids is None else ids.tolist()}
    with written_aside(Path(folder)) as aside, no_progress_bars():
        model.save_pretrained(aside)
        policy.tokenizer.save_pretrained(aside)
        (aside / SIDECAR).write_text(json.dumps(record) + "\n", encoding="utf-8")


def merged_copy(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """The plain model: itself when it carries no adapters, else a copy with each adapter merged into its layer.

    Works for a PeftModel and for adapters injected into a model in place.

    Raises ModelError when merging would give non-finite weights.
    """
    plain: PreTrainedModel = model.get_base_model() if isinstance(model, PeftModel) else model  # type: ignore[assignment]
    if not any(isinstance(module, BaseTunerLayer) for module in plain.modules()):
        return plain
    plain = copy.deepcopy(plain)
    adapted = [(name, module) for name, module in plain.named_modules() if isinstance(module, BaseTunerLayer)]
    for name, module in adapted:
        try:
            module.merge(safe_merge=True)
        except ValueError as error:
            raise ModelError(
                f"the adapter of {name} holds NaN or infinity: lower the learning rate, or go back to a checkpoint"
            ) from error
        parent, _, child = name.rpartition(".")
        setattr(plain.get_submodule(parent), child, module.get_base_layer())
    plain._hf_peft_config_loaded = False  # else save_pretrained would look for the adapter and save only that
    return plain


def _read_output_ids(folder: Path, rows: int) -> torch.Tensor | None:
    file = folder / SIDECAR
    if not file.is_file():
        return None
    fix = "delete the file to let the policy emit all tokens, or save the model again"
    ids = read_json(file, fix).get("output_ids")
    if ids is None:
        return None
    if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < rows for i in ids):
        raise ModelError(f"{file} holds no list of token ids below {rows} as output_ids: {fix}")
    return torch.tensor(ids, dtype=torch.int64).unique()
