"""What a run leaves behind is closed whatever happens."""

from __future__ import annotations

from typing import Any

import pytest

from renma.errors import RunError
from renma.training.records import Records


def test_a_failed_write_that_comes_up_at_the_end_does_not_keep_the_log_open() -> None:
    closed: list[str] = []

    class Store:
        def close(self) -> None:
            closed.append("store")
            raise RunError("trajectories could not be written")

    class Log:
        def close(self) -> None:
            closed.append("log")

    nothing: Any = None
    records = Records(nothing, nothing, Log(), Store(), nothing)  # type: ignore[arg-type]
    with pytest.raises(RunError, match="could not be written"):
        records.close()
    assert closed == ["store", "log"]
