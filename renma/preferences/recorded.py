"""Preferences from what an earlier run has stored."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from renma.agents.renderers.encoding import decode
from renma.errors import DataError
from renma.preferences.base import at_most, best_and_worst, check_options, with_noise
from renma.preferences.outcomes import from_outcomes
from renma.rollout.store import read_records
from renma.types import Group

CHECKED = 16  # trajectories whose tokens are held against their text


class RecordedPreferences:
    """Best against worst of each group that a run has stored.

    path: the run's folder. phase: which of its trajectories ("train"). noise: the probability that a label is turned
    round. max_pairs: at most so many pairs (of judged steps: groups), drawn at random. threshold: the return from which
    on an attempt counts as solved, for labels of steps; None: as its environment said.

    The token ids are taken as they were sampled, with their log-probabilities. Raises DataError when the run has none,
    or they belong to another tokenizer.
    """

    def __init__(
        self,
        *,
        path: str,
        tokenizer: PreTrainedTokenizerBase,
        phase: str = "train",
        noise: float = 0.0,
        max_pairs: int | None = None,
        threshold: float | None = None,
        seed: int = 0,
    ) -> None:
        check_options("preference source 'run'", noise, max_pairs)
        self._folder = Path(path).expanduser() / "trajectories"
        if not self._folder.is_dir():
            raise DataError(f"{path} holds no trajectories; give the folder of a run, such as runs/quickstart")
        self._tokenizer, self._phase, self._seed = tokenizer, phase, seed
        self._noise, self._limit, self._threshold = noise, max_pairs, threshold

    def groups(self) -> list[Group]:
        """The stored groups, in the order they were trained on."""
        records = read_records(self._folder, phase=self._phase)
        found = [
            tuple(record.trajectory for record in members)
            for _, members in groupby(records, key=lambda record: (record.step, record.group))
        ]
        if not found:
            raise DataError(f"{self._folder} holds no trajectories of phase {self._phase!r}; choose another phase")
        groups = [Group(members[0].task, members) for members in found]
        self._check_tokens(groups)
        return groups

    async def pairs(self) -> list[Group]:
        found = [made for group in self.groups() if (made := best_and_worst(group)) is not None]
        return with_noise(at_most(found, self._limit, self._seed), self._noise, self._seed)

    async def judged(self) -> list[Group]:
        groups = at_most(self.groups(), self._limit, self._seed)
        return from_outcomes(groups, threshold=self._threshold, noise=self._noise, seed=self._seed)

    def _check_tokens(self, groups: list[Group]) -> None:
        for trajectory in [t for group in groups for t in group.trainable][:CHECKED]:
            for step in trajectory.steps:
                if decode(self._tokenizer, step.action_ids.tolist()) != step.action.raw:
                    raise DataError(
                        f"{self._folder}: the tokens of task {trajectory.task.id!r} do not spell what was written "
                        f"({step.action.raw[:40]!r}): that run had another tokenizer; use the same model"
                    )
