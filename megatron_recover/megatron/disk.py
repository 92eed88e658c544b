"""Tells a disk that cannot take a checkpoint from every other error, and says how full it is."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

_TORCH_WRITER = ("PytorchStreamWriter", "inline_container", "cannot be opened", "Parent directory")
"""Words in the messages of torch's own file writer, which keeps to itself what the system told it."""


class DiskFailure(RuntimeError):
    """Stands for a disk's error among the results of a writing thread; its text is what the disk said."""


def disk_problem(error: BaseException) -> str | None:
    """What the disk said (no space, quota, read-only, I/O error, ...), if that is behind ``error``; else None."""
    errors = list(_behind(error, set()))
    for one in errors:
        if isinstance(one, DiskFailure):
            return str(one)
        # A number comes from the system; peers of the replica that are gone are no matter of the disk.
        if isinstance(one, OSError) and one.errno is not None and not isinstance(one, ConnectionError):
            return one.strerror or str(one)
    if any(isinstance(one, RuntimeError) and word in str(one) for one in errors for word in _TORCH_WRITER):
        return "a file could not be written (torch does not say why)"
    return None


def free_space(folder: str) -> str:
    """How much room there is, in words; empty where that cannot be told."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return ""
    return f"{_size(usage.free)} of {_size(usage.total)} free"


def _behind(error: BaseException | None, seen: set[int]) -> Iterator[BaseException]:
    """An error, those that caused it, and those that ranks or threads sent (``CheckpointException.failures``)."""
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    yield error
    failures: Any = getattr(error, "failures", None)
    for failure in failures.values() if isinstance(failures, dict) else ():
        sent = failure[0] if isinstance(failure, tuple) else failure
        if isinstance(sent, BaseException):
            yield from _behind(sent, seen)
    yield from _behind(error.__cause__, seen)
    yield from _behind(error.__context__, seen)


def _size(number: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            break
        number /= 1024
    return f"{number:.0f} {unit}" if number >= 10 or unit == "bytes" else f"{number:.1f} {unit}"
