from __future__ import annotations

import pytest
import torch

from renma.errors import ModelError
from renma.models import devices
from renma.models.devices import multiplies_bfloat16, pick_device, pick_dtype

CPU = torch.device("cpu")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Pretends which accelerators and CPU instructions there are."""

    def pretend(*, gpus: int = 0, mps: bool = False, flags: tuple[str, ...] = (), onednn: bool = False) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {name: True for name in flags})
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn)

    return pretend


def test_auto_prefers_cuda_then_mps_then_cpu(machine) -> None:
    machine(gpus=1, mps=True)
    assert pick_device("auto").type == "cuda"
    machine(mps=True)
    assert pick_device("auto").type == "mps"
    machine()
    assert pick_device("auto").type == "cpu"


def test_case_9_5_a_machine_without_gpu_runs_on_its_cpu(machine) -> None:
    machine()
    device = pick_device()
    assert device == CPU and pick_dtype("auto", device) is torch.float32


@pytest.mark.parametrize("wanted", ["cuda", "cuda:0", "mps", "warp", "meta"])
def test_a_device_that_is_not_there_is_refused_with_the_fix(machine, wanted: str) -> None:
    machine()
    with pytest.raises(ModelError, match="auto") as caught:
        pick_device(wanted)
    assert wanted in str(caught.value) and "\n" not in str(caught.value)


def test_a_gpu_number_that_is_too_high_is_refused(machine) -> None:
    machine(gpus=2)
    assert pick_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ModelError, match="has 2 GPU"):
        pick_device("cuda:2")


@pytest.mark.parametrize(
    ("flags", "onednn", "expected"),
    [
        ((), False, torch.float32),
        (("avx512_f",), True, torch.float32),  # oneDNN says yes, but would emulate
        (("avx512_bf16",), True, torch.bfloat16),
        (("amx_bf16",), True, torch.bfloat16),
        (("bf16",), True, torch.bfloat16),
        (("amx_bf16",), False, torch.float32),
    ],
)
def test_auto_takes_bfloat16_only_where_it_is_native(machine, flags, onednn, expected) -> None:
    machine(flags=flags, onednn=onednn)
    assert pick_dtype("auto", CPU) is expected


def test_a_named_type_is_taken_as_named(machine) -> None:
    machine()
    assert pick_dtype("bfloat16", CPU) is torch.bfloat16
    machine(flags=("amx_bf16",), onednn=True)
    assert pick_dtype("float32", CPU) is torch.float32
    with pytest.raises(ModelError, match="float32 or bfloat16"):
        pick_dtype("float16", CPU)


def test_this_machines_flags_can_be_read() -> None:
    assert multiplies_bfloat16(CPU) in (True, False)
    assert not multiplies_bfloat16(torch.device("mps"))
    assert devices.pick_device("cpu") == CPU
