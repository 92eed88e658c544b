"""``latest_checkpointed_iteration.txt``, which names the checkpoint that counts: replaced whole, or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

NAME = "latest_checkpointed_iteration.txt"


def read(folder: str) -> int | None:
    """The iteration that is named; None where there is no checkpoint (or a ``release``)."""
    try:
        return int((Path(folder) / NAME).read_text())
    except (OSError, ValueError):
        return None


@contextlib.contextmanager
def replacing(path: str) -> Iterator[IO[str]]:
    """A file to write; it takes the place of ``path`` when it is on disk, and a kill at any moment leaves the old one.

    Raises:
        OSError: it could not be written; ``path`` is as it was.
    """
    draft = f"{path}.new"
    try:
        with open(draft, "w") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise
    # The new name itself must outlive a power failure, too; not every file system can be asked for that.
    with contextlib.suppress(OSError):
        folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


class Files:
    """Stands in for the object through which Megatron opens checkpoint files, and replaces the tracker as above.

    Args:
        stock: Megatron's own.
        is_remote: whether paths are those of an object store, where a file is replaced whole anyway.
        write: called with the context that writes the tracker; enters it.
    """

    def __init__(
        self,
        stock: Any,
        is_remote: Callable[[], bool],
        write: Callable[[Any], contextlib.AbstractContextManager[IO[str]]],
    ) -> None:
        self._stock, self._is_remote, self._write = stock, is_remote, write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    def open(self, path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        if mode != "w" or os.path.basename(path) != NAME:
            return self._stock.open(path, mode, *args, **options)
        return self._write(
            self._stock.open(path, mode, *args, **options) if self._is_remote() else replacing(str(path))
        )
