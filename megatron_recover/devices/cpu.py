"""Run Megatron's own training loop on a machine without a GPU.

Megatron assumes CUDA: it asks ``torch.cuda`` for devices, streams, events and random states, and creates
tensors with ``device="cuda"``. ``install()`` answers for the CPU, before Megatron is imported: a CUDA device
named anywhere means the CPU, a stream is the thread that runs, the CUDA random generator is torch's default
one. No name of Megatron is touched here; ``megatron/cpu_flags.py`` sets its flags (Gloo among them), and
``megatron/on_cpu.py`` changes what flags cannot.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import os
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

_FACTORIES = (
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "linspace",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randn",
    "randn_like",
    "randperm",
    "tensor",
    "zeros",
    "zeros_like",
)
"""Functions of ``torch`` to which Megatron passes a GPU as the device, or ``pin_memory=True``."""

_NO_OPERATION = (
    "_lazy_init",
    "check_error",
    "empty_cache",
    "ipc_collect",
    "manual_seed_all",
    "nvtx.range_pop",
    "nvtx.range_push",
    "reset_peak_memory_stats",
    "set_device",
    "set_stream",
    "synchronize",
)
_ZERO = (
    "current_device",
    "max_memory_allocated",
    "max_memory_reserved",
    "memory_allocated",
    "memory_reserved",
)

_EXPECTED_WARNINGS = (
    r"(Transformer Engine and )?Apex (are|is) not installed",
    r"Only transformer-engine>=1\.7\.0 supports MoE experts",
    r"'pin_memory' argument is set as true but no accelerator is found",
)
"""What Megatron says, several times in every process, because libraries that need a GPU are not there."""

_installed = False


def installed() -> bool:
    """Whether this process runs Megatron on the CPU."""
    return _installed


def install() -> None:
    """Redirect the names of ``torch.cuda`` to the CPU for the whole process. A second call does nothing.

    Raises:
        RuntimeError: Megatron is already imported, and so has already looked for a GPU.
    """
    global _installed
    if _installed:
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError("devices.cpu.install() must run before megatron is imported")
    # torch.compile is bypassed below; this stops what would start Dynamo in another way.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    # Megatron refuses tensor parallelism without it on the GPU generation that we report.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

    import torch

    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    _redirect_tensors(torch)
    _redirect_cuda(torch)
    _redirect_random(torch)
    # Compiling for a CPU takes longer than a small model trains; importing the compiler alone takes 3 s.
    _set(torch, "compile", lambda model=None, **options: model if model is not None else lambda f: f)
    for message in _EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    _installed = True


class _Stream:
    """A CUDA stream or event where each operation is over when its call returns, which is how a CPU works."""

    cuda_stream = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _answer(None)

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def record_event(self, event: _Stream | None = None) -> _Stream:
        return event or _Stream()

    def elapsed_time(self, end: object) -> float:
        return 0.0

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0


def _answer(value: Any) -> Callable[..., Any]:
    """A function that takes anything and returns ``value``; a new one each time, as Dynamo insists."""
    return lambda *args, **options: value


def _set(owner: Any, name: str, value: object) -> None:
    """Set ``owner.name``, where the name may have dots. One that this torch does not have is an error."""
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    getattr(owner, last)
    setattr(owner, last, value)


def _redirect_tensors(torch: Any) -> None:
    """Take a GPU as the CPU where it is given as the device, and let tensors answer as CUDA ones would."""
    cpu = torch.device("cpu")

    def is_cuda(value: object) -> bool:
        if isinstance(value, str):
            return value.startswith("cuda")
        if isinstance(value, torch.device):
            return bool(value.type == "cuda")
        return isinstance(value, int) and not isinstance(value, bool)

    def on_cpu(function: Callable[..., Any], devices_are_positional: bool = False) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **options: Any) -> Any:
            if is_cuda(options.get("device")):
                options["device"] = cpu
            options.pop("pin_memory", None)
            if devices_are_positional:
                args = tuple(cpu if is_cuda(value) else value for value in args)
            return function(*args, **options)

        return wrapper

    for name in _FACTORIES:
        _set(torch, name, on_cpu(getattr(torch, name)))
    tensor = torch.Tensor
    for name in ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"):
        _set(tensor, name, on_cpu(getattr(tensor, name)))
    _set(tensor, "to", on_cpu(tensor.to, devices_are_positional=True))
    for owner in (tensor, torch.nn.Module):
        _set(owner, "cuda", lambda self, *args, **options: self)
    _set(tensor, "pin_memory", lambda self, *args, **options: self)
    _set(tensor, "record_stream", _answer(None))

    # The optimizer sorts its parameters by the names of CUDA tensor types.
    tensor_type = tensor.type

    def type_of(self: Any, *args: Any, **options: Any) -> Any:
        found = tensor_type(self, *args, **options)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

    _set(tensor, "type", type_of)


def _redirect_cuda(torch: Any) -> None:
    """Report one GPU, and give streams, events, memory counters and markers that do nothing."""
    cuda = torch.cuda
    stream = _Stream()
    for name in _NO_OPERATION:
        _set(cuda, name, _answer(None))
    for name in _ZERO:
        _set(cuda, name, _answer(0))
    # Megatron must see a GPU; what torch itself does for the accelerator at hand must go on seeing none.
    _set(torch.accelerator, "is_available", _answer(False))
    _set(torch.accelerator, "current_accelerator", _answer(None))
    _set(torch.accelerator, "device_count", _answer(0))
    _set(cuda, "is_available", _answer(True))
    _set(cuda, "device_count", _answer(1))
    _set(cuda, "is_current_stream_capturing", _answer(False))
    _set(cuda, "_lazy_call", lambda function, **options: function())
    for name in ("Stream", "Event"):
        _set(cuda, name, _Stream)
    for name in ("current_stream", "default_stream"):
        _set(cuda, name, _answer(stream))
    for name in ("stream", "device"):
        _set(cuda, name, _answer(contextlib.nullcontext()))
    _set(cuda, "memory_stats", lambda *args: collections.defaultdict(int))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    _set(cuda, "mem_get_info", _answer((memory, memory)))
    # Compute capability 9.0: old enough for no flags of newer GPUs, new enough for Megatron's own minimum.
    properties = types.SimpleNamespace(
        name="cpu", major=9, minor=0, total_memory=memory, multi_processor_count=1
    )
    _set(cuda, "get_device_properties", _answer(properties))
    _set(cuda, "get_device_capability", _answer((properties.major, properties.minor)))
    _set(cuda, "get_device_name", _answer(properties.name))


def _redirect_random(torch: Any) -> None:
    """Make the CUDA random generator the CPU's own, which dropout and initialisation draw from there."""
    generator = torch.default_generator
    # Megatron also sets the states of generators directly.
    _set(torch.cuda, "default_generators", (generator,))
    _set(torch.cuda, "manual_seed", lambda seed: generator.manual_seed(int(seed)))
    for owner in (torch.cuda, torch.cuda.random):
        _set(owner, "get_rng_state", lambda *args, **options: generator.get_state())
        _set(owner, "set_rng_state", lambda state, *args, **options: generator.set_state(state))
    # With one generator for both, Megatron's warning that the CPU's was used for CUDA is always true.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )
