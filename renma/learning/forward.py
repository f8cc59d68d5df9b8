"""A causal language model run over packs: hidden states under a tree mask, log-probabilities where they are needed.

Works on any transformers causal model whose attention takes a prepared mask; `check` proves on a few tokens that a
given model is one, instead of a list of architectures that would go stale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from renma.errors import DataError, ModelError
from renma.learning.attention import attending
from renma.learning.attention_sink import SINKS
from renma.learning.logprobs import LogitRule, token_logprobs
from renma.learning.optimizer import float32_home
from renma.learning.rows import Row
from renma.learning.tree import Pack, PackCost, pack
from renma.learning.tree_attention import TREE, Blocks
from renma.models.experts import Routers
from renma.profiling import timed
from renma.types import Floats

FULL, SLIDING = "full_attention", "sliding_attention"
# Of dense attention's arithmetic against a plain matrix product, and of the time one layer's operations take to launch,
# in arithmetic that the device would have done meanwhile (measured on a CPU; a GPU's packs are as large as allowed).
ATTENTION_EFFICIENCY = 0.65
LAUNCH_FLOPS = {"cpu": 2e8, "cuda": 1e12}


class TreeTrunk:
    """The inner model alone: from packs to the hidden states that predict something.

    inner: what a causal model's `get_decoder()` gives. config: its text configuration. name: how errors call the model.
    Call `begin` before the packs of one optimiser step and `finish` after: the embedding gets its gradient there, once,
    not once a pack. Raises ModelError for layers or an attention that cannot take a tree mask.
    """

    replays_routing = False  # whether a pack's routing is imposed; else every node routes itself
    _embedded: list[tuple[Tensor, Tensor]]  # ids and embeddings of each pack, the latter a leaf

    def __init__(self, inner: Any, config: Any, name: str) -> None:
        self.inner, self.config = inner, config
        self.embedding: Any = inner.get_input_embeddings()
        self.device: torch.device = self.embedding.weight.device
        self.vocabulary = len(self.embedding.weight)
        self.kinds, self.window = _attention_kinds(name, config)
        # GPT-OSS's own attention keeps several [heads, N, N] tensors a layer for the backward; ours keeps none.
        self._sinks = config.model_type == "gpt_oss" and config._attn_implementation == "eager"
        self._blocks = config._attn_implementation == "sdpa"
        self.cost = pack_cost(inner, config, self.device, dense=not self._blocks)
        self._forget()

    @timed("forward")
    def begin(self) -> None:
        """Forget what an earlier step left."""
        self._forget()

    @timed("backward")
    def finish(self) -> None:
        """Give the embedding the gradient that the packs since `begin` have gathered for it."""
        if self._embedded:
            # Equal tokens have equal embeddings: their gradients are added first, in float32 at least.
            ids, place = torch.unique(torch.cat([ids for ids, _ in self._embedded]), return_inverse=True)
            first = self._embedded[0][1]
            exact = torch.promote_types(first.dtype, torch.float32)
            total = torch.zeros(len(ids), first.shape[-1], dtype=exact, device=self.device)
            total.index_add_(0, place, torch.cat([_gradient(leaf) for _, leaf in self._embedded]).to(exact))
            with torch.enable_grad():
                output = self.embedding(ids[None])
            output.backward(total[None].to(output.dtype))
        self._forget()

    @timed("forward")
    def hidden(self, tree: Pack) -> Tensor:
        """[M, H] the hidden states of the pack's predictors, in their order."""
        predictors = torch.from_numpy(tree.predictors).to(self.device)
        return self._hidden(tree).index_select(0, predictors)

    @timed("packing")
    def packs(self, rows: list[Row], max_positions: int) -> list[Pack]:
        """The rows as packs of the size that is fastest for this model. Raises DataError for an unknown token id."""
        for row in rows:
            if len(row.ids) and not 0 <= int(row.ids.min()) <= int(row.ids.max()) < self.vocabulary:
                raise DataError(
                    f"row of trajectory {row.trajectory}: a token id is outside the model's {self.vocabulary} tokens; "
                    "use the tokenizer that belongs to the model"
                )
        return pack(rows, max_positions, self.cost)

    @torch.no_grad()
    def each_token(self, rows: Sequence[Row], max_positions: int, read: Callable[[Pack], Tensor]) -> list[Floats]:
        """What `read` gives for the tokens of each pack [n], float32 [trained tokens] a row; nothing is learned."""
        sizes = [int(np.count_nonzero(row.trained)) for row in rows]
        result = np.zeros(sum(sizes), np.float32)
        self.begin()
        for tree in self.packs(list(rows), max_positions):
            result[tree.token] = read(tree).float().cpu().numpy()
        self.finish()
        return np.split(result, np.cumsum(sizes)[:-1]) if sizes else []

    def _forget(self) -> None:
        self._embedded = []

    def _hidden(self, tree: Pack) -> Tensor:
        ids = torch.from_numpy(tree.ids).to(self.device)
        with torch.no_grad():
            embedded = self.embedding(ids[None])
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.embedding.parameters()):
            embedded.requires_grad_()
            self._embedded.append((ids, embedded))
        with self._routed(tree), self._attention():
            output = self.inner(
                inputs_embeds=embedded,
                attention_mask=self._masks(tree, embedded.dtype),
                position_ids=torch.from_numpy(tree.position_ids).to(self.device)[None],
                use_cache=False,
            )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def _routed(self, tree: Pack) -> AbstractContextManager[None]:
        """Where the pack's recorded routing holds."""
        if tree.routing is None or not self.replays_routing:
            return nullcontext()
        routers = Routers.of(self.inner)
        if routers is None:
            raise ModelError(
                f"{_kind(self.inner)} has no experts, and the trajectories were sampled with some: "
                "train the model that was sampled from, or leave Step.routing out"
            )
        return routers.imposing(torch.from_numpy(tree.routing).to(self.device))

    def _attention(self) -> AbstractContextManager[None]:
        if self._sinks:
            return attending(self.config, SINKS)
        return attending(self.config, TREE) if self._blocks else nullcontext()

    def _masks(self, tree: Pack, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
        """What the model's attention takes: the blocks of the pack, or masks to add, [1, 1, N, N]."""
        seen, depth = tree.mask(), tree.position_ids
        masks: dict[str, Tensor] = {}
        for kind in self.kinds:
            near = seen
            if kind == SLIDING and self.window is not None and int(depth.max()) >= self.window:
                near = seen & (depth[:, None] - depth[None, :] < self.window)
            elif masks:  # short rows: the window hides nothing
                masks[kind] = next(iter(masks.values()))
                continue
            if self._blocks:
                masks[kind] = Blocks.of(near, dtype, self.device).as_mask(dtype)
            else:
                hidden = torch.from_numpy(~near).to(self.device)
                masks[kind] = torch.zeros(near.shape, dtype=dtype, device=self.device).masked_fill_(hidden, -torch.inf)[
                    None, None
                ]
        return masks if len(masks) > 1 else masks[self.kinds[0]]


class TreeModel(TreeTrunk):
    """A causal model seen as inner model + output head, for packs.

    output_ids: sorted ids the policy can emit; None: all. Call `begin` before the packs of one optimiser step and
    `finish` after: the embedding and the gathered rows of the head get their gradients there, once, not once a pack.
    A mixture of experts sends a token where it went when it was sampled (`replays_routing`; for a model that is not
    the one that was sampled from, a reference, set it to False).
    """

    replays_routing = True
    _homes: list[tuple[Tensor, Tensor]]  # the head's parameters and where the gradients of their gathered rows are
    _rows: Tensor | None
    _bias: Tensor | None

    def __init__(
        self,
        model: Any,
        *,
        output_ids: Tensor | None = None,
        temperature: float = 1.0,
        logit_chunk: int = 256,
    ) -> None:
        causal: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.causal = causal
        inner, head = causal.get_decoder(), causal.get_output_embeddings()
        if inner is causal or not isinstance(head, nn.Linear):
            raise ModelError(f"{_kind(causal)}: the learner needs an inner model and a plain linear output head")
        super().__init__(inner, causal.config.get_text_config(), _kind(causal))
        self.head = head
        self.device = head.weight.device
        self.vocabulary = len(head.weight)
        self.chunk = logit_chunk
        self.rule = LogitRule(
            temperature=temperature or 1.0,  # greedy samples record log-probabilities at temperature 1
            softcap=getattr(self.config, "final_logit_softcapping", None),
            scale=(getattr(self.config, "logit_scale", None) or 1.0)
            / (getattr(self.config, "logits_scaling", None) or 1.0),
        )
        self.output_ids = None if output_ids is None else output_ids.to(self.device, torch.long)
        self.local_ids: Tensor | None = None
        if self.output_ids is not None:
            self.local_ids = torch.full((len(head.weight),), -1, device=self.device)
            self.local_ids[self.output_ids] = torch.arange(len(self.output_ids), device=self.device)

    # The parts of one optimiser step

    @timed("forward")
    def begin(self) -> None:
        """Take the head's rows as they now are; forget what an earlier step left."""
        self._forget()
        weight, bias = self.head.weight, self.head.bias
        if self.output_ids is None:
            self._rows, self._bias = weight, bias
            return
        self._rows = weight.detach()[self.output_ids].requires_grad_(weight.requires_grad)
        self._bias = None if bias is None else bias.detach()[self.output_ids].requires_grad_(bias.requires_grad)
        self._homes = [
            (whole, float32_home(part))
            for whole, part in ((weight, self._rows), (bias, self._bias))
            if part is not None and part.requires_grad
        ]

    @timed("backward")
    def finish(self) -> None:
        """Give the embedding and the head the gradients that the packs since `begin` have gathered for them."""
        for whole, home in self._homes:
            if home.grad is not None and self.output_ids is not None:
                whole.index_select(0, self.output_ids).backward(home.grad.to(whole.dtype))
        super().finish()

    def logprobs(self, tree: Pack) -> tuple[Tensor, Tensor]:
        """log pi [n] of the pack's tokens, in its order, and the entropy [n] of the distribution each came from."""
        return self.score(tree, self.hidden(tree))

    @timed("forward")
    def score(self, tree: Pack, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """As `logprobs`, from the hidden states [M, H] of the predictors (`hidden`)."""
        if self._rows is None:
            raise RuntimeError("call begin() before the first pack")
        place = torch.from_numpy(tree.token_predictor).to(self.device)
        logp, entropy = token_logprobs(
            hidden, self._rows, self._targets(tree), place, bias=self._bias, rule=self.rule, chunk=self.chunk
        )
        return logp, entropy[place]

    def _forget(self) -> None:
        super()._forget()
        self._homes = []
        self._rows = self._bias = None

    def _targets(self, tree: Pack) -> Tensor:
        targets = torch.from_numpy(tree.targets).to(self.device)
        if self.local_ids is None:
            return targets
        local = self.local_ids[targets]
        if bool((local < 0).any()):
            outside = sorted(set(targets[local < 0].tolist()))
            raise DataError(
                f"{len(outside)} trained token ids are not among the {int(self.local_ids.max()) + 1} output tokens, "
                f"the first {outside[0]}; set model.output_tokens: all, or train only what the policy can emit"
            )
        return local

    @torch.no_grad()
    def check(self) -> None:
        """Compare a small tree with its separate rows run the model's own way.

        Raises ModelError where they differ: no attention (state-space models), attention that ignores the mask,
        positions that cannot be given, or an output head that does more than this learner knows.
        """
        pool = list(range(len(self.head.weight))) if self.output_ids is None else self.output_ids.tolist()
        a, b, c, d = (int(pool[i * (len(pool) - 1) // 3]) for i in range(4))
        sequences = [[a, b, c, d, a], [a, b, d, c], [a, c, b]]
        rows = [_probe(ids, number) for number, ids in enumerate(sequences)]
        try:
            [tree] = pack(rows, 64, PackCost(quadratic=0))
            self.begin()
            ours = self.logprobs(tree)[0].float().cpu()
        except (TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
            raise ModelError(
                f"{_kind(self.causal)} cannot be trained: it takes no tree attention mask ({error})"
            ) from error
        finally:
            self._forget()
        theirs = torch.empty_like(ours)
        for number, ids in enumerate(sequences):
            logits = self.causal(input_ids=torch.tensor([ids], device=self.device)).logits[0].float()
            if self.output_ids is not None:
                logits = logits[:, self.output_ids]
            mine = torch.from_numpy(tree.rows == number)
            targets, at = self._targets(tree).cpu()[mine], torch.from_numpy(tree.at)[mine]
            theirs[mine] = (logits / self.rule.temperature).log_softmax(-1).cpu()[at - 1, targets]
        worst = float((ours - theirs).abs().max())
        allowed = 0.1 if self.head.weight.dtype in (torch.bfloat16, torch.float16) else 1e-3
        if not worst <= allowed:
            raise ModelError(
                f"{_kind(self.causal)} cannot be trained: under a tree attention mask its log-probabilities are off by "
                f"{worst:.2g}; the learner needs plain attention over given positions and a linear output head"
            )


def pack_cost(inner: nn.Module, config: Any, device: torch.device, *, dense: bool = False) -> PackCost:
    """How a pack's cost grows, from the model's sizes: launching, and dense attention against matrix products.

    dense: attention computes a whole pack's scores; else those of blocks, which grow with its positions.
    """
    layers = max(1, int(getattr(config, "num_hidden_layers", 1)))
    heads = int(getattr(config, "num_attention_heads", 1))
    head_size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    embeddings = sum(p.numel() for m in inner.modules() if isinstance(m, nn.Embedding) for p in m.parameters())
    body = max(1, (sum(p.numel() for p in inner.parameters()) - embeddings) // layers)
    launch = LAUNCH_FLOPS["cpu" if device.type == "cpu" else "cuda"]
    quadratic = 4 * heads * head_size / ATTENTION_EFFICIENCY / (2 * body) if dense else 0.0
    return PackCost(fixed=launch / (6 * body), quadratic=quadratic)


def _attention_kinds(name: str, config: Any) -> tuple[list[str], int | None]:
    window = getattr(config, "sliding_window", None)
    kinds = sorted(set(getattr(config, "layer_types", None) or [SLIDING if window else FULL]))
    other = [kind for kind in kinds if kind not in (FULL, SLIDING)]
    if other:
        raise ModelError(
            f"{name} has {', '.join(other)} layers, which cannot share a prefix under a tree mask; "
            "choose a model whose layers are full or sliding attention"
        )
    implementation = getattr(config, "_attn_implementation", "sdpa")
    if implementation not in ("sdpa", "eager", SINKS):
        raise ModelError(
            f"{name} runs {implementation!r} attention, which takes no tree mask; "
            "load it with attn_implementation='sdpa'"
        )
    return kinds, window


def _probe(ids: list[int], number: int) -> Row:
    size = len(ids)
    trained = np.arange(size) > 0
    zeros, whole = np.zeros(size, np.float32), np.zeros(size, np.int32)
    return Row(np.array(ids, np.int32), trained, zeros, zeros, whole, whole, number)


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf[0]) if leaf.grad is None else leaf.grad[0]


def _kind(model: Any) -> str:
    return type(model).__name__
