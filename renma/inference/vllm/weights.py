"""The policy as files for vLLM: the whole model once, for the start, and its weights again after each update."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from renma.errors import RunError
from renma.models.folders import one_line
from renma.models.policy import merged_copy
from renma.models.pretrained import no_progress_bars

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class PolicyFiles:
    """Writes what a module holds now. Adapters are merged into a copy.

    folder: where to write; None: in shared memory where the machine has it and it has room, else in the temporary
    folder. Whoever reads must see the same file system.
    """

    model: nn.Module
    tokenizer: Any
    folder: Path | None = None

    @contextmanager
    def written(self, *, whole: bool) -> Iterator[Path]:
        """A folder that is gone after the block: safetensors and config; with `whole`, the tokenizer too.

        Raises RunError when it cannot be written.
        """
        plain: Any = merged_copy(self.model)  # type: ignore[arg-type]
        try:
            made = Path(tempfile.mkdtemp(prefix="renma-weights-", dir=self.folder or _roomy(plain)))
            try:
                with no_progress_bars():
                    plain.save_pretrained(made)
                if whole:
                    self.tokenizer.save_pretrained(made)
                yield made
            finally:
                shutil.rmtree(made)
        except OSError as error:
            raise RunError(
                f"cannot write the weights for vllm ({one_line(error)}): free space, or set rollout.engine.folder"
            ) from error


def _roomy(model: nn.Module) -> Path | None:
    """Shared memory, if the weights take no more than half of what is free there."""
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    if SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 2 * size:
        return SHARED_MEMORY
    return None
