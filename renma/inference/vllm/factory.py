"""From a recipe's `rollout.engine: {type: vllm, …}` to the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from renma.errors import RecipeError
from renma.inference.checks import checked_context
from renma.inference.vllm.backend import Backend, Settings
from renma.inference.vllm.child import ServerChild
from renma.inference.vllm.engine import VllmEngine
from renma.inference.vllm.in_process import InProcessBackend
from renma.inference.vllm.server import ServerBackend
from renma.inference.vllm.weights import PolicyFiles
from renma.models.experts import Routers
from renma.models.policy import Policy
from renma.recipe import RolloutSection


def vllm_engine(
    policy: Policy,
    model: nn.Module,
    rollout: RolloutSection,
    *,
    python: str | None = None,
    address: str | None = None,
    context: int | None = None,
    folder: str | None = None,
    args: dict[str, Any] | None = None,
    start_seconds: float = 900.0,
) -> VllmEngine:
    """vLLM, for those who have GPUs: in this process, or a server, with a copy of the weights after each update.

    python: a Python that has vllm: start a server with it, as a child. address: of a server that runs already
    (http://host:port). Neither: in this process, which then needs vllm itself.
    context: the most tokens of prompt and action; None: the model's own. folder: where weights are handed over, which
    the server must see; None: in memory or the temporary folder. args: more of vLLM's engine arguments, by their Python
    names (gpu_memory_utilization, tensor_parallel_size, …). start_seconds: how long it may take to be ready.

    Raises RecipeError for options that exclude each other, ModelError where vllm is not installed.
    """
    if python is not None and address is not None:
        raise RecipeError("rollout.engine: python starts a server and address names one that runs: give one of them")
    if address is not None and args:
        raise RecipeError("rollout.engine.args: a server that runs has its arguments already: start it with them")
    if rollout.record_routing and Routers.of(model) is not None:
        raise RecipeError(
            "the vllm engine does not record the experts that a mixture-of-experts policy chooses: set "
            "rollout.record_routing: false (the learner then chooses them anew), or use rollout.engine: {type: local}"
        )
    config = policy.model.config.get_text_config()
    length = checked_context(config, context)
    settings = Settings(
        length,
        rollout.slots,
        str(policy.compute_dtype).removeprefix("torch."),
        None if policy.output_ids is None else tuple(policy.output_ids.tolist()),
        args or {},
        start_seconds,
    )
    backend: Backend
    if address is not None:
        backend = ServerBackend(settings, address=address)
    elif python is not None:
        backend = ServerBackend(settings, child=ServerChild(python, settings))
    else:
        backend = InProcessBackend(settings)
    files = PolicyFiles(model, policy.tokenizer, None if folder is None else Path(folder))
    return VllmEngine(backend, files, policy.tokenizer, context=length, vocabulary=config.vocab_size)
