"""Tasks from JSON Lines files: one object a line, columns named by the recipe."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from renma.errors import DataError
from renma.registry import nearest
from renma.tasks.base import TaskList
from renma.types import Task

# Where a set that Renma's recipes read is published: dataset on the Hugging Face hub, and what to know about it.
_HUB = {
    "math/gsm8k_train.jsonl": ("openai/gsm8k", "config main, split train, columns as they are"),
    "math/gsm8k_test.jsonl": ("openai/gsm8k", "config main, split test, columns as they are"),
    "math/svamp.jsonl": ("ChilleD/SVAMP", "all rows; columns id, question (body and question), answer, equation, kind"),
    "math/mawps_train.jsonl": ("MU-NLPC/Calc-mawps", "columns id, question, answer, equation_prefix"),
    "math/mawps_test.jsonl": ("MU-NLPC/Calc-mawps", "columns id, question, answer, equation_prefix"),
}


def find_file(path: str, data_dir: str | None = None) -> Path:
    """A data file: an absolute path as it is, else looked up under data_dir, $RENMA_DATA, ../shared/data and here.

    Raises DataError that names every place searched, and the Hugging Face dataset where one is known.
    """
    wanted = Path(path).expanduser()
    if wanted.is_absolute():
        places = {"": wanted.parent}
        candidates = [wanted]
    else:
        places = {"data_dir": Path(data_dir).expanduser()} if data_dir else {}
        if os.environ.get("RENMA_DATA"):
            places["$RENMA_DATA"] = Path(os.environ["RENMA_DATA"]).expanduser()
        places |= {"default": Path("..") / "shared" / "data", "here": Path(".")}
        candidates = [place / wanted for place in places.values()]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    searched = ", ".join(f"{place} ({name})" if name else str(place) for name, place in places.items())
    hint = "give data_dir, or set RENMA_DATA to the folder that holds it"
    if path in _HUB:
        dataset, about = _HUB[path]
        hint += f"; on the Hugging Face hub: datasets.load_dataset({dataset!r}), then .to_json ({about})"
    raise DataError(f"there is no data file {path!r}; searched {searched}; {hint}")


def read_rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of each line that is not blank.

    Raises DataError for a line that is not a JSON object, a file that is not UTF-8, and a file with no line at all.
    """
    number = 0
    empty = True
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                empty = False
                yield number, _row(file, number, line)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file}, after line {number}: not UTF-8 text ({error.reason}); save the file as UTF-8"
        ) from error
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}; check its permissions") from error
    if empty:
        raise DataError(f"{file} is empty; it needs one JSON object a line")


def _row(file: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{file}, line {number}: not JSON ({error.msg} at column {error.colno}); correct or remove the line"
        ) from error
    except RecursionError as error:
        raise DataError(f"{file}, line {number}: JSON nested too deeply; correct or remove the line") from error
    if not isinstance(row, dict):
        raise DataError(f"{file}, line {number}: a {type(row).__name__}, not an object; write {{...}} on each line")
    return row


def column(row: Mapping[str, Any], name: str, file: Path, number: int) -> Any:
    """The value of a column. Raises DataError with the nearest name the row has."""
    if name not in row:
        hint = nearest(name, list(row)) if row else "the object has none"
        raise DataError(f"{file}, line {number}: there is no column {name!r}; {hint}")
    return row[name]


class JsonlTasks(TaskList):
    """Tasks from a JSON Lines file, read once.

    question, answer: the columns of the prompt and the answer. id: the column of the id; None numbers the lines from 1.
    family: the name of the set, the file's stem when None. where: only rows whose columns equal these values. limit:
    the first so many of them. The other columns are in `Task.data`. For data_dir see `find_file`.

    Raises DataError, one line, for a file that is missing, empty or malformed, a missing column, an id used twice, and
    a `where` that leaves nothing.
    """

    def __init__(
        self,
        *,
        path: str,
        question: str = "question",
        answer: str = "answer",
        id: str | None = None,
        family: str | None = None,
        data_dir: str | None = None,
        limit: int | None = None,
        where: dict[str, Any] | None = None,
    ) -> None:
        file = find_file(path, data_dir)
        tasks: list[Task] = []
        seen: dict[str, int] = {}
        for number, row in read_rows(file):
            if any(column(row, key, file, number) != value for key, value in (where or {}).items()):
                continue
            prompt = column(row, question, file, number)
            if not isinstance(prompt, str) or not prompt.strip():
                raise DataError(f"{file}, line {number}: column {question!r} holds no text; correct or remove the line")
            identity = str(number if id is None else column(row, id, file, number))
            if identity in seen:
                raise DataError(f"{file}, line {number}: id {identity!r} is already that of line {seen[identity]}")
            seen[identity] = number
            rest = {key: value for key, value in row.items() if key not in (question, answer, id)}
            gold = column(row, answer, file, number)
            tasks.append(Task(identity, prompt, gold, family or file.stem, rest))
            if limit is not None and len(tasks) >= limit:
                break
        super().__init__(tasks, f"{file}" + (f" where {where}" if where else ""))
