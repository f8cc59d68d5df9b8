from __future__ import annotations

import string

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from renma.models.output_tokens import output_tokens
from renma.models.scratch import train_tokenizer

PRINTABLE = [chr(code) for code in range(32, 127)] + ["\n"]
BYTE_LEVEL = train_tokenizer(["the cat sat: on the mat 12\n", "Call: calc(1+2)\n", "Zebra zebra zebra"] * 5, 300)


def sentencepiece_style() -> PreTrainedTokenizerFast:
    """As Gemma and Llama 2 spell things: ▁ for a space, bytes as <0x..>, some numbers of several digits."""
    tokens = ["<unk>", "<eos>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "\n", *string.ascii_letters, *string.digits]
    tokens += ["12", "▁1", "▁c", "ca", "▁ca", "▁cat", "at", "t", "\n\n"]
    merges = [("1", "2"), ("▁", "1"), ("▁", "c"), ("▁c", "a"), ("a", "t"), ("▁ca", "t"), ("\n", "\n")]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>")


SENTENCEPIECE = sentencepiece_style()
ids_only = {"add_special_tokens": False}


def test_sorted_unique_and_int64() -> None:
    ids = output_tokens(BYTE_LEVEL, ["Call: calc(1+2)\n"] * 3)
    assert ids.dtype == torch.int64 and ids.dim() == 1
    assert torch.equal(ids, ids.unique(sorted=True))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.text(alphabet=st.sampled_from(PRINTABLE + list("é日")), max_size=20), max_size=4))
def test_every_id_of_every_text_line_and_answer_is_in(texts: list[str]) -> None:
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE):
        ids = set(output_tokens(tokenizer, texts).tolist())
        for text in texts:
            assert ids.issuperset(tokenizer.encode(text, **ids_only))
            for line in text.splitlines(keepends=True):
                after = line.partition(": ")[2] if ":" not in line.partition(": ")[0] else line
                for piece in (line, line.rstrip("\n"), after):
                    assert ids.issuperset(tokenizer.encode(piece, **ids_only))


@settings(max_examples=25, deadline=None)
@given(st.text(alphabet=st.sampled_from(PRINTABLE), max_size=30))
def test_any_printable_ascii_can_be_written_without_any_text_given(text: str) -> None:
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE):
        allowed = set(output_tokens(tokenizer, []).tolist())
        spelt = [i for character in text for i in tokenizer.encode(character, **ids_only)]
        assert allowed.issuperset(spelt)
        assert tokenizer.decode(spelt) == text


def test_digit_tokens_and_end_of_sequence_are_in_and_unknown_is_not() -> None:
    allowed = set(output_tokens(SENTENCEPIECE, []).tolist())
    assert allowed.issuperset(SENTENCEPIECE.convert_tokens_to_ids(["12", "▁1", "7", "\n", "▁", "<eos>"]))
    assert SENTENCEPIECE.unk_token_id not in allowed


def test_words_that_do_not_occur_are_out() -> None:
    zebra = BYTE_LEVEL.encode("zebra zebra", **ids_only)[-1]
    assert zebra not in output_tokens(BYTE_LEVEL, ["Call: calc(1+2)\n"]).tolist()
    assert zebra in output_tokens(BYTE_LEVEL, ["a zebra"]).tolist()


def test_what_a_policy_writes_after_a_prompt_that_ends_at_a_colon_is_in() -> None:
    cat_alone, cat_spaced = SENTENCEPIECE.encode("at", **ids_only), SENTENCEPIECE.encode(" cat", **ids_only)
    assert len(cat_alone) == len(cat_spaced) == 1
    assert set(cat_alone) <= set(output_tokens(SENTENCEPIECE, ["x: at\n"]).tolist())
    assert set(cat_spaced) <= set(output_tokens(SENTENCEPIECE, ["x: cat\n"]).tolist())
