"""Rewards that a trained model gives: of whole trajectories, or of each step.

Episodes end one by one, but those that end in the same turns of the event loop can be scored together, in one packed
forward pass, so that a shared prompt is computed once. What was scored beside it changes a score by rounding only, but
which episodes meet depends on timing: a run that must repeat bit for bit scores each alone (`prepare`'s `together`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from renma.errors import ModelError, RunError
from renma.learning.reward_model import Form, Reading, RewardModel, reading, verdict
from renma.models.policy import Policy
from renma.rewards.base import NamedReward
from renma.types import Floats, Trajectory

STAGE = "stage"
"""The `source` that means: the reward model which this run trains."""

Waiting = tuple[Reading, "asyncio.Future[Floats]"]


class ScoreBatch:
    """Gathers the readings that are awaited in successive turns of the event loop into one call of the model.

    together: False scores each reading by itself, which makes its last bits independent of all others.
    """

    def __init__(self, model: RewardModel, *, together: bool = True) -> None:
        self.model, self.together = model, together
        self.calls = 0
        self._waiting: list[Waiting] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    async def score(self, read: Reading) -> Floats:
        """[n] the reading's scores."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # an earlier loop may have ended before its batch was scored
            self._loop, self._waiting = loop, []
        future: asyncio.Future[Floats] = loop.create_future()
        self._waiting.append((read, future))
        if len(self._waiting) == 1:
            loop.call_soon(self._flush, loop, 1)
        return await future

    def _flush(self, loop: asyncio.AbstractEventLoop, seen: int) -> None:
        if len(self._waiting) > seen:  # as long as each turn brings more, the next may
            loop.call_soon(self._flush, loop, len(self._waiting))
            return
        waiting = [(read, future) for read, future in self._waiting if not future.done()]  # done: withdrawn
        self._waiting = []
        step = max(1, len(waiting)) if self.together else 1
        for start in range(0, len(waiting), step):
            self._answer(waiting[start : start + step])

    def _answer(self, waiting: Sequence[Waiting]) -> None:
        self.calls += 1
        try:
            found = self.model.scores([read for read, _ in waiting])
        except Exception as error:  # every one that waits is told
            for _, future in waiting:
                future.set_exception(error)
            return
        for (_, future), scores in zip(waiting, found, strict=True):
            future.set_result(scores)


class ModelReward:
    """What the two learned rewards share: where their model is, and how it is asked.

    source: the folder of a reward model, or "stage": the one that this run trains. The model is there after
    `prepare` or `use`.
    """

    form: ClassVar[Form]

    def __init__(self, *, source: str = STAGE) -> None:
        self.source = source
        self._batch: ScoreBatch | None = None
        if source != STAGE and not Path(source).expanduser().is_dir():
            raise ModelError(f"reward model: there is no folder {source!r}; give one, or source: {STAGE}")

    @property
    def ready(self) -> bool:
        return self._batch is not None

    def folder(self, stage: Path | None) -> Path:
        """The folder of its model. Raises RunError when that is the run's own and there is none."""
        if self.source != STAGE:
            return Path(self.source).expanduser()
        if stage is None:
            raise RunError(f"a reward has source: {STAGE}, but this run trains no reward model; give a folder")
        return stage

    def use(self, model: RewardModel, *, together: bool = True) -> None:
        """Ask this model from now on. Raises ModelError when it is of the other form."""
        if model.form != self.form:
            raise ModelError(f"the reward model of {self.source!r} has the {model.form} form, not {self.form}")
        self._batch = ScoreBatch(model, together=together)

    async def asked(self, trajectory: Trajectory) -> list[float | None]:
        """As RewardModel.judge, of one trajectory."""
        if self._batch is None:
            raise RunError(
                f"the reward model of source {self.source!r} is not there yet: it is asked before it has been trained "
                "or loaded"
            )
        read = reading(trajectory, self.form)
        return verdict(self.form, trajectory, read, await self._batch.score(read))


class OutcomeModelReward(ModelReward):
    """The score that a trained outcome reward model gives the trajectory."""

    form = "outcome"

    async def __call__(self, trajectory: Trajectory) -> float | None:
        return (await self.asked(trajectory))[0]


class ProcessModelReward(ModelReward):
    """For each step, how probably it is good, as a trained process reward model judges.

    source: as in `reward_model`. gain: what the step has changed instead, p_k - p_(k-1), with p_0 = 0: the sum over an
    episode is then the last probability, and more steps are no merit in themselves.
    """

    form = "process"

    def __init__(self, *, source: str = STAGE, gain: bool = False) -> None:
        super().__init__(source=source)
        self._gain = gain

    async def __call__(self, trajectory: Trajectory) -> Sequence[float | None]:
        scores = await self.asked(trajectory)
        if not self._gain:
            return scores
        gains: list[float | None] = []
        before = 0.0
        for score in scores:
            gains.append(None if score is None else score - before)
            before = before if score is None else score
        return gains


def learned(rewards: Sequence[NamedReward]) -> list[ModelReward]:
    """Those of the rewards that a model gives."""
    functions: list[object] = [reward.function for reward in rewards]
    return [function for function in functions if isinstance(function, ModelReward)]


def ready(rewards: Sequence[NamedReward]) -> list[NamedReward]:
    """The rewards without those whose model is not there yet: what can judge before the reward model is trained."""
    return [r for r in rewards if not isinstance(r.function, ModelReward) or r.function.ready]


def prepare(
    rewards: Sequence[NamedReward],
    policy: Policy,
    *,
    stage: Path | None,
    together: bool = True,
    max_positions: int = 4096,
) -> None:
    """Load the models that the rewards ask, each folder once, in the policy's type and on its device.

    stage: the folder of the reward model that this run has trained; None: it trains none. together: score side by side
    what ends together (`ScoreBatch`). Raises ModelError when a folder holds no reward model, or one that reads another
    tokenizer's ids.
    """
    models: dict[Path, RewardModel] = {}
    for reward in learned(rewards):
        folder = reward.folder(stage).resolve()
        if folder not in models:
            found = RewardModel.load(
                folder, dtype=policy.compute_dtype, device=policy.device, max_positions=max_positions
            )
            found.check_tokenizer(policy.tokenizer, f"the reward model in {folder}")
            models[folder] = found
        reward.use(models[folder], together=together)
