"""The protocol of a peer's process: one JSON job a line on standard input, one JSON answer a line on standard output.

A job names the file of its episodes (`path`) and may say `limited: false`, to leave its token set out. Standard output
is for answers only: whatever the peer's libraries print there goes to standard error instead.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

Sampler = Callable[[list[dict[str, Any]], list[int] | None], dict[str, Any]]
"""(episodes, allowed ids or None) -> the answer: seconds, tokens, and what else there is to say."""


def serve(start: Callable[[], Sampler]) -> None:
    """Start the peer, say {"ready": true}, answer jobs until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sample = start()
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        job = json.loads(line)
        with open(job["path"], encoding="utf-8") as file:
            asked = json.load(file)
        allowed = asked["allowed"] if job.get("limited", True) else None
        print(json.dumps(sample(asked["episodes"], allowed)), file=answers)
