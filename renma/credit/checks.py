"""Options that several estimators share, checked when the recipe is."""

from __future__ import annotations

import math

from renma.errors import RecipeError


def discount(estimator: str, **options: float) -> None:
    """Raise RecipeError when one of the options (gamma, lam) is not in [0, 1]."""
    for name, value in options.items():
        if not 0 <= value <= 1:
            raise RecipeError(f"advantage {estimator}: {name} must be from 0 to 1; got {value}")


def finite(estimator: str, **options: float) -> None:
    """Raise RecipeError when one of the options (a weight) is not a finite number."""
    for name, value in options.items():
        if not math.isfinite(value):
            raise RecipeError(f"advantage {estimator}: {name} must be a finite number; got {value}")
