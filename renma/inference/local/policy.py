"""Running the policy over slots: explicit positions, explicit masks, logits only where a token is to be sampled."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from renma.errors import ModelError
from renma.inference.local.cache import Placement, SlotCache, index
from renma.inference.local.decoder import WORTH_SPLITTING, Decoder
from renma.inference.local.head import OutputHead
from renma.inference.local.int8 import Int8Weights
from renma.learning.attention_sink import SINKS
from renma.models.experts import Routers
from renma.profiling import timed

FULL, SLIDING = "full_attention", "sliding_attention"
PROBE = WORTH_SPLITTING + 8  # positions on which a decoder is compared with the model


class SlotPolicy:
    """A causal LM and the keys and values of its slots. The module is the learner's own: nothing of it is copied.

    record_routing: keep the experts that a mixture-of-experts model chooses at each position; a dense one chooses none.
    int8: sample with 8-bit copies of its linear layers (int8.py).

    Raises ModelError for a model whose attention it cannot drive: recurrent layers, chunked attention, an attention
    implementation that takes no explicit mask, position embeddings that take no explicit positions; or one whose
    experts are to be recorded and whose routers are unknown.
    """

    def __init__(
        self,
        model: nn.Module,
        slots: int,
        context: int,
        output_ids: Tensor | None,
        record_routing: bool = False,
        int8: bool = False,
    ) -> None:
        self.outer = model
        self.model = causal_lm(model)
        self.base: nn.Module = self.model.base_model
        self.device: torch.device = self.model.device
        self.dtype: torch.dtype = self.model.dtype
        config = self.model.config.get_text_config()
        name = type(self.model).__name__
        if config._attn_implementation not in ("sdpa", "eager", SINKS):
            raise ModelError(
                f"model {name} uses attention {config._attn_implementation!r}, which takes no explicit mask: "
                "load it with attn_implementation='sdpa' or 'eager'"
            )
        types, options = get_layer_types_and_kwargs(config)
        unknown = set(types) - {FULL, SLIDING}
        if unknown:
            raise ModelError(
                f"model {name} has layers of type {', '.join(sorted(unknown))}, which the local engine cannot cache: "
                "use a model with full or sliding-window attention, or another engine"
            )
        windows = {option["sliding_window"] for option in options if option.get("sliding_window")}
        if len(windows) > 1:
            raise ModelError(f"model {name} has layers with different windows {sorted(windows)}: use another engine")
        self.window: int | None = windows.pop() if SLIDING in types and windows else None
        # One kind of layer: the mask itself, which every model takes. Both kinds: a mask for each, by name.
        self.kinds: tuple[str, ...] = tuple(sorted(set(types)))
        names = inspect.signature(self.base.forward).parameters
        if "position_ids" not in names:
            raise ModelError(f"model {name} takes no position_ids: the local engine cannot place its tokens")
        # transformers renamed the argument in 5.24; a model from outside it may have the old one.
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._keeps = "logits_to_keep" in inspect.signature(self.model.forward).parameters
        self.cache = SlotCache(len(types), slots, context, self.device)
        self.routers = Routers.of(self.model) if record_routing else None
        self.head = OutputHead(self.model, None if output_ids is None else output_ids.to(self.device))
        self._low = torch.tensor(torch.finfo(self.dtype).min, dtype=self.dtype, device=self.device)
        self._zero = torch.zeros((), dtype=self.dtype, device=self.device)
        self._range = torch.arange(max(context, slots, PROBE), device=self.device)
        self._modules = list(self.outer.modules())
        self.int8: Int8Weights | None = None
        with self.sampling():
            self._whole = not self._head_is_known()
            self._decoder = None if self._whole or self.routers is not None else self._checked_decoder(list(types))
        if int8:  # only now: the comparisons above are of the weights as they are
            self.int8 = self.head.int8 = Int8Weights(model, output_ids=self.head.output_ids, head=not self._whole)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """No gradients and no dropout inside; the learner's modes are put back after.

        no_grad, not inference_mode: a module may keep a tensor it made here (rotary frequencies that grow with the
        length), and the learner's backward could not use an inference tensor.
        """
        training = [module for module in self._modules if module.training]
        for module in training:
            vars(module)["training"] = False  # a plain attribute; nn.Module's own setter is slow, every round
        try:
            with torch.no_grad(), nullcontext() if self.int8 is None else self.int8.sampling():
                yield
        finally:
            for module in training:
                vars(module)["training"] = True

    def weights_changed(self) -> None:
        """Forget what was derived from the weights. Cached keys and values are the caller's to drop."""
        self.head.forget()
        if self._decoder is not None:
            self._decoder.forget()
        self._modules = list(self.outer.modules())
        if self.int8 is not None:
            self.int8.refresh()

    @timed("decode")
    def decode(self, tokens: NDArray[np.int32], positions: NDArray[np.int64], shared: int = 0) -> Tensor:
        """One token for each of rows 0..n-1: float32 logits [n, V'] after `tokens` [n] at `positions` [n].

        shared: how many first positions are equal in all rows.
        """
        return self._logits(self._decoded(self._decoder, tokens, positions, shared))

    def _decoded(
        self, decoder: Decoder | None, tokens: NDArray[np.int32], positions: NDArray[np.int64], shared: int
    ) -> Tensor:
        """What `logits` makes logits of, by `decoder`, or by the model's own forward where there is none."""
        length, rows = int(positions.max()) + 1, len(tokens)
        self.cache.reserve(rows, length)
        ids, at = index(tokens, self.device), index(positions, self.device)
        if decoder is not None:
            masks = {kind: mask[:, 0] for kind, mask in self._masks(at[:, None], length).items()}
            return decoder(ids, at, self.cache, masks, length, shared)
        self.cache.placement = Placement((0, rows), self._range[:rows], at, length)
        return self._features(ids[:, None], at[:, None], length)

    @timed("prefill")
    def prefill(
        self, rows: Sequence[int], starts: Sequence[int], ends: Sequence[int], tokens: NDArray[np.int32]
    ) -> Tensor:
        """Positions [starts, ends) of each of `rows`: what `logits` makes logits of, [m, ·], at each row's last one.

        tokens [slots, context]. Rows are padded on the left, so that the last position of every row is the last column.
        """
        length, size = max(ends), max(end - start for start, end in zip(starts, ends, strict=True))
        self.cache.reserve(max(rows) + 1, length)
        first = np.asarray(ends)[:, None] - size + np.arange(size)  # [m, Q], positions; before `starts`: padding
        real = first >= np.asarray(starts)[:, None]
        positions = np.where(real, first, 0)
        batch_from, query_from = np.nonzero(real)
        slots = np.asarray(rows)
        together = bool((np.diff(slots) == 1).all())
        self.cache.placement = Placement(
            (rows[0], rows[-1] + 1) if together else index(slots, self.device),
            index(slots[batch_from], self.device),
            index(positions[real], self.device),
            length,
            index(batch_from, self.device),
            index(query_from, self.device),
        )
        ids = np.where(real, tokens[slots[:, None], positions], 0)
        return self._features(index(ids, self.device), index(positions, self.device), length)

    @timed("prefill")
    def logits(self, features: Tensor) -> Tensor:
        """float32 [n, V'] from rows of what `prefill` gave."""
        return self._logits(features)

    def _features(self, ids: Tensor, positions: Tensor, length: int) -> Tensor:
        """[B, H] hidden states of the last column, or [B, V] logits where only the whole model can make them."""
        inputs: dict[str, Any] = {
            "input_ids": ids,
            "attention_mask": self._mask(positions, length),
            "position_ids": positions,
            self._cache_name: self.cache,
            "use_cache": True,
        }
        if self.routers is None:
            return self._run(inputs)
        with self.routers.recording() as chosen:
            features = self._run(inputs)
        self.cache.record(chosen())
        return features

    def _run(self, inputs: dict[str, Any]) -> Tensor:
        if not self._whole:
            hidden: Tensor = self.base(**inputs).last_hidden_state
            return hidden[:, -1]
        logits: Tensor = self.model(**inputs, **({"logits_to_keep": 1} if self._keeps else {})).logits
        return logits[:, -1]

    def _logits(self, features: Tensor) -> Tensor:
        return self.head.choose(features) if self._whole else self.head(features)

    def _mask(self, positions: Tensor, length: int) -> Tensor | dict[str, Tensor]:
        """The masks in the form that the model takes."""
        masks = self._masks(positions, length)
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _masks(self, positions: Tensor, length: int) -> dict[str, Tensor]:
        """Additive masks [B, 1, Q, length]: a position sees itself and those before it, as far as the window."""
        keys, queries = self._range[:length], positions[:, None, :, None]
        seen = keys <= queries
        masks: dict[str, Tensor] = {}
        for kind in self.kinds:
            near = seen & (keys > queries - self.window) if kind == SLIDING and self.window is not None else seen
            masks[kind] = torch.where(near, self._zero, self._low)
        return masks

    def _checked_decoder(self, kinds: list[str]) -> Decoder | None:
        """The decoder, where there is one for the model and it gives what the model itself gives.

        Compared on rows whose first positions are equal and the rest is not, the windows passed where they are short.
        """
        decoder = Decoder.of(self.base, kinds)
        if decoder is None:
            return None
        kept, found = self.cache, []
        vocabulary: int = self.model.config.get_text_config().vocab_size
        tokens = np.random.default_rng(0).integers(0, vocabulary, (3, PROBE), dtype=np.int32)
        tokens[:, :WORTH_SPLITTING] = tokens[0, :WORTH_SPLITTING]
        last = np.arange(PROBE - 3, PROBE)
        for one in (None, decoder):
            self.cache = SlotCache(len(kinds), 3, PROBE, self.device)
            self.prefill([0, 1, 2], [0, 0, 0], last.tolist(), tokens)
            found.append(self._decoded(one, tokens[range(3), last], last, WORTH_SPLITTING))
        self.cache = kept
        decoder.forget()
        return decoder if self._close(*found) else None

    def _head_is_known(self) -> bool:
        """Whether `head` gives what the whole model gives on two tokens: a model may do something of its own there."""
        if self.head.head is None:
            return False
        ids = torch.zeros(1, 2, dtype=torch.int64, device=self.device)
        ids[0, 1] = 1
        whole = self.head.choose(self.model(input_ids=ids, use_cache=False).logits[:, -1])
        ours = self.head(self.base(input_ids=ids, use_cache=False).last_hidden_state[:, -1])
        self.head.forget()
        return self._close(whole, ours)

    def _close(self, theirs: Tensor, ours: Tensor) -> bool:
        """Whether two ways to compute the same agree but for rounding."""
        tolerance = (1e-4 if self.dtype == torch.float32 else 2e-2) * max(float(theirs.abs().max()), 1.0)
        return bool(((theirs - ours).abs() <= tolerance).all())


def causal_lm(model: nn.Module) -> PreTrainedModel:
    """The causal LM itself: `model`, or what a peft adapter wraps (adapter layers sit inside it and stay in force)."""
    inner: Any = model
    configs = getattr(model, "peft_config", None)
    if configs is not None and hasattr(model, "get_base_model"):
        if any(getattr(config, "is_prompt_learning", False) for config in configs.values()):
            raise ModelError("the model has a prompt-learning adapter: the local engine needs one of weights (LoRA)")
        inner = model.get_base_model()  # type: ignore[operator]
    if not isinstance(inner, PreTrainedModel):
        raise ModelError(f"the local engine needs a transformers causal LM, not {type(inner).__name__}")
    return inner
