"""Log-probabilities in chunks: the same numbers and gradients as log_softmax over all logits at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from renma.learning.logprobs import LogitRule, token_logprobs


def plain(h: Tensor, w: Tensor, t: Tensor, at: Tensor, bias: Tensor | None, rule: LogitRule) -> tuple[Tensor, Tensor]:
    logits = rule.scale * (h @ w.T if bias is None else h @ w.T + bias)
    if rule.softcap is not None:
        logits = rule.softcap * torch.tanh(logits / rule.softcap)
    logp = (logits / rule.temperature).log_softmax(-1)
    return logp[at, t], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_case_8_1_chunks_equal_log_softmax_and_gather(chunk: int) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(64, 16, requires_grad=True), torch.randn(5000, 16, requires_grad=True)
    targets = torch.randint(0, 5000, (64,))
    cotangent, other = torch.randn(64), torch.randn(64)
    results = []
    for chunked in (False, True):
        hidden.grad = weight.grad = None
        if chunked:
            logp, entropy = token_logprobs(hidden, weight, targets, chunk=chunk)
        else:
            logp, entropy = plain(hidden, weight, targets, torch.arange(64), None, LogitRule())
        (logp @ cotangent + 0.1 * entropy @ other).backward()
        results.append((logp.detach(), entropy.detach(), hidden.grad, weight.grad))
    for wanted, got in zip(*results, strict=True):
        assert wanted is not None and got is not None
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_case_8_1_no_more_logits_exist_than_a_chunk_has(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    for name in ("empty", "zeros_like", "empty_like", "zeros"):
        original = getattr(torch, name)

        def counted(*args: object, original: object = original, **kwargs: object) -> Tensor:
            result: Tensor = original(*args, **kwargs)  # type: ignore[operator]
            made.append(result.numel())
            return result

        monkeypatch.setattr(torch, name, counted)
    hidden, weight = torch.randn(64, 8, requires_grad=True), torch.randn(5000, 8)
    logp, _ = token_logprobs(hidden, weight, torch.randint(0, 5000, (64,)), chunk=4)
    logp.sum().backward()
    assert max(made) <= 4 * 5000


RULES = [
    LogitRule(),
    LogitRule(0.6),
    LogitRule(0.7, softcap=3.0),
    LogitRule(1.3, softcap=2.0, scale=0.5),
    LogitRule(scale=2.0),
]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("biased", [False, True])
def test_gradients_in_float64(rule: LogitRule, biased: bool) -> None:
    torch.manual_seed(1)
    hidden = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(9, dtype=torch.float64, requires_grad=True) if biased else None
    # Two tokens at one position, the same token twice, and a position that predicts nothing.
    targets, at = torch.tensor([3, 3, 8, 0, 5, 5]), torch.tensor([0, 0, 0, 1, 3, 4])

    def both(h: Tensor, w: Tensor, b: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return token_logprobs(h, w, targets, at, bias=b, rule=rule, chunk=2)

    inputs = (hidden, weight) if bias is None else (hidden, weight, bias)
    for got, wanted in zip(both(*inputs), plain(hidden, weight, targets, at, bias, rule), strict=True):
        torch.testing.assert_close(got, wanted)
    assert torch.autograd.gradcheck(both, inputs)


def test_case_6_1_logits_are_divided_by_the_temperature_on_both_sides() -> None:
    weight, hidden = torch.tensor([[2.0], [1.0], [0.0]]), torch.ones(1, 1)
    logp, _ = token_logprobs(hidden, weight, torch.tensor([0]), rule=LogitRule(0.6))
    assert float(logp) == pytest.approx(-0.2026, abs=1e-4)


def test_large_logits_stay_finite() -> None:
    weight = torch.tensor([[1e4], [-1e4], [0.0]])
    logp, entropy = token_logprobs(torch.ones(1, 1), weight, torch.tensor([1]))
    assert float(logp) == -2e4 and float(entropy) == pytest.approx(0)


def test_no_position_gives_no_token() -> None:
    logp, entropy = token_logprobs(torch.zeros(0, 4), torch.randn(6, 4), torch.zeros(0, dtype=torch.long))
    assert logp.shape == entropy.shape == (0,)


def test_low_precision_weights_give_float32_and_their_own_gradients() -> None:
    torch.manual_seed(2)
    hidden = torch.randn(6, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(20, 8, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, 20, (6,))
    logp, _ = token_logprobs(hidden, weight, targets, chunk=2)
    logp.sum().backward()
    assert logp.dtype == torch.float32 and hidden.grad is not None and weight.grad is not None
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    exact = (hidden.detach().float(), weight.detach().float().requires_grad_())
    plain(*exact, targets, torch.arange(6), None, LogitRule())[0].sum().backward()
    assert exact[1].grad is not None
    torch.testing.assert_close(weight.grad.float(), exact[1].grad, rtol=0.1, atol=0.1)
