"""A model that judges: a causal trunk with a linear head, read at the end of actions.

The outcome form gives a trajectory one score, read at its last sampled token (Ouyang et al. 2022). The process form
gives each step a score, read at the last sampled token of the step; the logistic function of it is the probability that
the step is good (Lightman et al. 2023).
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from renma.errors import ModelError
from renma.learning.forward import TreeModel, TreeTrunk
from renma.learning.rows import Row, rows_of
from renma.models.folders import SIDECAR, one_line, read_json, written_aside
from renma.models.policy import Policy, merged_copy
from renma.models.pretrained import load_folder, no_progress_bars
from renma.types import Floats, Trajectory

Form = Literal["outcome", "process"]
HEAD = "score_head.safetensors"


@dataclass(frozen=True, slots=True)
class Reading:
    """Where one trajectory is read. rows: its token rows, each with one more id at the end, `trained` exactly behind
    each token that a score is read at. steps [n]: the step that each of these tokens ends, ascending."""

    rows: tuple[Row, ...]
    steps: NDArray[np.int64]

    @property
    def positions(self) -> int:
        return sum(len(row) for row in self.rows)


def reading(trajectory: Trajectory, form: Form, index: int = 0) -> Reading:
    """The reading of a trajectory: each step with a sampled token, or (outcome) the last of them alone.

    Empty where nothing was sampled. Raises UntrainableTrajectory for a failed or aborted trajectory.
    """
    places: list[tuple[Row, list[int]]] = []
    for row in rows_of(trajectory, index, demonstration=True):
        sampled = np.flatnonzero(row.trained)
        spans = np.split(sampled, np.flatnonzero(np.diff(row.step[sampled])) + 1)
        places.append((row, [int(span[-1]) for span in spans]))
    if form == "outcome":
        places = [(row, ends[-1:]) for row, ends in places[-1:]]
    steps = [int(row.step[end]) for row, ends in places for end in ends]
    return Reading(tuple(_read_behind(row, ends) for row, ends in places), np.array(steps, np.int64))


class RewardModel:
    """Scores trajectories. A new head is zero: every score is 0 until it has learned.

    model: the causal model whose inner part is the trunk; it is used in place, in evaluation mode. tokenizer: that of
    the trajectories to come. max_positions: distinct token positions computed at once. Raises ModelError when the
    architecture cannot be run as a tree.

    A score does not depend on what is scored beside it, but for rounding: packs of another size add up in another
    order (about 1e-6 of a score's size in float32).
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, form: Form, *, max_positions: int = 4096
    ) -> None:
        self.model, self.tokenizer, self.form, self.max_positions = model.eval(), tokenizer, form, max_positions
        causal = TreeModel(model)
        causal.check()
        self.trunk = TreeTrunk(causal.inner, causal.config, type(model).__name__)
        weight = self.trunk.embedding.weight
        self.head = nn.Linear(int(causal.config.hidden_size), 1, device=weight.device, dtype=weight.dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @classmethod
    def start(cls, policy: Policy, form: Form, *, max_positions: int = 4096) -> RewardModel:
        """A new one whose trunk is a copy of the policy's model, adapters merged; all of it can be trained."""
        merged = merged_copy(policy.model)
        shared = next(merged.parameters()) is next(policy.model.parameters())
        own = copy.deepcopy(merged) if shared else merged
        return cls(own.requires_grad_(True), policy.tokenizer, form, max_positions=max_positions)

    @classmethod
    def load(cls, folder: Path, *, dtype: torch.dtype, device: torch.device, max_positions: int = 4096) -> RewardModel:
        """One that was saved. Raises ModelError when the folder holds none, or its parts do not belong together."""
        if not (folder / HEAD).is_file():
            raise ModelError(f"{folder} holds no reward model (no {HEAD}); train one first, or give its folder")
        fix = "train the reward model again"
        record = read_json(folder / SIDECAR, fix).get("reward_model")
        if not isinstance(record, dict) or record.get("form") not in ("outcome", "process"):
            raise ModelError(f"{folder / SIDECAR} does not say what form its reward model has: {fix}")
        model, tokenizer = load_folder(folder, dtype)
        if record.get("tokenizer") != tokenizer_digest(tokenizer):
            raise ModelError(f"the tokenizer in {folder} is not the one its reward model was trained with: {fix}")
        found = cls(model.to(device), tokenizer, record["form"], max_positions=max_positions)  # type: ignore[arg-type]
        try:
            found.head.load_state_dict(load_file(folder / HEAD))
        except (OSError, SafetensorError, RuntimeError) as error:
            raise ModelError(f"{folder / HEAD} cannot be used ({one_line(error)}): {fix}") from error
        found.model.requires_grad_(False)
        found.head.requires_grad_(False)
        return found

    def save(self, folder: Path, source: str = "") -> None:
        """Write trunk (a complete Hugging Face folder), tokenizer and head; an earlier one there is replaced whole.

        source: where it came from, for people to read. Raises RunError when the folder cannot be written.
        """
        about = {"form": self.form, "tokenizer": tokenizer_digest(self.tokenizer)}
        record = {"format": 1, "source": source, "output_ids": None, "reward_model": about}
        with written_aside(folder) as aside, no_progress_bars():
            self.model.save_pretrained(aside)
            self.tokenizer.save_pretrained(aside)
            save_file(
                {name: value.detach().contiguous() for name, value in self.head.state_dict().items()}, aside / HEAD
            )
            (aside / SIDECAR).write_text(json.dumps(record) + "\n", encoding="utf-8")

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """What is trained: the trunk (not the language model's output head) and the score head."""
        trunk = {f"trunk.{name}": parameter for name, parameter in self.trunk.inner.named_parameters()}
        return trunk | {f"head.{name}": parameter for name, parameter in self.head.named_parameters()}

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase, where: str = "the reward model") -> None:
        """Raises ModelError when the ids of `tokenizer` mean something else to this model."""
        if tokenizer_digest(tokenizer) != tokenizer_digest(self.tokenizer):
            raise ModelError(
                f"{where} reads token ids of another tokenizer ({len(self.tokenizer)} tokens; the policy's has "
                f"{len(tokenizer)}); train it from the policy's own model"
            )

    def raw(self, readings: Sequence[Reading]) -> Tensor:
        """[n] float32 the scores of all readings, one after another; differentiable between the trunk's begin and
        finish."""
        rows = [row for reading in readings for row in reading.rows]
        hidden: list[Tensor] = []
        places: list[NDArray[np.int64]] = []
        for tree in self.trunk.packs(rows, self.max_positions):
            states = self.trunk.hidden(tree)
            hidden.append(states[torch.from_numpy(tree.token_predictor).to(states.device)])
            places.append(tree.token)
        if not hidden:
            return torch.zeros(0, device=self.trunk.device)
        order = torch.from_numpy(np.argsort(np.concatenate(places))).to(self.trunk.device)
        states = torch.cat(hidden)[order].float()
        # In float32 whatever the compute type: differences of scores are what is learned.
        return nn.functional.linear(states, self.head.weight.float(), self.head.bias.float())[:, 0]

    @torch.no_grad()
    def scores(self, readings: Sequence[Reading]) -> list[Floats]:
        """For each reading its scores, float32 [n]: raw in the outcome form, probabilities in the process form."""
        self.trunk.begin()
        raw = self.raw(readings)
        values = (raw.sigmoid() if self.form == "process" else raw).cpu().numpy()
        return np.split(values, np.cumsum([len(one.steps) for one in readings])[:-1]) if readings else []

    def judge(self, trajectories: Sequence[Trajectory]) -> list[list[float | None]]:
        """For each trajectory: [one score] (outcome), or one for each step, None for a step without a sampled token."""
        readings = [reading(trajectory, self.form) for trajectory in trajectories]
        return [
            verdict(self.form, trajectory, one, scores)
            for trajectory, one, scores in zip(trajectories, readings, self.scores(readings), strict=True)
        ]


def verdict(form: Form, trajectory: Trajectory, read: Reading, scores: Floats) -> list[float | None]:
    """The scores of a reading in the places of the steps they belong to; of an outcome, [the score]."""
    if form == "outcome":
        return [float(scores[0]) if len(scores) else None]
    found: list[float | None] = [None] * len(trajectory.steps)
    for step, score in zip(read.steps, scores, strict=True):
        found[step] = float(score)
    return found


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Equal for tokenizers whose ids mean the same."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]))
    return hashlib.blake2b(vocabulary.encode("ascii"), digest_size=16).hexdigest()


def _read_behind(row: Row, ends: Sequence[int]) -> Row:
    """The row with a token more, `trained` behind each of `ends`: the state there, which would predict what follows,
    has seen all up to the end."""
    parts = ("ids", "trained", "logprobs", "advantages", "step", "versions")
    wider: dict[str, Any] = {name: np.append(values := getattr(row, name), values[-1:]) for name in parts}
    trained = np.zeros(len(row) + 1, np.bool_)
    trained[np.asarray(ends, np.int64) + 1] = True
    # The routes are the policy's: this model's own experts are its own choice.
    return replace(row, **(wider | {"trained": trained, "routing": None}))
