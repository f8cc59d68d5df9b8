from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from renma.errors import ModelError, RunError
from renma.models.folders import SIDECAR
from renma.models.policy import Policy, load_policy, merged_copy, save_policy
from renma.recipe import PretrainedModel, ScratchModel

IDS = torch.tensor([[5, 40, 99, 270, 7, 7, 12]])
TEXT = "Question: 12 plus 70?\nCall: calc(12+70)\n\n  é"


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def reopened(folder: Path, **options: str) -> Policy:
    return load_policy(PretrainedModel(source=str(folder), device="cpu", **{"dtype": "float32", **options}))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_and_opened_again_the_logits_are_equal_bit_for_bit(make_policy, tmp_path: Path, dtype: str) -> None:
    policy = make_policy(dtype=dtype)
    save_policy(policy, tmp_path / "m")
    again = reopened(tmp_path / "m", dtype=dtype)
    assert torch.equal(logits(again.model), logits(policy.model))
    assert again.tokenizer.encode(TEXT) == policy.tokenizer.encode(TEXT)
    assert again.output_ids is None
    assert again.compute_dtype is policy.compute_dtype is getattr(torch, dtype)
    assert again.device == torch.device("cpu")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["m"], "nothing is left beside it"


def test_transformers_opens_the_folder_with_the_same_ids_and_logits(make_policy, tmp_path: Path) -> None:
    policy = make_policy()
    save_policy(policy, tmp_path / "m")
    model = AutoModelForCausalLM.from_pretrained(str(tmp_path / "m"))
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path / "m"))
    assert torch.equal(logits(model), logits(policy.model))
    assert tokenizer.encode(TEXT) == policy.tokenizer.encode(TEXT)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (
        policy.tokenizer.bos_token_id,
        policy.tokenizer.eos_token_id,
        policy.tokenizer.pad_token_id,
    )


def test_saving_again_replaces_the_model_and_spares_other_folders(make_policy, tmp_path: Path) -> None:
    first, second = make_policy(seed=1), make_policy(seed=2)
    save_policy(first, tmp_path / "m")
    save_policy(second, tmp_path / "m")
    assert torch.equal(logits(reopened(tmp_path / "m").model), logits(second.model))
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    with pytest.raises(RunError, match="no model that renma saved"):
        save_policy(first, tmp_path / "notes")


def test_a_place_that_cannot_be_written_is_one_line(make_policy, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot save the model") as caught:
        save_policy(make_policy(), tmp_path / "file" / "m")
    assert "\n" not in str(caught.value)


def test_two_loads_of_one_seed_are_equal_and_of_two_are_not(make_policy) -> None:
    assert torch.equal(logits(make_policy(seed=7).model), logits(make_policy(seed=7).model))
    assert not torch.equal(logits(make_policy(seed=7).model), logits(make_policy(seed=8).model))


def test_texts_are_asked_for_only_where_needed(make_policy, tmp_path: Path, tiny: ScratchModel, texts) -> None:
    calls: list[int] = []

    def source() -> list[str]:
        calls.append(1)
        return texts

    load_policy(tiny.model_copy(update={"output_tokens": "tasks"}), texts=source)
    assert len(calls) == 1, "once for both uses"
    save_policy(make_policy(), tmp_path / "m")
    load_policy(PretrainedModel(source=str(tmp_path / "m"), device="cpu"), texts=source)
    assert len(calls) == 1, "never for a ready model that emits all"
    load_policy(PretrainedModel(source=str(tmp_path / "m"), device="cpu", output_tokens="tasks"), texts=source)
    assert len(calls) == 2


def test_the_token_set_is_saved_with_the_policy_and_tasks_adds_to_it(make_policy, tmp_path: Path) -> None:
    policy = make_policy(output_tokens="tasks")
    assert policy.output_ids is not None and policy.output_ids.dtype == torch.int64
    assert set(policy.tokenizer.encode("Call: calc(3+4)\n")) <= set(policy.output_ids.tolist())
    assert policy.tokenizer.eos_token_id in policy.output_ids.tolist()
    save_policy(policy, tmp_path / "m")
    kept = reopened(tmp_path / "m").output_ids
    assert kept is not None and torch.equal(kept, policy.output_ids)

    new = "é日"
    section = PretrainedModel(source=str(tmp_path / "m"), device="cpu", output_tokens="tasks")
    assert not set(policy.tokenizer.encode(new)) <= set(policy.output_ids.tolist())
    wider = load_policy(section, texts=lambda: [new]).output_ids
    assert wider is not None
    assert set(wider.tolist()) == set(policy.output_ids.tolist()) | set(policy.tokenizer.encode(new))
    assert torch.equal(wider, wider.unique(sorted=True))


def test_the_models_own_stop_tokens_stay_possible(make_policy, tmp_path: Path) -> None:
    policy = make_policy()
    rare = policy.tokenizer.convert_tokens_to_ids("ł")  # the byte 0xA3, in no text
    save_policy(policy, tmp_path / "m")
    file = tmp_path / "m" / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": [policy.tokenizer.eos_token_id, rare]}))
    section = PretrainedModel(source=str(tmp_path / "m"), device="cpu", output_tokens="tasks")
    ids = load_policy(section, texts=lambda: ["a"]).output_ids
    assert ids is not None and rare in ids.tolist()


@pytest.mark.parametrize(
    "content", ['{"output_ids": []}', '{"output_ids": [1, 999999]}', '{"output_ids": ["a"]}', "{", "[1]"]
)
def test_a_damaged_token_set_is_refused_with_the_fix(make_policy, tmp_path: Path, content: str) -> None:
    save_policy(make_policy(), tmp_path / "m")
    (tmp_path / "m" / SIDECAR).write_text(content)
    with pytest.raises(ModelError, match=r"renma\.json .*save the model again"):
        reopened(tmp_path / "m")


LORA = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")


@pytest.mark.parametrize("wrap", [get_peft_model, lambda model, config: inject_adapter_in_model(config, model)])
def test_adapters_are_saved_merged_and_the_policy_goes_on_unmerged(make_policy, tmp_path: Path, wrap: Callable) -> None:
    policy = make_policy(output_tokens="tasks")
    plain = logits(policy.model)
    policy.model = wrap(policy.model, LORA).eval()
    before = {name: value.clone() for name, value in policy.model.state_dict().items()}
    adapted = logits(policy.model)
    save_policy(policy, tmp_path / "m")
    again = reopened(tmp_path / "m")
    torch.testing.assert_close(logits(again.model), adapted)
    assert not torch.allclose(adapted, plain, atol=1e-3)
    after = policy.model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert not list((tmp_path / "m").glob("adapter*"))
    assert torch.equal(again.output_ids, policy.output_ids)
    assert "280 tokens" in policy.description


def test_a_model_without_adapters_is_not_copied(make_policy) -> None:
    model = make_policy().model
    assert merged_copy(model) is model


def test_a_broken_adapter_is_not_saved(make_policy, tmp_path: Path) -> None:
    policy = make_policy()
    policy.model = get_peft_model(policy.model, LORA)
    with torch.no_grad():
        next(p for name, p in policy.model.named_parameters() if "lora_B" in name).fill_(float("nan"))
    with pytest.raises(ModelError, match="NaN"):
        save_policy(policy, tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_the_description_tells_size_type_and_tokens(make_policy) -> None:
    policy = make_policy(output_tokens="tasks")
    expected = 280 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 48 + 2 * 32) + 32
    assert policy.parameters == expected
    assert policy.description == (
        f"from scratch: llama, {expected / 1e6:.1f} M parameters, float32 on cpu, "
        f"emits {len(policy.output_ids)} of 280 tokens"
    )
