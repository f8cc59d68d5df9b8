"""The tokens a policy can emit, where a recipe keeps it to the text of its tasks (`model.output_tokens: tasks`).

Sampler and learner both normalise over this set: it is the policy's own vocabulary, not an approximation of a larger
one. With a vocabulary of 262,144 the output layer otherwise costs more than the rest of a small model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from transformers import PreTrainedTokenizerFast

_ASCII = [chr(code) for code in range(32, 127)] + ["\n"]
_BYTE_LEVEL = {" ": "Ġ", "\n": "Ċ"}
_DIGITS = re.compile(r"[▁Ġ ]?[0-9]+")


def output_tokens(tokenizer: PreTrainedTokenizerFast, texts: Iterable[str]) -> torch.Tensor:
    """The sorted int64 ids [V'] that occur in `texts`, and those needed to write any printable ASCII line.

    Each text is tokenised whole, by line, and from what follows a colon on: a policy writes after a prompt that ends
    there, and may split its first word otherwise than the whole text does. To these come the single-character tokens
    of printable ASCII, every token of digits alone, newline and end of sequence.
    """
    ids = always_writable(tokenizer)
    pieces = sorted({piece for text in set(texts) for piece in _pieces(text)})
    if pieces:
        for encoded in tokenizer(pieces, add_special_tokens=False)["input_ids"]:
            ids.update(encoded)
    return torch.tensor(sorted(ids), dtype=torch.int64)


def _pieces(text: str) -> Iterable[str]:
    yield text
    for line in text.splitlines(keepends=True):
        for piece in (line, line[line.find(":") + 1 :]):
            for part in (piece, piece.lstrip(" "), piece.rstrip("\n"), piece.strip(" \n")):
                if part:
                    yield part


def always_writable(tokenizer: PreTrainedTokenizerFast) -> set[int]:
    """Ids of single printable ASCII characters, newline, digits and end of sequence."""
    vocabulary = tokenizer.get_vocab()
    ids = {index for token, index in vocabulary.items() if _DIGITS.fullmatch(token)}
    for character in _ASCII:
        # How tokenizers spell a lone character: itself, byte-level, SentencePiece's space, a byte fallback.
        spellings = {character, _BYTE_LEVEL.get(character, character), f"<0x{ord(character):02X}>"}
        if character == " ":
            spellings.add("▁")
        ids.update(vocabulary[s] for s in spellings if s in vocabulary)
        ids.update(tokenizer.encode(character, add_special_tokens=False))
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    if tokenizer.unk_token_id is not None:
        ids.discard(tokenizer.unk_token_id)
    return ids
