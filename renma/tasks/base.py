"""The contract of a task source: a length and an item for every index, the same on every machine and in every run.

A source holds no cursor. Where a run stands in its data is one integer (tasks/order.py), all that a checkpoint keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from renma.errors import DataError
from renma.types import Task


@runtime_checkable
class TaskSource(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Task:
        """The task at an index in [0, len). Raises IndexError outside, so that `for task in source` works."""
        ...


class TaskList:
    """A source over tasks that are already there. Raises DataError when there is none."""

    def __init__(self, tasks: Sequence[Task], name: str = "task list") -> None:
        if not tasks:
            raise DataError(f"{name}: there is no task in it; check what it was made from")
        self._tasks = tuple(tasks)

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: int) -> Task:
        return self._tasks[checked_index(index, len(self._tasks))]

    def __iter__(self) -> Iterator[Task]:
        return iter(self._tasks)


def checked_index(index: int, length: int) -> int:
    """`index`, or IndexError: a negative index is a mistake here, never the end of the source."""
    if not 0 <= index < length:
        raise IndexError(f"task {index} of a source of {length}")
    return index


def same_prompt_key(prompt: str) -> str:
    """Equal for prompts that differ only in spacing and letter case."""
    return " ".join(prompt.split()).casefold()


def disjoint(source: TaskSource, *others: TaskSource) -> TaskList:
    """The tasks of `source` whose prompt occurs in none of the others: a held-out set, given the training sources.

    Prompts are compared without regard to spacing and letter case. Raises DataError when nothing is left.
    """
    taken = {same_prompt_key(other[i].prompt) for other in others for i in range(len(other))}
    kept = [task for task in (source[i] for i in range(len(source))) if same_prompt_key(task.prompt) not in taken]
    if not kept:
        raise DataError(f"all {len(source)} tasks also occur in the sources they must differ from; use another source")
    return TaskList(kept)
