from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from tests.inference.tiny_models import byte_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()
