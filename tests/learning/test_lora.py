"""LoRA: only the adapters are trained, saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from renma.errors import ModelError
from renma.learning.learner import Learner
from renma.learning.lora import apply_lora, load_adapter, save_adapter
from renma.learning.losses import sft
from renma.recipe import LearnerSection, LoraSettings
from tests.learning.tiny import make_model, random_rows


def make_learner(rank: int = 4, dropout: float = 0.0, **options: Any) -> Learner:
    torch.manual_seed(3)
    model = apply_lora(make_model("llama_tied"), LoraSettings(rank=rank, dropout=dropout))
    return Learner(model, LearnerSection(learning_rate=1e-2), **options)


def trained(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in learner.optimizer.parameters.items()}


def test_only_the_adapters_learn() -> None:
    learner = make_learner()
    plain = make_model("llama_tied")
    rows = random_rows(1)
    values = Learner(plain, LearnerSection()).logprobs(rows)
    for got, wanted in zip(learner.logprobs(rows), values, strict=True):
        assert got == pytest.approx(wanted, abs=1e-5)
    first = learner.update(rows, loss=sft())["loss"]
    for _ in range(10):
        last = learner.update(rows, loss=sft())["loss"]
    assert last < first - 0.2
    assert all("lora_" in name for name in learner.optimizer.parameters)
    base = dict(learner.model.named_parameters())
    for name, parameter in plain.named_parameters():
        found = next(p for n, p in base.items() if n.replace("base_layer.", "").endswith(f".{name}"))
        assert torch.equal(found, parameter)


def test_case_6_11_adapter_dropout_is_off() -> None:
    learner = make_learner(dropout=0.5)
    rows = random_rows(1)
    learner.update(rows, loss=sft())
    first, second = learner.logprobs(rows), learner.logprobs(rows)
    assert all((a == b).all() for a, b in zip(first, second, strict=True))


def test_case_7_6_training_goes_on_from_a_loaded_adapter(tmp_path: Path) -> None:
    rows = random_rows(1)
    learner = make_learner()
    learner.update(rows, loss=sft())
    save_adapter(learner.model, tmp_path)
    assert sorted(p.name for p in tmp_path.glob("*.safetensors")) == ["adapter_model.safetensors"]
    for dtype in (torch.float32, torch.bfloat16):
        other = make_learner(compute_dtype=dtype)
        load_adapter(other.model, tmp_path)
        other.refresh()
        loaded = trained(other)
        assert all(torch.equal(loaded[name], p.to(dtype)) for name, p in trained(learner).items())
        for group in other.optimizer.inner.param_groups:
            group["lr"] = 0.0
        other.settings = other.settings.model_copy(update={"learning_rate": 0.0})
        other.update(rows, loss=sft())
        assert all(torch.equal(loaded[name], p) for name, p in trained(other).items())


def test_an_adapter_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    learner = make_learner()
    with pytest.raises(ModelError, match=r"holds no adapter_model\.safetensors"):
        load_adapter(learner.model, tmp_path)
    save_adapter(make_learner(rank=2).model, tmp_path)
    with pytest.raises(ModelError, match="does not fit"):
        load_adapter(learner.model, tmp_path)


def test_targets_that_the_model_lacks_are_refused() -> None:
    with pytest.raises(ModelError, match=r"model\.lora\.targets"):
        apply_lora(make_model(), LoraSettings(targets=["nothing_like_this"]))


def test_a_model_without_anything_to_train_is_refused() -> None:
    model = make_model()
    model.requires_grad_(False)
    with pytest.raises(ModelError, match="no parameter"):
        Learner(model, LearnerSection())
