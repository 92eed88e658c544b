"""What ranks that do not lead would have written since the last agreement, kept until it is known to be written.

All living ranks have come to an agreement, the leader too, so what it had to print and write before is done.
When the leader is lost after that, the next one first hands over what it kept. So a line or point may come
twice (the old leader may have got so far), but none is lost.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

_Call = tuple[str, tuple[Any, ...], dict[str, Any]]


class ReplayWriter:
    """Stands in for a TensorBoard or wandb writer: anything may be called (``x.log``, ``x.config.update``), and is
    remembered. Nothing is returned."""

    def __init__(self, path: str = "", calls: list[_Call] | None = None) -> None:
        self._path = path
        self._calls: list[_Call] = [] if calls is None else calls

    def __getattr__(self, name: str) -> ReplayWriter:
        if name.startswith("__"):
            raise AttributeError(name)
        return ReplayWriter(f"{self._path}.{name}" if self._path else name, self._calls)

    def __call__(self, *args: Any, **options: Any) -> None:
        self._calls.append((self._path, args, options))


def forget(writer: ReplayWriter) -> None:
    """All ranks have agreed: nothing of it is needed any more."""
    writer._calls.clear()


def replay(source: ReplayWriter, writer: Any) -> None:
    """Makes the remembered calls on a real writer."""
    for path, args, options in source._calls:
        attrgetter(path)(writer)(*args, **options)
    source._calls.clear()
