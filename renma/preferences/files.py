"""Preferences and step labels from JSON Lines files."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from typing import Any, cast, get_args

from renma.errors import DataError
from renma.preferences.base import judged, pair
from renma.preferences.written import TooLong, Writer, writer_for
from renma.rollout.runner import Runner
from renma.tasks.files import column, find_file, read_rows
from renma.types import Group, Message, Role, Task, Trajectory

MadeOf = Callable[[Writer, dict[str, Any], int], Awaitable[Group]]
"""(writer, a line's columns, its number) -> the group that the line tells of."""


class _Conversations:
    """Lines with a prompt and what an assistant said to it, as text or as lists of {"role", "content"} messages."""

    def __init__(
        self, path: str, data_dir: str | None, runner: Runner, renderer: Any, limit: int | None, drop_long: bool
    ) -> None:
        self._file = find_file(path, data_dir)
        self._runner, self._renderer = runner, renderer
        self._limit, self._drop_long = limit, drop_long
        self.dropped = 0

    async def groups(self, made_of: MadeOf) -> list[Group]:
        """The group that `made_of` makes of each line; DataError names the line of one that cannot be read."""
        self.dropped = 0
        writer = await writer_for(self._runner, self._renderer)
        found: list[Group] = []
        for number, row in read_rows(self._file):
            if self._limit is not None and len(found) >= self._limit:
                break
            try:
                found.append(await made_of(writer, row, number))
            except TooLong as error:
                if not self._drop_long:
                    raise self._fault(number, f"{error}; shorten it, or set drop_long: true") from error
                self.dropped += 1
            except DataError as error:
                raise error if str(error).startswith(str(self._file)) else self._fault(number, str(error)) from error
        if not found:
            raise DataError(f"{self._file}: every line is longer than the model's context; take a longer one")
        return found

    async def _written(
        self, writer: Writer, number: int, member: int, prompt: Sequence[Message], said: Sequence[Message]
    ) -> Trajectory:
        if not prompt:
            raise self._fault(number, "there is no prompt before what the assistant says")
        if not said or said[0].role != "assistant":
            raise self._fault(number, "what is judged must begin with an assistant's message")
        if any(a.role == b.role == "assistant" for a, b in pairwise(said)):
            raise self._fault(number, "two assistant's messages follow each other; join them, each is an action")
        task = Task(str(number), prompt[-1].text, family=self._file.stem)
        return await writer.trajectory(task, member, prompt, said)

    def _messages(self, value: Any, number: int, name: str, role: Role) -> list[Message]:
        """A text is one message of `role`."""
        if isinstance(value, str):
            return [Message(role, value)]
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self._fault(number, f"{name!r} must be text or a list of messages")
        return [self._message(item, number, name) for item in value]

    def _message(self, item: dict[str, Any], number: int, name: str) -> Message:
        role, content = item.get("role"), item.get("content")
        if not isinstance(role, str) or role not in get_args(Role) or not isinstance(content, str):
            known = ", ".join(get_args(Role))
            raise self._fault(number, f"a message of {name!r} needs a role ({known}) and a text as content")
        if item.get("tool_calls"):
            raise self._fault(
                number,
                f"a message of {name!r} has tool_calls, whose spelling is the policy's own; write the call in content "
                "as the policy would",
            )
        return Message(cast(Role, role), content, tool_call_id=item.get("tool_call_id"), name=item.get("name"))

    def _fault(self, number: int, what: str) -> DataError:
        return DataError(f"{self._file}, line {number}: {what}")


class JsonlPreferences(_Conversations):
    """Pairs from a JSON Lines file with a prompt, a chosen and a rejected continuation.

    prompt, chosen, rejected: the columns. Each is text, or a list of {"role", "content"} messages; a continuation of
    several turns holds what the environment or the user answered between the assistant's messages, each of which is
    an action. Where there is no prompt column, the prompt is the messages that both conversations begin with.
    data_dir: see `find_file`. limit: the first so many pairs. drop_long: leave out what does not fit the context
    (counted in `dropped`) instead of stopping there.

    Raises DataError, naming the line, for one that is not such a pair.
    """

    def __init__(
        self,
        *,
        path: str,
        runner: Runner,
        renderer: Any,
        prompt: str = "prompt",
        chosen: str = "chosen",
        rejected: str = "rejected",
        data_dir: str | None = None,
        limit: int | None = None,
        drop_long: bool = False,
    ) -> None:
        super().__init__(path, data_dir, runner, renderer, limit, drop_long)
        self._prompt, self._chosen, self._rejected = prompt, chosen, rejected

    async def pairs(self) -> list[Group]:
        return await self.groups(self._pair)

    async def _pair(self, writer: Writer, row: dict[str, Any], number: int) -> Group:
        said = [
            self._messages(column(row, name, self._file, number), number, name, "assistant")
            for name in (self._chosen, self._rejected)
        ]
        if self._prompt in row:
            prompt = self._messages(row[self._prompt], number, self._prompt, "user")
        else:
            shared = _shared(*said)
            prompt, said = said[0][:shared], [messages[shared:] for messages in said]
        if said[0] == said[1]:
            raise self._fault(number, "chosen and rejected are the same; remove the line")
        chosen, rejected = [
            await self._written(writer, number, member, prompt, messages) for member, messages in enumerate(said)
        ]
        return pair(chosen, rejected)


class JsonlStepLabels(_Conversations):
    """Judged steps from a JSON Lines file with a prompt, a continuation and a label for each of its actions.

    prompt, said, labels: the columns. The first two are as in `jsonl`; labels is a list with one entry for each of the
    assistant's messages: a number from 0 (wrong) to 1 (right), or null where nobody judged. data_dir, limit,
    drop_long: as in `jsonl`.

    Raises DataError, naming the line, for one that is not so.
    """

    def __init__(
        self,
        *,
        path: str,
        runner: Runner,
        renderer: Any,
        prompt: str = "prompt",
        said: str = "said",
        labels: str = "labels",
        data_dir: str | None = None,
        limit: int | None = None,
        drop_long: bool = False,
    ) -> None:
        super().__init__(path, data_dir, runner, renderer, limit, drop_long)
        self._prompt, self._said, self._labels = prompt, said, labels

    async def judged(self) -> list[Group]:
        return await self.groups(self._judged)

    async def _judged(self, writer: Writer, row: dict[str, Any], number: int) -> Group:
        prompt = self._messages(column(row, self._prompt, self._file, number), number, self._prompt, "user")
        said = self._messages(column(row, self._said, self._file, number), number, self._said, "assistant")
        labels = column(row, self._labels, self._file, number)
        trajectory = await self._written(writer, number, 0, prompt, said)
        if not isinstance(labels, list) or not all(map(_is_label, labels)):
            raise self._fault(number, f"{self._labels!r} must be a list of numbers from 0 to 1, or null")
        if len(labels) != len(trajectory.steps):
            raise self._fault(number, f"{len(labels)} labels for {len(trajectory.steps)} messages of the assistant")
        return Group(trajectory.task, (judged(trajectory, labels),))


def _is_label(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and 0 <= value <= 1)


def _shared(first: Sequence[Message], second: Sequence[Message]) -> int:
    """How many messages both begin with, up to an assistant's: that is where what is judged begins."""
    shared = 0
    while shared < min(len(first), len(second)) and first[shared] == second[shared]:
        shared += 1
    while shared and not all(len(m) > shared and m[shared].role == "assistant" for m in (first, second)):
        shared -= 1
    return shared
