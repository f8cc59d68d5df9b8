"""AdamW with float32 masters, and the schedule of its learning rate.

Where a parameter is float32 it is its own master. Where it is bfloat16, the master and both moments are float32 and
live here; the module keeps the one bfloat16 copy that sampling and learning share.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from renma.errors import ModelError, RunError
from renma.learning.statistics import UpdateStatistics
from renma.profiling import timed
from renma.recipe import LearnerSection


class MasterAdamW:
    """AdamW (arXiv 1711.05101) over the named parameters that require a gradient.

    Gradients are gathered in float32: those of a low-precision parameter move to its master as soon as they exist, so
    many packs add up without rounding. Weight decay is for matrices alone.

    compute_dtype: every parameter is made this type, in place; the masters are taken before, so that weights given in
    float32 lose nothing in them. Raises ModelError when no parameter requires a gradient.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        settings: LearnerSection,
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.parameters: dict[str, nn.Parameter] = {}
        self.masters: dict[str, Tensor] = {}
        for name, parameter in named:
            given = parameter.detach()
            parameter.data = given.to(compute_dtype)
            if parameter.requires_grad:
                self.parameters[name] = parameter
                self.masters[name] = float32_home(parameter, given)
        if not self.parameters:
            raise ModelError("no parameter of the model requires a gradient, so nothing can be trained; unfreeze some")
        decayed = [m for m in self.masters.values() if m.ndim >= 2]
        plain = [m for m in self.masters.values() if m.ndim < 2]
        groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self.inner = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.eps,
            fused=True,
        )

    def gradient_norm(self) -> float:
        """The 2-norm over all gradients, accumulated so far; not finite if any of them is not."""
        gradients = [m.grad for m in self.masters.values() if m.grad is not None]
        return float(nn.utils.get_total_norm(gradients)) if gradients else 0.0

    @torch.no_grad()
    def step(self, learning_rate: float, scale: float = 1.0) -> None:
        """One step with the gradients times `scale`; afterwards there are none."""
        if scale != 1.0:
            for master in self.masters.values():
                if master.grad is not None:
                    master.grad.mul_(scale)
        for group in self.inner.param_groups:
            group["lr"] = learning_rate
        self.inner.step()
        for name, parameter in self.parameters.items():
            if self.masters[name] is not parameter:
                parameter.copy_(self.masters[name])
        self.clear()

    def clear(self) -> None:
        """Forget all gradients."""
        for name, parameter in self.parameters.items():
            parameter.grad = None
            self.masters[name].grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the masters from the module, whose weights have been loaded (case 7.6)."""
        for name, parameter in self.parameters.items():
            if self.masters[name] is not parameter:
                self.masters[name].copy_(parameter)

    def state_dict(self) -> dict[str, Any]:
        """Moments by parameter name, and the masters that are not the parameters themselves. Tensors are not copied."""
        moments: dict[str, dict[str, Tensor]] = {}
        for name, master in self.masters.items():
            if master in self.inner.state:
                moments[name] = dict(self.inner.state[master])
        return {
            "moments": moments,
            "masters": {n: m.detach() for n, m in self.masters.items() if m is not self.parameters[n]},
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises RunError when the state is of other parameters."""
        own = {name for name, master in self.masters.items() if master is not self.parameters[name]}
        unknown = sorted((set(state["moments"]) - set(self.masters)) | (set(state["masters"]) ^ own))
        if unknown:
            raise RunError(
                f"the optimiser's state does not fit the model: {unknown[0]!r} and {len(unknown) - 1} more differ; "
                "resume with the model, LoRA and dtype settings the run began with"
            )
        for name, saved in state["masters"].items():
            self.masters[name].copy_(saved)
            self.parameters[name].copy_(self.masters[name])
        self.inner.state.clear()
        for name, saved in state["moments"].items():
            master = self.masters[name]
            if saved["exp_avg"].shape != master.shape:
                raise RunError(
                    f"the optimiser's moments of {name!r} have shape {tuple(saved['exp_avg'].shape)}, "
                    f"the parameter has {tuple(master.shape)}; resume with the model settings the run began with"
                )
            self.inner.state[master] = {
                key: value.clone().to(master.device, torch.float32) for key, value in saved.items()
            }


@timed("optimiser")
def apply_gradients(
    optimizers: Sequence[MasterAdamW], settings: LearnerSection, rate: float, numbers: UpdateStatistics
) -> bool:
    """Clip the gradient over all of them together and take the step; its norm and what became of it go to `numbers`.

    One that is not finite is skipped and counted; where it is exactly 0 the optimisers are left alone. Returns whether
    it was finite.
    """
    norm = float(np.hypot.reduce([optimizer.gradient_norm() for optimizer in optimizers]))
    finite = math.isfinite(norm)
    numbers.add("skipped_updates", 0 if finite else 1)
    numbers.last["learning_rate"] = rate
    if finite:
        numbers.mean("grad_norm", norm, 1)
    limit = settings.clip_norm
    for optimizer in optimizers:
        if finite and norm > 0:
            optimizer.step(rate, 1.0 if limit is None else min(1.0, limit / norm))
        else:
            optimizer.clear()
    return finite


def float32_home(leaf: Tensor, values: Tensor | None = None) -> Tensor:
    """Where the leaf's gradient gathers in float32: the leaf itself, or a float32 tensor whose `.grad` takes them.

    values: what that tensor holds; None: the leaf's own.
    """
    if leaf.dtype == torch.float32:
        return leaf
    home = (leaf if values is None else values).detach().float()

    def move(source: Tensor) -> None:
        if source.grad is None:
            return
        gradient = source.grad.float()
        home.grad = gradient if home.grad is None else home.grad.add_(gradient)
        source.grad = None

    leaf.register_post_accumulate_grad_hook(move)
    return home


def learning_rate(settings: LearnerSection, step: int, done: float) -> float:
    """The rate of optimiser step `step` (from 0) when `done` (0 to 1) of the training is over.

    The schedule falls from the full rate to 0 at the end of the training, or is constant; over the first `warmup_steps`
    optimiser steps it is scaled up from 1 / warmup_steps to 1.
    """
    warm = min(1.0, (step + 1) / settings.warmup_steps) if settings.warmup_steps else 1.0
    left = 1 - min(1.0, done)
    factor = {"constant": 1.0, "linear": left, "cosine": 0.5 * (1 + math.cos(math.pi * (1 - left)))}
    return settings.learning_rate * warm * factor[settings.schedule]
