from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from renma.errors import DataError, RecipeError
from renma.models.scratch import build_llama, llama_config, train_tokenizer
from renma.recipe import ScratchModel

CORPUS = [
    f"Question: {a} times {b}?\nCall: calc({a}*{b})\nResult: {a * b}\nAnswer: {a * b}\n"
    for a in range(20)
    for b in range(9)
]
TOKENIZER = train_tokenizer(CORPUS, 320)


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


@settings(max_examples=50, deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back(text: str) -> None:
    assert TOKENIZER.decode(ids_of(text)) == text


@settings(max_examples=50, deadline=None)
@given(st.text(alphabet="0123456789\n :calcRsut()+*"))
def test_digits_are_single_and_newlines_join_nothing(text: str) -> None:
    for i in ids_of(text):
        piece = TOKENIZER.decode([i])
        assert len(piece) == 1 or not any(c.isdigit() or c == "\n" for c in piece)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(alphabet="0123456789 :calcRsut()+*", max_size=8), min_size=1, max_size=5))
def test_lines_encoded_one_by_one_are_the_whole(lines: list[str]) -> None:
    whole = "".join(line + "\n" for line in lines)
    assert [i for line in lines for i in ids_of(line + "\n")] == ids_of(whole)


def test_words_of_the_corpus_are_merged() -> None:
    assert 256 + 3 < len(TOKENIZER) <= 320
    assert len(ids_of("Question")) == 1 and len(ids_of(" calc")) == 1


def test_the_same_texts_in_any_order_give_the_same_tokenizer() -> None:
    expected = TOKENIZER.backend_tokenizer.to_str()
    for seed in range(3):
        shuffled = random.Random(seed).sample(CORPUS, len(CORPUS))
        assert train_tokenizer(shuffled, 320).backend_tokenizer.to_str() == expected


def test_marks_are_there_and_not_added_unasked() -> None:
    assert (TOKENIZER.pad_token, TOKENIZER.bos_token, TOKENIZER.eos_token) == ("<pad>", "<bos>", "<eos>")
    assert len({TOKENIZER.pad_token_id, TOKENIZER.bos_token_id, TOKENIZER.eos_token_id}) == 3
    assert TOKENIZER.encode("a") == ids_of("a")


def test_a_vocabulary_too_small_for_bytes_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"model\.vocabulary 258.*at least 259"):
        train_tokenizer(CORPUS, 258)
    assert len(train_tokenizer(CORPUS, 259)) == 259


@pytest.mark.parametrize("texts", [[], [""]])
def test_no_text_is_refused(texts: list[str]) -> None:
    with pytest.raises(DataError, match="no text"):
        train_tokenizer(texts, 320)


SECTION = ScratchModel(layers=2, hidden=32, heads=4, feed_forward=48, context=64)


def test_the_config_is_the_sections() -> None:
    config = llama_config(SECTION, TOKENIZER, key_value_heads=2)
    model = build_llama(config, seed=1)
    assert isinstance(model, LlamaForCausalLM) and not model.training
    assert model.config._attn_implementation == "sdpa"
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert tuple(model.model.layers[0].self_attn.k_proj.weight.shape) == (16, 32)
    assert model.model.embed_tokens.weight.shape == (len(TOKENIZER), 32)
    assert config.max_position_embeddings == 64 and config.eos_token_id == TOKENIZER.eos_token_id


def test_first_logits_are_of_unit_size() -> None:
    model = build_llama(llama_config(SECTION.model_copy(update={"hidden": 64}), TOKENIZER), seed=0)
    with torch.no_grad():
        logits = model(torch.tensor([ids_of(CORPUS[0])])).logits
    assert 0.5 < logits.std() < 2


def test_only_the_weights_are_rounded_to_the_compute_type() -> None:
    config = llama_config(SECTION, TOKENIZER)
    exact, rounded = build_llama(config, seed=0), build_llama(config, seed=0, dtype=torch.bfloat16)
    assert torch.equal(rounded.model.norm.weight, exact.model.norm.weight.bfloat16())
    assert torch.equal(rounded.lm_head.weight, exact.lm_head.weight.bfloat16())
    assert rounded.lm_head.weight is rounded.model.embed_tokens.weight
    assert torch.equal(rounded.model.rotary_emb.inv_freq, exact.model.rotary_emb.inv_freq), "kept in float32"


def test_weights_depend_on_the_seed_only_and_the_generator_is_left_alone() -> None:
    config = llama_config(SECTION, TOKENIZER)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = build_llama(config, seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(7)
    again, other = build_llama(config, seed=3).state_dict(), build_llama(config, seed=4).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


@pytest.mark.parametrize(("hidden", "heads"), [(32, 5), (32, 32), (40, 16), (9, 3)])
def test_heads_that_do_not_fit_are_refused_with_a_size_that_does(hidden: int, heads: int) -> None:
    section = SECTION.model_copy(update={"hidden": hidden, "heads": heads})
    with pytest.raises(RecipeError, match=r"model\.heads .* does not fit model\.hidden") as caught:
        llama_config(section, TOKENIZER)
    proposed = int(str(caught.value).rpartition("=")[2])
    llama_config(section.model_copy(update={"hidden": proposed}), TOKENIZER)


def test_key_value_heads_must_divide_heads() -> None:
    with pytest.raises(RecipeError, match="divisor"):
        llama_config(SECTION, TOKENIZER, key_value_heads=3)
