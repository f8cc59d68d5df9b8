"""Attention with a sink: its formula, its gradients in float64, and GPT-OSS run with it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from renma.learning import attention_sink
from renma.learning.attention import attending
from renma.learning.attention_sink import SINKS, sink_attention
from renma.learning.forward import TreeModel
from renma.learning.scorer import Scorer
from renma.learning.tree import pack
from tests.inference.tiny_mixtures import make
from tests.learning.tiny import random_rows, separate_logprobs


def inputs(
    queries: int, keys: int, *, batch: int = 1, heads: int = 4, groups: int = 2, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """query, key, value and sinks at random; values are wider than keys."""
    generator = torch.Generator().manual_seed(queries + 31 * keys)
    shapes = (batch, heads, queries, 3), (batch, groups, keys, 3), (batch, groups, keys, 4), (heads,)
    query, key, value, sinks = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes
    )
    return query, key, value, sinks


def seen_mask(seen: Tensor, dtype: torch.dtype, hidden: float = -torch.inf) -> Tensor:
    """[.., Q, K] bool to what is added to the scores, [B, 1, Q, K]."""
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, hidden)
    return mask[None, None] if mask.dim() == 2 else mask[:, None]


def window_mask(queries: int, keys: int, window: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The queries are the last of the keys, and see those before them as far as the window."""
    at, of = torch.arange(keys - queries, keys)[:, None], torch.arange(keys)[None]
    return seen_mask((of <= at) & (of > at - window), dtype)


def reference(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """The formula as it is written, with every probability in memory."""
    repeats = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(repeats, 1).mT * scaling
    scores = scores if mask is None else scores + mask
    total = scores.exp().sum(-1, keepdim=True) + sinks[:, None, None].exp()
    return (scores.exp() / total) @ value.repeat_interleave(repeats, 1)


@pytest.mark.parametrize("chunk", [2, 128])
@pytest.mark.parametrize(
    ("queries", "keys", "batch", "window"), [(5, 5, 1, 5), (5, 5, 2, 2), (3, 6, 1, 4), (1, 4, 2, 9), (4, 3, 1, None)]
)
def test_gradients_pass_the_float64_check(
    queries: int, keys: int, batch: int, window: int | None, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_sink, "CHUNK", chunk)
    mask = None if window is None else window_mask(queries, keys, window)
    given = inputs(queries, keys, batch=batch)
    assert torch.autograd.gradcheck(lambda *parts: sink_attention(*parts, mask, 0.7), given)
    torch.testing.assert_close(sink_attention(*given, mask, 0.7), reference(*given, mask, 0.7), rtol=1e-12, atol=1e-12)


@settings(max_examples=30)
@given(st.integers(1, 12), st.integers(1, 12), st.sampled_from([1, 2, 4]), st.integers(1, 5), st.data())
def test_any_mask_even_one_that_hides_everything_from_a_query(
    queries: int, keys: int, groups: int, chunk: int, data: st.DataObject
) -> None:
    line = st.lists(st.booleans(), min_size=keys, max_size=keys)
    seen = torch.tensor([[data.draw(line) for _ in range(queries)] for _ in range(2)])
    hidden = data.draw(st.sampled_from([-torch.inf, torch.finfo(torch.float64).min]))
    mask = seen_mask(seen, torch.float64, hidden)
    given = inputs(queries, keys, batch=2, groups=groups)
    weights = torch.randn(2, 4, queries, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def gradients(out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad((out * weights).sum(), given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_sink, "CHUNK", chunk)
        ours = sink_attention(*given, mask, 0.5)
        got = gradients(ours)
    theirs = reference(*given, mask, 0.5)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    for one, other in zip(got, gradients(theirs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    nothing = ~seen.any(-1)
    assert (ours.transpose(1, 2)[nothing] == 0).all()


def test_large_scores_and_sinks_do_not_overflow() -> None:
    query, key, value, sinks = inputs(6, 6, dtype=torch.float32)
    mask = window_mask(6, 6, 6, torch.float32)
    with torch.no_grad():
        query *= 1e3
        sinks += torch.tensor([-1e3, 0.0, 1e3, 1e5])
    out = sink_attention(query, key, value, sinks, mask, 1.0)
    out.sum().backward()
    parts = (query, key, value, sinks)
    assert all(bool(torch.isfinite(part.grad).all()) for part in parts if part.grad is not None)
    assert bool((out[:, 3] == 0).all())  # the sink takes everything
    assert bool((out[:, 0].abs().amax(-1) > 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [3, 300])
def test_it_is_the_attention_of_transformers(window: int, dtype: torch.dtype) -> None:
    given = inputs(200, 200, heads=8, groups=2, dtype=dtype)
    query, key, value, sinks = given
    mask = window_mask(200, 200, window, dtype)
    module: Any = SimpleNamespace(num_key_value_groups=4, sinks=sinks, training=False)
    theirs = eager_attention_forward(module, query, key, value, mask, scaling=0.6)[0].transpose(1, 2)
    ours = sink_attention(query, key, value, sinks, mask, 0.6)
    assert ours.dtype == dtype
    near = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours, theirs, rtol=near, atol=near)
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted = torch.autograd.grad((theirs * weights).sum(), given)
    for one, other in zip(torch.autograd.grad((ours * weights).sum(), given), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=10 * near, atol=3 * near * float(other.abs().max()))


def test_probabilities_are_not_kept_for_the_backward() -> None:
    query, key, value, sinks = inputs(300, 300)
    kept: list[Tensor] = []
    mask = window_mask(300, 300, 300)

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        sink_attention(query, key, value, sinks, mask, 1.0)
    assert max(t.numel() for t in kept if t.data_ptr() != mask.data_ptr()) == query.shape[1] * 300 * value.shape[3]


def test_windows_leave_keys_out_of_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_sink, "CHUNK", 10)
    blocks = attention_sink._blocks(window_mask(40, 40, 5), 40, 40)
    assert [tuple(block) for block in blocks] == [(0, 10, 0, 10), (10, 20, 6, 20), (20, 30, 16, 30), (30, 40, 26, 40)]


def test_the_learner_runs_gpt_oss_with_it_and_gradients_are_those_of_eager() -> None:
    model = make("gpt-oss")
    rows = random_rows(2, symbols=9, high=30)
    calls: list[int] = []
    blocks = attention_sink._blocks

    def gradient(ours: bool) -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad(set_to_none=True)
        if not ours:
            logp = torch.cat([separate_logprobs(model, row) for row in rows])
            (logp * torch.arange(len(logp))).sum().backward()
        else:
            tree = TreeModel(model)
            tree.begin()
            logp = torch.zeros(sum(int(row.trained.sum()) for row in rows))
            for part in pack(rows, 64):
                found, _ = tree.logprobs(part)
                (found * torch.from_numpy(part.token)).sum().backward()
                logp[part.token] = found.detach()
            tree.finish()
        return logp.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    def counted(*given: Any) -> Any:
        calls.append(1)
        return blocks(*given)

    plain, wanted = gradient(ours=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_sink, "_blocks", counted)
        found, got = gradient(ours=True)
    assert calls
    assert model.config._attn_implementation == "eager"  # its own again
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5)
    assert got.keys() == wanted.keys()
    assert any(name.endswith("sinks") for name in got)
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, rtol=1e-3, atol=1e-4 * float(value.abs().max()))


def test_a_model_may_be_loaded_with_it() -> None:
    model = make("gpt-oss")
    ids = torch.arange(40)[None] % 7
    with torch.no_grad():
        own = model(input_ids=ids).logits
        model.set_attn_implementation(SINKS)
        torch.testing.assert_close(model(input_ids=ids).logits, own, rtol=1e-5, atol=1e-5)
        with attending(model.config, SINKS):
            assert model.config._attn_implementation == SINKS
        assert model.config._attn_implementation == SINKS
    Scorer(model)  # and trained


def test_what_it_cannot_do_is_said() -> None:
    query, key, value, sinks = inputs(2, 2)
    with pytest.raises(ValueError, match="a mask to add.*got torch.bool"):
        sink_attention(query, key, value, sinks, torch.ones(1, 1, 2, 2, dtype=torch.bool), 1.0)
    forward: Any = attention_sink._sink_attention_forward
    with pytest.raises(ValueError, match="no dropout"):
        forward(torch.nn.Identity(), query, key, value, None, scaling=1.0, dropout=0.1, s_aux=sinks)
    with pytest.raises(ValueError, match="Identity has no attention sinks"):
        forward(torch.nn.Identity(), query, key, value, None, scaling=1.0)
