"""The tutorial's code, as written, runs and learns."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"


def code(page: str) -> str:
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.S | re.M)
    assert blocks
    return "\n".join(blocks)


@pytest.mark.timeout(300)
def test_the_tutorial_runs_as_written_and_its_agent_learns(tmp_path: Path) -> None:
    script = tmp_path / "tutorial.py"
    script.write_text(code("tutorial.md"), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "runs" / "crossing" / "summary.json").read_text())
    lights = summary["sets"]["new-lights"]
    assert lights["cold_start"]["success"] < 0.6
    assert lights["after"]["success"] > 0.85
    assert (tmp_path / "runs" / "crossing" / "report.html").exists()
