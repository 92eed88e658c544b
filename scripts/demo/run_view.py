"""What the user sees while one run of the demo goes on: a bar on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from run_log import Failure, parse_events, parse_line

_PLAIN_EVERY = 10
"""Where there is no terminal, one line per this many iterations."""


class RunView:
    """Follows a run by its log lines and, where it has one, its ``events.jsonl``.

    Args:
        title: which run this is.
        iterations: number that it is to have.
        replicas: number at start.
        events: events file to follow, or None.
        console: where to show it.
    """

    def __init__(
        self, title: str, iterations: int, replicas: int, events: Path | None, console: Console
    ) -> None:
        self._title = title
        self._console = console
        self._events = events
        self._seen = 0
        self._started = time.monotonic()
        self._live = console.is_terminal
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn(f"{title:<17}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=console,
            disable=not self._live,
        )
        self._task = self._progress.add_task(
            f"starting {replicas} replicas (loading PyTorch and Megatron)", total=iterations
        )

    def __enter__(self) -> RunView:
        if not self._live:
            self._console.print(f"Training {self._title} ...", highlight=False)
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def line(self, text: str) -> None:
        """Take one line of the log."""
        point = parse_line(text)
        if point is None:
            return
        self._progress.update(self._task, completed=point.iteration, description=f"loss {point.loss:.4f}")
        if not self._live and (point.iteration % _PLAIN_EVERY == 0 or point.iteration == 1):
            self._console.print(
                f"  iteration {point.iteration}/{point.total}: loss {point.loss:.4f}", highlight=False
            )

    def tick(self) -> None:
        """Look for new events."""
        if self._events is None or not self._events.is_file():
            return
        lines = self._events.read_text(encoding="utf-8", errors="replace").split("\n")
        complete = lines[:-1]  # what follows the last line break is still being written
        for event in parse_events(complete[self._seen :]):
            text = describe(event)
            if text is not None:
                self._console.print(
                    f"  {text}", highlight=False, style="yellow" if event["event"] == "failure" else "green"
                )
        self._seen = len(complete)

    def finish(self, success: bool) -> None:
        """Say that the run is over."""
        self.tick()
        seconds = time.monotonic() - self._started
        word = "done" if success else "failed"
        self._progress.update(self._task, description=word)
        if not self._live:
            self._console.print(f"  {word} after {seconds:.0f} s", highlight=False)


def describe(event: dict[str, Any]) -> str | None:
    """An event in one line for the console, or None for those that need none."""
    if event["event"] == "failure":
        failure = Failure(
            iteration=event["iteration"],
            ranks=event.get("ranks") or [],
            replicas=event.get("replicas") or [],
            phase=event.get("phase"),
            index=event.get("index"),
            detect_ms=event.get("detect_ms"),
        )
        ranks = ", ".join(map(str, failure.ranks)) or "?"
        return f"iteration {failure.iteration}: rank {ranks} lost ({failure.where})"
    if event["event"] == "repair":
        alive, milliseconds = event.get("alive") or [], event.get("repair_ms")
        took = "" if milliseconds is None else f" in {milliseconds:.1f} ms"
        return f"iteration {event['iteration']}: repaired{took}, {len(alive)} replicas go on"
    if event["event"] == "commit" and event.get("redone"):
        return f"iteration {event['iteration']}: {event['redone']} microbatches redone, none lost"
    return None
