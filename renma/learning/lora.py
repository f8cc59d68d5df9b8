"""LoRA through peft: small adapters are trained, the model's own weights stay as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.utils.save_and_load import load_peft_weights

from renma.errors import ModelError
from renma.recipe import LoraSettings


def apply_lora(model: Any, settings: LoraSettings) -> Any:
    """The model with fresh adapters, as a peft model; only they require a gradient. Its output is at first unchanged.

    Raises ModelError when `settings.targets` names no layer of the model.
    """
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # peft computes alpha / rank: any number will do
        lora_dropout=settings.dropout,
        target_modules=settings.targets,
        task_type="CAUSAL_LM",
    )
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"model.lora.targets {settings.targets!r} cannot be adapted: {reason}") from error


def save_adapter(model: Any, folder: Path) -> None:
    """Write the adapters alone (safetensors and their configuration)."""
    model.save_pretrained(folder)


def load_adapter(model: Any, folder: Path) -> None:
    """Load adapters written by `save_adapter` into a model with adapters of the same form; training goes on from them.

    A learner made before must be told: `learner.refresh()`. Raises ModelError when they are missing or of another form.
    """
    if not (folder / "adapter_model.safetensors").is_file():
        raise ModelError(f"{folder} holds no adapter_model.safetensors; give the folder that save_adapter wrote")
    loaded = load_peft_weights(str(folder), device="cpu")
    # Adapters that the model lacks would be left out without a word.
    own = {name: tuple(value.shape) for name, value in get_peft_model_state_dict(model).items()}
    saved = {name: tuple(value.shape) for name, value in loaded.items()}
    if own != saved:
        name = next(iter(sorted(name for name in own.keys() | saved.keys() if own.get(name) != saved.get(name))))
        raise ModelError(
            f"the adapter in {folder} does not fit: {name!r} is {saved.get(name, 'absent')} there and "
            f"{own.get(name, 'absent')} here; use the rank and targets it was made with"
        )
    set_peft_model_state_dict(model, loaded)
