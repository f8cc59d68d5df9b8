"""Errors that a user can act on: each says what was wrong, where, and what to do.

The command line prints the message of a `RenmaError` on one line and exits with its code; any other exception is a
fault of Renma's and keeps its traceback.
"""

from __future__ import annotations


class RenmaError(Exception):
    """A fault the user can mend. `str(error)` is one line: what was wrong, where, what to do."""

    exit_code = 1


class RecipeError(RenmaError):
    """The recipe (or an override) cannot be run: unknown key, wrong type, contradiction."""

    exit_code = 2


class DataError(RenmaError):
    """A task or data file is missing, empty or malformed."""

    exit_code = 3


class ModelError(RenmaError):
    """A model or tokenizer cannot be found, read or used."""

    exit_code = 4


class RunError(RenmaError):
    """A run folder cannot be written, read or resumed; or a run cannot go on."""

    exit_code = 5


class ContextOverflow(RenmaError):
    """A prompt leaves no room in the model's context for a single sampled token."""
