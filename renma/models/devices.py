"""Where a policy computes, and in which number type."""

from __future__ import annotations

import torch

from renma.errors import ModelError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def pick_device(wanted: str = "auto") -> torch.device:
    """The device named, or for `auto` the first there is of cuda, mps, cpu.

    Raises ModelError for a device that is unknown or that this machine lacks.
    """
    if wanted == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise ModelError(f"model.device {wanted!r} is no device: use auto, cpu, cuda, cuda:N or mps") from error
    if device.type not in ("cpu", "cuda", "mps"):
        raise ModelError(f"model.device {wanted!r} is not supported: use auto, cpu, cuda, cuda:N or mps")
    if device.type == "cuda" and not torch.cuda.is_available():
        reason = "no NVIDIA or AMD GPU is visible" if _built_for_gpu() else "the installed torch is a CPU build"
        raise ModelError(f"model.device {wanted!r}: {reason}; set model.device to auto or cpu, or install a GPU torch")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelError(
            f"model.device {wanted!r}: this machine has {torch.cuda.device_count()} GPU(s), numbered from 0"
        )
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ModelError(f"model.device {wanted!r}: torch finds no Metal GPU here; set model.device to auto")
    return device


def _built_for_gpu() -> bool:
    return torch.version.cuda is not None or torch.version.hip is not None


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether the device has bfloat16 instructions; where it has none they are emulated, slower than float32.

    For a CPU torch's own `_is_mkldnn_bf16_supported` says yes on any AVX-512, emulation included, so the instruction
    flags are read as well. For mps the answer is no: older Apple chips emulate, and torch does not tell which.
    """
    if device.type == "cuda":
        with torch.cuda.device(device):
            return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu":
        return False
    flags = torch.cpu.get_capabilities()
    native = any(flags.get(name, False) for name in ("amx_bf16", "avx512_bf16", "bf16"))
    return native and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pick_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """The compute type: as named, or for `auto` bfloat16 where the device multiplies it natively, else float32."""
    if wanted == "auto":
        return torch.bfloat16 if multiplies_bfloat16(device) else torch.float32
    if wanted not in _DTYPES:
        raise ModelError(f"model.dtype {wanted!r} is unknown: use auto, float32 or bfloat16")
    return _DTYPES[wanted]
