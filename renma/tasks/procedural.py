"""Tasks that a program makes: reasoning-gym's generators, and plain arithmetic built on one of them.

Any number of tasks, made when asked for. Two cautions that the sources here take care of:

- reasoning-gym seeds item i with `seed + i`, so that the sets of seed 0 and seed 1 share all tasks but one. Seeds are
  hashed first.
- A small space of tasks repeats itself whatever the seed. `split` divides all possible prompts, by a hash, into those
  for training and those held out, so that the two never meet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

from renma.errors import DataError, RecipeError
from renma.registry import nearest
from renma.seeding import seed_for
from renma.tasks.base import checked_index, same_prompt_key
from renma.types import Task

Split = Literal["all", "train", "held_out"]
_ATTEMPTS = 1000


class ReasoningGymTasks:
    """The tasks of one reasoning-gym generator, by its name there (`chain_sum`, `countdown`, …).

    config: the generator's own settings. split: "train" and "held_out" never share a prompt, whatever their seeds and
    sizes; `held_out_share` of all possible prompts is held out. Task i depends on (seed, i) and the settings only; a
    prompt may occur more than once. `Task.answer` is the generator's answer (text), `Task.data` its metadata.

    Raises RecipeError for an unknown generator or setting, DataError when reasoning-gym is not installed or the split
    has no task.
    """

    def __init__(
        self,
        *,
        dataset: str = "chain_sum",
        size: int = 10_000,
        seed: int = 0,
        config: dict[str, Any] | None = None,
        split: Split = "all",
        held_out_share: float = 0.1,
    ) -> None:
        if size < 1:
            raise RecipeError(f"tasks of {dataset!r}: size must be at least 1, got {size}")
        if split not in ("all", "train", "held_out"):
            raise RecipeError(f"tasks of {dataset!r}: split must be all, train or held_out, got {split!r}")
        if not 0 < held_out_share < 1:
            raise RecipeError(f"tasks of {dataset!r}: held_out_share must lie between 0 and 1, got {held_out_share}")
        self.dataset, self.size, self.seed, self.split = dataset, size, seed, split
        self._share = held_out_share
        draws = size if split == "all" else size * _ATTEMPTS
        # Below 2**31: some generators hand the seed on to numpy, which takes 32 bits, and add the index to it.
        self._items = _generator(dataset, draws, seed_for("reasoning-gym", dataset, seed) % 2**31, config or {})

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Task]:
        return (self[i] for i in range(self.size))

    def __getitem__(self, index: int) -> Task:
        checked_index(index, self.size)
        for attempt in range(1 if self.split == "all" else _ATTEMPTS):
            task = self._task(index, self._items[index + attempt * self.size])
            if self.split == "all" or self._held_out(task.prompt) == (self.split == "held_out"):
                return task
        raise DataError(
            f"tasks of {self.dataset!r}: none of {_ATTEMPTS} prompts belongs to split {self.split!r}; "
            "the settings allow too few different tasks: widen them or change held_out_share"
        )

    def _held_out(self, prompt: str) -> bool:
        return seed_for("held out", same_prompt_key(prompt)) < self._share * 2**63

    def _id(self, index: int) -> str:
        return f"{self.seed}-{index}" if self.split == "all" else f"{self.split}-{self.seed}-{index}"

    def _task(self, index: int, entry: dict[str, Any]) -> Task:
        data = dict(entry.get("metadata", {}))
        return Task(self._id(index), entry["question"], entry["answer"], f"reasoning_gym/{self.dataset}", data)


class ArithmeticTasks(ReasoningGymTasks):
    """Sums such as `7 + 25 - 4 =`, from reasoning-gym's chain_sum without its sentence of instruction.

    `Task.answer` is an int; `Task.data` has `terms` (their number) and `expression`; the family is `arithmetic/3-terms`
    and so on, so that results can be told apart by difficulty. `prefix` is put before the expression.
    """

    def __init__(
        self,
        *,
        size: int = 10_000,
        seed: int = 0,
        min_terms: int = 2,
        max_terms: int = 4,
        min_digits: int = 1,
        max_digits: int = 2,
        prefix: str = "",
        split: Split = "all",
        held_out_share: float = 0.1,
    ) -> None:
        self._prefix = prefix
        config = {
            "min_terms": min_terms,
            "max_terms": max_terms,
            "min_digits": min_digits,
            "max_digits": max_digits,
        }
        super().__init__(
            dataset="chain_sum", size=size, seed=seed, config=config, split=split, held_out_share=held_out_share
        )

    def _task(self, index: int, entry: dict[str, Any]) -> Task:
        expression, terms = entry["metadata"]["expression"], entry["metadata"]["num_terms"]
        data = {"expression": expression, "terms": terms}
        prompt = f"{self._prefix}{expression} ="
        return Task(self._id(index), prompt, int(entry["answer"]), f"arithmetic/{terms}-terms", data)


def _generator(name: str, size: int, seed: int, config: dict[str, Any]) -> Any:
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise DataError(
            f"tasks of {name!r} need the package reasoning-gym ({error}): pip install reasoning-gym"
        ) from error
    if name not in DATASETS:
        raise RecipeError(f"reasoning-gym has no generator {name!r}; {nearest(name, list(DATASETS))}")
    known = [field.name for field in dataclasses.fields(DATASETS[name][1]) if field.name not in ("seed", "size")]
    for key in config:
        if key not in known:
            raise RecipeError(f"tasks of {name!r}: config has no setting {key!r}; {nearest(key, known)}")
    try:
        return create_dataset(name, size=size, seed=seed, **config)
    except (AssertionError, TypeError, ValueError) as error:
        raise RecipeError(f"tasks of {name!r}: reasoning-gym refuses config {config}: {error}; correct it") from error
