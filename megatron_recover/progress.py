"""A running count on the console: a live bar on a terminal, a plain line now and then in a log."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_PLAIN_INTERVAL_S = 30.0
_REFRESH_INTERVAL_S = 0.1


class Counter:
    """Shows how many items (and how many of a finer unit, with its rate) are done; everything goes to stderr.

    Args:
        title: what is happening.
        total: number of items where known; without it there is no bar, only the count.
        units: plural names of the item and of the finer unit.
        enabled: False shows nothing.
    """

    def __init__(
        self, title: str, total: int | None, *, units: tuple[str, str], enabled: bool = True
    ) -> None:
        self._title = title
        self._total = total
        self._units = units
        self._enabled = enabled
        self._started = self._shown = time.monotonic()
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Counter:
        if self._enabled and sys.stderr.isatty():
            self._start_bar()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def update(self, items: int, fine: int) -> None:
        """Report the totals so far; cheap enough to be called for every item."""
        now = time.monotonic()
        interval = _REFRESH_INTERVAL_S if self._progress is not None else _PLAIN_INTERVAL_S
        if not self._enabled or (now - self._shown < interval and items != self._total):
            return
        self._shown = now
        rate = fine / max(now - self._started, 1e-9)
        text = f"{items:,} {self._units[0]}, {fine:,} {self._units[1]}, {rate:,.0f} {self._units[1]}/s"
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=items, text=text)
        elif self._progress is None and items != self._total:
            print(f"{self._title}: {text}", file=sys.stderr, flush=True)

    def _start_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = [SpinnerColumn(), TextColumn("{task.description}")]
        if self._total is not None:
            columns.append(BarColumn())
        columns += [TextColumn("{task.fields[text]}"), TimeElapsedColumn()]
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._task = self._progress.add_task(self._title, total=self._total, text="")
        self._progress.start()
