"""Runs inside vLLM's workers: takes new weights from files, in place.

vLLM mixes `WeightReader` into its worker class (`--worker-extension-cls`). The file stands alone, because the Python
that runs vLLM need not have Renma: a server that Renma starts gets a copy of it. Files are safetensors, so nothing that
is read can run code.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any


class WeightReader:
    """Methods of vLLM's worker that Renma calls through `collective_rpc`."""

    def renma_load_weights(self, folder: str) -> int:
        """Load every tensor of the folder's safetensors files, named as in a Hugging Face folder; return how many.

        vLLM's own reload does the rest: it splits tensors over ranks, packs them for its kernels as at the start, and
        keeps the storage that captured graphs point to.
        """
        files = sorted(Path(folder).glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"no safetensors file in {folder}")
        count = 0

        def tensors() -> Iterator[tuple[str, Any]]:
            from safetensors import safe_open

            nonlocal count
            for file in files:
                with safe_open(file, framework="pt", device="cpu") as opened:
                    for name in opened.keys():  # noqa: SIM118 (not a dict)
                        count += 1
                        yield name, opened.get_tensor(name)

        self.reload_weights(weights_iterator=tensors())  # type: ignore[attr-defined]
        self._pack_tied_heads()
        return count

    def _pack_tied_heads(self) -> None:
        """Pack anew what vLLM keeps packed beside a weight (on a CPU: embeddings and the output head).

        Its reload packs a layer when that layer's own tensors are read. A head that is tied to the embedding has none,
        and would go on with the packed copy of the old weights.
        """
        for module in self.model_runner.get_model().modules():  # type: ignore[attr-defined]
            if "cpu_linear" in vars(module) and module.weight.numel():
                module.quant_method.process_weights_after_loading(module)
