"""`renma new environment NAME`: a working environment with a working test, to start from."""

from __future__ import annotations

import keyword
import re
import sys
from pathlib import Path
from string import Template

from renma.errors import RenmaError, RunError

_TEMPLATES = Path(__file__).parent / "scaffolds"


def new_environment(name: str, folder: Path) -> list[Path]:
    """Write NAME.py (an environment and its tasks) and test_NAME.py into `folder`; gives their paths.

    Raises RenmaError for a name that is no good module name, or when a file is there already or cannot be written;
    nothing is written then.
    """
    _check_name(name)
    names = {"module": name, "class_name": _class_name(name)}
    files = {
        folder / f"{name}.py": "environment.py.tmpl",
        folder / f"test_{name}.py": "test_environment.py.tmpl",
    }
    for path in files:
        if path.exists():
            raise RunError(f"{path} is there already; choose another name or --folder, or move it away")
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, template in files.items():
            text = Template((_TEMPLATES / template).read_text(encoding="utf-8")).substitute(names)
            with open(path, "x", encoding="utf-8") as file:
                written.append(path)
                file.write(text)
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        raise RunError(f"cannot write in {folder}: {error.strerror}; choose another --folder") from error
    return written


def recipe_lines(name: str, folder: Path = Path(".")) -> str:
    """The lines of a recipe that use the environment, with paths as seen from here."""
    module = folder / f"{name}.py"
    return (
        f"tasks: {{type: {module}:{_class_name(name)}Tasks, size: 1000}}\n"
        f"environment: {{type: {module}:{_class_name(name)}}}"
    )


def _check_name(name: str) -> None:
    problem = ""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        problem = "is not a module name (small letters, digits, '_', a letter first)"
    elif keyword.iskeyword(name) or name in sys.stdlib_module_names or name in ("renma", "test"):
        problem = "is taken by Python or Renma"
    if problem:
        raise RenmaError(f"environment name {name!r} {problem}; a valid name is {_valid(name)!r}")


def _valid(name: str) -> str:
    """A valid name as near as possible to `name`."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    plain = re.sub(r"[^a-z0-9]+", "_", words.lower()).strip("_").lstrip("0123456789_")
    if not plain:
        return "my_environment"
    if keyword.iskeyword(plain) or plain in sys.stdlib_module_names or plain in ("renma", "test"):
        return f"{plain}_environment"
    return plain


def _class_name(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))
