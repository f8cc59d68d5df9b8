"""The routers of a mixture-of-experts model: recording the experts they choose, and imposing a recorded choice.

Two forward passes of one policy may round a router's near-tie differently and send a token to other experts; its
log-probability then jumps. Router replay records the experts when sampling and imposes them in the learner's forward
(Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers"). Only the choice
is imposed: the weights of the chosen experts are those of the learner's own router, and gradients flow through them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from renma.errors import ModelError

Weights = Callable[[Any, Tensor, Tensor], Tensor]
"""(router, its logits [N, experts], the experts chosen [N, k]) -> the weights [N, k] that the router gives them."""


def _of_all_renormalised(router: Any, logits: Tensor, chosen: Tensor) -> Tensor:
    probabilities = logits.float().softmax(-1).gather(1, chosen)
    return probabilities / probabilities.sum(-1, keepdim=True)


def _of_all(router: Any, logits: Tensor, chosen: Tensor) -> Tensor:
    probabilities = logits.float().softmax(-1).gather(1, chosen)
    if router.norm_topk_prob:
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    return probabilities.to(logits.dtype)


def _among_chosen(router: Any, logits: Tensor, chosen: Tensor) -> Tensor:
    return logits.gather(1, chosen).softmax(-1)


# By the name of the router's class, whose forward gives (logits [N, experts], weights [N, k], chosen [N, k]).
WEIGHTS: dict[str, Weights] = {
    "MixtralTopKRouter": _of_all_renormalised,
    "Qwen2MoeTopKRouter": _of_all,
    "Qwen3MoeTopKRouter": _of_all,
    "OlmoeTopKRouter": _of_all,
    "GptOssTopKRouter": _among_chosen,
}
_MIXTURE = re.compile(r"Experts|Router|MoE|SparseMoe")  # in the names of classes that only such models have


class Routers:
    """The routers of one model, in the order of its layers. Hooks are there only while a context below is open.

    layers: how many layers have a router; layers without experts are not counted. k: experts a position is sent to.
    """

    def __init__(self, routers: list[nn.Module]) -> None:
        self._routers = routers
        self.layers = len(routers)
        self.k = int(routers[0].top_k)  # type: ignore[arg-type]
        self.experts = int(routers[0].num_experts)  # type: ignore[arg-type]

    @staticmethod
    def of(model: nn.Module) -> Routers | None:
        """The model's routers; None for a dense model.

        Raises ModelError for a mixture of experts whose routers are of a kind not known here.
        """
        modules = list(model.modules())
        routers = [module for module in modules if type(module).__name__ in WEIGHTS]
        if routers:
            return Routers(routers)
        strange = sorted({name for name in (type(m).__name__ for m in modules) if _MIXTURE.search(name)})
        if strange:
            raise ModelError(
                f"{type(model).__name__} has {', '.join(strange)}: experts whose routing cannot be recorded or imposed "
                f"(known routers: {', '.join(WEIGHTS)}); set rollout.record_routing: false, or use another model"
            )
        return None

    @contextmanager
    def recording(self) -> Iterator[Callable[[], Tensor]]:
        """Inside, the model runs once; what is given then returns the experts chosen, [positions, layers, k].

        Positions are those of the forward's [B, Q], flattened. It raises RuntimeError when a router did not run once.
        """
        chosen: list[Tensor] = []

        def choices() -> Tensor:
            if len(chosen) != self.layers:
                raise RuntimeError(f"{len(chosen)} routers ran in one forward of a model that has {self.layers}")
            return torch.stack(chosen, 1)

        def keep(router: nn.Module, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
            chosen.append(output[2])

        with self._hooked([keep] * self.layers):
            yield choices

    @contextmanager
    def imposing(self, routing: Tensor) -> Iterator[None]:
        """Inside, position i of the forward goes to the experts routing[i], [N, layers, k] of any integer type.

        A position with -1 routes itself. A backward that runs layers again (activation checkpointing) must be inside
        too. Raises ModelError for a routing of another model.
        """
        if routing.shape[1:] != (self.layers, self.k) or int(routing.max()) >= self.experts:
            raise ModelError(
                f"the recorded routing ({routing.shape[1]} layers, {routing.shape[2]} experts a token, the highest "
                f"{int(routing.max())}) is not this model's ({self.layers} layers, {self.k} of {self.experts} "
                "experts): train the model that was sampled from, or leave Step.routing out"
            )

        def impose(layer: int) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
            def replace(
                router: nn.Module, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]
            ) -> tuple[Tensor, Tensor, Tensor]:
                logits, _, own = output
                if len(own) != len(routing):
                    raise RuntimeError(f"a router ran on {len(own)} positions, with routes for {len(routing)}")
                recorded = routing[:, layer].to(own.dtype)
                chosen = torch.where(recorded >= 0, recorded, own)
                return logits, WEIGHTS[type(router).__name__](router, logits, chosen), chosen

            return replace

        with self._hooked([impose(layer) for layer in range(self.layers)]):
            yield

    @contextmanager
    def _hooked(self, hooks: list[Callable[..., Any]]) -> Iterator[None]:
        with ExitStack() as stack:
            for router, hook in zip(self._routers, hooks, strict=True):
                stack.callback(router.register_forward_hook(hook).remove)
            yield
