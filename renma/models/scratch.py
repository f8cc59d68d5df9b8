"""A small Llama and its tokenizer, made from nothing but the environment's own transcripts."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from renma.errors import DataError, RecipeError
from renma.recipe import ScratchModel

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")


def train_tokenizer(texts: Iterable[str], vocabulary: int, context: int | None = None) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most `vocabulary` tokens, learned from `texts`.

    Any text can be written: all 256 bytes are tokens. Each digit is a token of its own, so that numbers have one
    spelling; a newline joins no other character, so that a line ends at a token's end. The same texts give the same
    tokenizer, in whatever order they come.

    Raises RecipeError when the vocabulary cannot hold the bytes, DataError when there is no text.
    """
    least = 256 + len(SPECIAL_TOKENS)
    if vocabulary < least:
        raise RecipeError(
            f"model.vocabulary {vocabulary} cannot hold 256 bytes and {len(SPECIAL_TOKENS)} marks: set at least {least}"
        )
    corpus = [text for text in texts if text]
    if not corpus:
        raise DataError(
            "there is no text to train the tokenizer on: the tasks gave no transcripts; check tasks and cold_start"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("\n"), behavior="isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    pad, bos, eos = SPECIAL_TOKENS
    limit = {} if context is None else {"model_max_length": context}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        clean_up_tokenization_spaces=False,
        **limit,
    )


def llama_config(
    section: ScratchModel, tokenizer: PreTrainedTokenizerFast, key_value_heads: int | None = None
) -> LlamaConfig:
    """The Llama that the recipe's section describes, over this tokenizer's vocabulary; grouped-query attention when
    `key_value_heads` is below `section.heads`.

    Weights start at 1/√hidden, which with tied embeddings and a normalised last state makes the first logits of unit
    size; the usual 0.02, meant for a hidden size of some 2500, learned markedly slower here. The rotary base is the
    usual 10,000: one fitted to short contexts (1024 for 256 positions) was no better over three seeds.

    Raises RecipeError when the heads do not divide the hidden size.
    """
    key_value_heads = key_value_heads or section.heads
    if section.hidden % section.heads or (section.hidden // section.heads) % 2:
        raise RecipeError(
            f"model.heads {section.heads} does not fit model.hidden {section.hidden}: hidden / heads must be a "
            f"whole even number; try model.hidden={_near_hidden(section.hidden, section.heads)}"
        )
    if section.heads % key_value_heads:
        raise RecipeError(
            f"{key_value_heads} key-value heads do not divide model.heads {section.heads}: use a divisor of it"
        )
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=section.hidden,
        intermediate_size=section.feed_forward,
        num_hidden_layers=section.layers,
        num_attention_heads=section.heads,
        num_key_value_heads=key_value_heads,
        max_position_embeddings=section.context,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        initializer_range=section.hidden**-0.5,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _near_hidden(hidden: int, heads: int) -> int:
    return max(1, round(hidden / (2 * heads))) * 2 * heads


def build_llama(config: LlamaConfig, seed: int, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """A model on the CPU, in evaluation mode, whose weights depend on `config` and `seed` only, rounded to `dtype`.

    The global random generator is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    for parameter in model.parameters():
        # Not model.to(dtype): that would round the rotary frequencies too, which transformers keeps in float32.
        parameter.data = parameter.data.to(dtype)
    return model.eval()
