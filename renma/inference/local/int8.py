"""Int8 weights for sampling: the policy's linear layers run on 8-bit copies that are made anew with each version.

Weights have one scale an output channel, activations one a position, made as they come: what is rounded, and how, does
not depend on what else is in the batch, and sums of integers are exact.

What rounds badly is not the weights but the activations, a few of whose channels are ten times the rest. Both sides are
therefore turned by the same orthogonal matrix first, Hadamard blocks down the diagonal, which spreads each channel over
its block and leaves the product as it was (QuaRot, Ashkboos et al. 2024, arXiv 2404.00456). Gemma-3-270M's
log-probabilities are off by 0.06 nats on average with it, by 0.21 without.

The sampler is then another policy than the learner: the log-probabilities it records are its own, and the recipe must
make up for the difference (docs/algorithms.md, "When sampler and learner disagree").
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from renma.errors import ModelError
from renma.profiling import timed

BLOCK = 32  # of the Hadamard turn: 128 takes a seventh off the error, at four times the cost
CHUNK_ENTRIES = 1 << 22  # weights that are turned and rounded at once: the head's float copy is never whole
_SMALLEST = torch.finfo(torch.float32).tiny  # the scale of a row of zeros


class Kernel(Protocol):
    """How a device multiplies 8-bit matrices. levels: the largest whole number it takes on either side.
    multiple: of what a layer's input size must be a multiple."""

    levels: int
    multiple: int

    def pack(self, values: Tensor, scale: Tensor) -> Any:
        """values [N, K] int8, scale [N] float32: in the form that `product` takes."""
        ...

    def product(self, steps: Tensor, packed: Any) -> Tensor:
        """float32 [n, N]: `steps` [n, K] float32, rounded to whole numbers, times the packed matrix."""
        ...


class Fbgemm:
    """x86. Of the ways torch 2.13 has to multiply 8-bit matrices on a CPU the only one that was faster than float32 on
    AVX2 at 1, 8 and 64 rows alike (`benchmarks/precision.py --kernels`)."""

    # Without VNNI two products of a pair are added in 16 bits, and saturate: 2 * 90 * (90 + 90) stays below 2**15.
    levels = 90
    multiple = 1

    def pack(self, values: Tensor, scale: Tensor, engine: str = "fbgemm") -> Any:
        before = torch.backends.quantized.engine
        try:
            torch.backends.quantized.engine = engine
            with warnings.catch_warnings():
                # Only quantised tensors can be packed, and torch means to drop them: the version is pinned.
                warnings.filterwarnings("ignore", message="torch.quantize_per_tensor", category=UserWarning)
                zero = torch.zeros(len(scale), dtype=torch.int64)
                matrix = torch._make_per_channel_quantized_tensor(values, scale, zero, 0)
            return torch.ops.quantized.linear_prepack(matrix, None)
        finally:
            torch.backends.quantized.engine = before

    def product(self, steps: Tensor, packed: Any) -> Tensor:
        multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
        result: Tensor = multiply(steps, 1.0, self.levels, packed)
        return result


class IntegerMatmul:
    """CUDA, through torch._int_mm; elsewhere right, and slow."""

    levels = 127
    multiple = 8
    rows = 32  # cuBLAS wants more than 16

    def pack(self, values: Tensor, scale: Tensor) -> Any:
        lacking = -len(values) % self.multiple
        return nn.functional.pad(values, (0, 0, 0, lacking)).T, scale

    def product(self, steps: Tensor, packed: Any) -> Tensor:
        matrix, scale = packed
        count = len(steps)
        whole = nn.functional.pad(steps.round(), (0, 0, 0, max(0, self.rows - count))).to(torch.int8)
        sums = torch._int_mm(whole, matrix)[:count, : len(scale)]
        # Integers hold no NaN: without this a model that has diverged would be sampled from as if nothing was.
        return sums.float() * scale + (steps.sum(1, keepdim=True) * 0.0)


def kernel_for(device: torch.device) -> Kernel:
    """Raises ModelError where 8-bit products would be slower than float ones, or are not there at all."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (7, 5):
        return IntegerMatmul()
    if device.type == "cpu" and "fbgemm" in torch.backends.quantized.supported_engines:
        return Fbgemm()
    raise ModelError(
        f"weights: int8 needs an x86 CPU with FBGEMM in its torch, or CUDA with compute capability 7.5; this device "
        f"({device}) has neither: set rollout.engine.weights to own"
    )


@dataclass(slots=True, eq=False)
class _Layer:
    """One linear layer. rows: those of the output that are wanted, None: all. frozen: an adapter's base, which is
    rounded again only when somebody has written to it. seen: where its weights lay, and their write count."""

    linear: nn.Linear
    rows: Tensor | None
    frozen: bool
    packed: Any = None
    seen: tuple[int, int] | None = None

    @property
    def outputs(self) -> int:
        return self.linear.out_features if self.rows is None else len(self.rows)

    @property
    def nbytes(self) -> int:
        return self.outputs * (self.linear.in_features + 4)

    def refresh(self, kernel: Kernel) -> None:
        weight = self.linear.weight
        now = weight.data_ptr(), weight._version
        if self.frozen and not weight.requires_grad and now == self.seen:
            return
        self.seen = now
        self.packed = kernel.pack(*quantised(weight.detach(), self.rows, kernel.levels))

    def bias(self) -> Tensor | None:
        bias = self.linear.bias
        return bias if bias is None or self.rows is None else bias[self.rows]


class Int8Weights:
    """8-bit copies of the linear layers of `model`, which the learner goes on training: nothing of it is changed.

    In force only inside `sampling()`; there each layer's `forward` is another, outside the module is as it ever was.
    The output head is not called as a layer but through `logits`. Adapters (LoRA) stay in float beside 8-bit bases,
    which are then rounded only once. Embeddings, norms, routers and stacked experts are no linear layers: they stay.

    output_ids: [V'] the rows of the head that are wanted; None: all. head: whether it is rounded too; never one that is
    no plain linear layer. kernel: None: the device's own.

    Raises ModelError for a device without fast 8-bit products, and a model without linear layers.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        output_ids: Tensor | None = None,
        head: bool = True,
        kernel: Kernel | None = None,
    ) -> None:
        causal: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
        output: object = causal.get_output_embeddings()
        kernel = kernel_for(causal.device) if kernel is None else kernel
        self.kernel = kernel
        adapters, bases = _adapted(model)
        self._layers = [
            _Layer(module, None, frozen=module in bases)
            for module in model.modules()
            if type(module) is nn.Linear
            and module is not output
            and module not in adapters
            and module.in_features % kernel.multiple == 0
        ]
        if not self._layers:
            raise ModelError(
                f"weights: int8 finds no linear layer in {type(causal).__name__} that it could round (nn.Linear, its "
                f"input size a multiple of {kernel.multiple}): set rollout.engine.weights to own"
            )
        self._head: _Layer | None = None
        if head and type(output) is nn.Linear and output.in_features % kernel.multiple == 0:
            self._head = _Layer(output, output_ids, frozen=False)
        self._forwards = [(vars(layer.linear), self._forward_of(layer)) for layer in self._layers]
        # What several layers are given one after the other (query, key and value) is rounded once.
        self._last: tuple[Tensor, int, Tensor, Tensor] | None = None
        self.refresh()

    @property
    def has_head(self) -> bool:
        """Whether `logits` may be called."""
        return self._head is not None

    @property
    def nbytes(self) -> int:
        """Bytes that the 8-bit copies take, beside the learner's own weights."""
        return sum(layer.nbytes for layer in self._everything())

    @property
    def parameters(self) -> int:
        """How many weights have an 8-bit copy."""
        return sum(layer.outputs * layer.linear.in_features for layer in self._everything())

    @timed("int8 weights")
    @torch.no_grad()
    def refresh(self) -> float:
        """The learner's weights have changed: round them anew. Gives the seconds it took."""
        started = time.perf_counter()
        for layer in self._everything():
            layer.refresh(self.kernel)
        return time.perf_counter() - started

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """The model runs on 8-bit weights inside. Without gradients only; do not nest, nor train inside."""
        before = [attributes.get("forward") for attributes, _ in self._forwards]
        for attributes, forward in self._forwards:
            attributes["forward"] = forward
        try:
            yield
        finally:
            self.forget()
            for (attributes, _), own in zip(self._forwards, before, strict=True):
                if own is None:
                    del attributes["forward"]
                else:
                    attributes["forward"] = own

    def forget(self) -> None:
        """Round the next input anew, whatever it is."""
        self._last = None

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [n, V']: the head's product with hidden states [n, H], its bias added, nothing else done."""
        assert self._head is not None
        return self._product(self._head, hidden)

    def _everything(self) -> list[_Layer]:
        return self._layers if self._head is None else [*self._layers, self._head]

    def _forward_of(self, layer: _Layer) -> Any:
        def forward(x: Tensor) -> Tensor:
            return self._product(layer, x).view(*x.shape[:-1], layer.outputs).to(x.dtype)

        return forward

    def _product(self, layer: _Layer, x: Tensor) -> Tensor:
        steps, size = self._steps(x)
        result = self.kernel.product(steps, layer.packed).mul_(size)
        bias = layer.bias()
        return result if bias is None else result.add_(bias)

    def _steps(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [..., K] turned, in units of `size` [n, 1], a row's largest being `levels`: float32 [n, K], not rounded."""
        version = x._version
        if self._last is not None and self._last[0] is x and self._last[1] == version:
            return self._last[2], self._last[3]
        turned = _turned(x.float())
        size = turned.abs().amax(1, keepdim=True).div_(self.kernel.levels).clamp_(min=_SMALLEST)
        self._last = x, version, turned.div_(size), size
        return self._last[2], size


def _adapted(model: nn.Module) -> tuple[set[nn.Module], set[nn.Module]]:
    """The modules of peft's adapters, and the layers that they adapt."""
    adapters: set[nn.Module] = set()
    bases: set[nn.Module] = set()
    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer) and isinstance(layer, nn.Module):
            base: nn.Module = layer.get_base_layer()
            bases.add(base)
            adapters |= set(layer.modules()) - {base}
    return adapters, bases


def quantised(weight: Tensor, rows: Tensor | None, levels: int) -> tuple[Tensor, Tensor]:
    """weight [N, K], of it `rows`, turned and rounded: int8 [N', K] and the scale float32 [N'] of each row."""
    count, width = len(weight) if rows is None else len(rows), weight.shape[1]
    values = torch.empty(count, width, dtype=torch.int8, device=weight.device)
    scale = torch.empty(count, dtype=torch.float32, device=weight.device)
    step = max(1, CHUNK_ENTRIES // width)
    for start in range(0, count, step):
        part = slice(start, start + step)
        turned = _turned((weight[part] if rows is None else weight[rows[part]]).float())
        scale[part] = turned.abs().amax(1).div_(levels).clamp_(min=_SMALLEST)
        values[part] = turned.div_(scale[part, None]).round_().to(torch.int8)
    return values, scale


def _turned(x: Tensor) -> Tensor:
    """x [..., K] times Hadamard blocks: float32 [n, K], of a memory of its own."""
    width = x.shape[-1]
    block = min(BLOCK, width & -width)  # the largest power of 2 that divides the width
    return torch.mm(x.reshape(-1, block), _hadamard(block, x.device)).view(-1, width)


@cache
def _hadamard(size: int, device: torch.device) -> Tensor:
    """[size, size] orthogonal and symmetric, every entry of the same magnitude (Sylvester's construction)."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (matrix / size**0.5).to(device)
