"""The short ways of encoding and decoding give what the tokenizer gives."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from renma.agents.renderers.encoding import TextEncoder, decode

same_tokenizer = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
ids = st.lists(st.integers(0, 404), max_size=20)


@same_tokenizer
@given(ids)
def test_decoding_is_the_tokenizers_with_nothing_tidied(tokenizer, ids):
    expected = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert decode(tokenizer, ids) == decode(tokenizer, np.array(ids, np.int32)) == expected


def test_a_tokenizer_with_a_way_of_its_own_is_asked(tokenizer):
    class Own(PreTrainedTokenizerFast):
        def _decode(self, *args, **kwargs):
            return "<" + super()._decode(*args, **kwargs) + ">"

    own = Own(tokenizer_object=tokenizer.backend_tokenizer)
    assert decode(own, [300]) == f"<{decode(tokenizer, [300])}>"


@same_tokenizer
@given(st.lists(st.tuples(st.text("a b\n<>|s", max_size=6), st.booleans()), max_size=8))
def test_what_is_remembered_is_what_would_be_encoded(tokenizer, texts):
    encoder = TextEncoder(tokenizer)
    for text, first in [*texts, *texts]:
        found = encoder.text(text, first=first)
        assert found == TextEncoder(tokenizer).text(text, first=first)
        found.append(0)  # the caller's own list


def test_long_texts_are_not_remembered(tokenizer, monkeypatch):
    encoder, calls = TextEncoder(tokenizer), []
    real = type(tokenizer).encode

    def counting(self, text, **options):
        calls.append(len(text))
        return real(self, text, **options)

    monkeypatch.setattr(type(tokenizer), "encode", counting)
    for text in ("short", "long " * 4000):
        for _ in range(3):
            encoder.text(text, first=True)
    assert calls == [5, 20000, 20000, 20000]
