"""What ranks that do not lead would have written since the last agreement, kept until it is known to be written.

All living ranks have come to an agreement, the leader too, so what it had to print and write before is done.
When the leader is lost after that, the next one first hands over what it kept. So a line or point may come
twice (the old leader may have got so far), but none is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class ReplayWriter:
    """Stands in for a TensorBoard or wandb writer: any method may be called, and is remembered."""

    def __init__(self) -> None:
        self._calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)

        def remember(*args: Any, **options: Any) -> None:
            self._calls.append((name, args, options))

        return remember

    def _forget(self) -> None:
        self._calls.clear()

    def _replay(self, writer: Any) -> None:
        for name, args, options in self._calls:
            getattr(writer, name)(*args, **options)
        self._calls.clear()


def forget(writer: ReplayWriter) -> None:
    """All ranks have agreed: nothing of it is needed any more."""
    writer._forget()


def replay(source: ReplayWriter, writer: Any) -> None:
    """Makes the remembered calls on a real writer."""
    source._replay(writer)
