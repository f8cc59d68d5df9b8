"""Names in a recipe become objects here: a registered name, or `module.path:Name` from the user's own code."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from renma.errors import RecipeError


def nearest(name: str, known: list[str]) -> str:
    """A hint for a mistyped name: the nearest known one, or the list."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known))}"


class Registry(Mapping[str, Any]):
    """The things of one kind that a recipe can name. Entries are objects or `module:Name` strings, loaded when used."""

    def __init__(self, kind: str, entries: dict[str, Any] | None = None) -> None:
        self.kind = kind
        self._entries: dict[str, Any] = dict(entries or {})

    def register(self, name: str) -> Callable[[Any], Any]:
        def add(thing: Any) -> Any:
            self._entries[name] = thing
            return thing

        return add

    def __getitem__(self, name: str) -> Any:
        entry = self._entries.get(name)
        if entry is None and ":" in name:
            return load_object(name, self.kind)
        if entry is None:
            raise RecipeError(f"unknown {self.kind} {name!r}: {nearest(name, list(self._entries))}")
        return load_object(entry, self.kind) if isinstance(entry, str) else entry

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (name in self._entries or ":" in name)


def load_object(path: str, kind: str = "object") -> Any:
    """`package.module:Name` or `folder/file.py:Name`, imported.

    Raises RecipeError with the reason when it cannot be.
    """
    module_name, _, attribute = path.partition(":")
    try:
        if module_name.endswith(".py"):
            file = Path(module_name).resolve()
            if not file.is_file():
                raise RecipeError(f"{kind} {path!r}: there is no file {module_name}; give a path from here")
            if str(file.parent) not in sys.path:
                sys.path.insert(0, str(file.parent))
            module_name = file.stem
        elif "" not in sys.path and str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise RecipeError(f"{kind} {path!r} cannot be imported: {error}; check the module path") from error
    if not hasattr(module, attribute):
        raise RecipeError(f"{kind} {path!r}: module {module_name!r} has no {attribute!r}; check the name after ':'")
    return getattr(module, attribute)
