"""Where Megatron runs: on CUDA GPUs, or on the CPU (laptops, continuous integration, the demo)."""

from __future__ import annotations

from megatron_recover.devices import cpu
from megatron_recover.errors import UserError

CHOICES = ("auto", "cuda", "cpu")


def resolve(name: str) -> str:
    """Turn ``auto``, ``cuda`` or ``cpu`` into the device to use: ``cuda`` or ``cpu``.

    Raises:
        UserError: the name is none of the three, or ``cuda`` is asked for and torch sees no GPU.
    """
    if name not in CHOICES:
        raise UserError(f"--recover-device {name} is not known: use auto, cuda or cpu")
    if name == "cpu" or (name == "auto" and cpu.installed()):
        return "cpu"  # without importing torch, which install() must see first
    if cpu.installed():
        raise UserError("--recover-device cuda comes too late: this process already runs on the CPU")
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if name == "auto":
        return "cpu"
    raise UserError(
        "--recover-device cuda: torch sees no CUDA GPU on this machine; use --recover-device cpu to run "
        "there, or check the driver and the CUDA build of torch"
    )


def install(name: str) -> str:
    """Prepare this process for the device, before Megatron is imported, and return ``cuda`` or ``cpu``.

    Raises:
        UserError: as ``resolve``.
    """
    device = resolve(name)
    if device == "cpu":
        cpu.install()
    return device
