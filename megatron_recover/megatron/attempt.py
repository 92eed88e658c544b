"""One try to save a checkpoint, by all ranks of a replica, on a disk that may fail under any one of them.

Megatron's save alternates between work that one rank does with the disk and collectives of the replica. A rank that
raised in between would leave the others waiting. So it notes its problem where the others can read it, goes on
through the collectives, and at fixed points behind one of them all ranks look at what was noted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_recover.megatron.disk import disk_problem


class NotWritten(Exception):
    """A rank has noted a problem. Raised on every rank of the replica at the same point."""


class NotNamed(Exception):
    """The checkpoint must not be named. Raised on the replica's first rank alone, when it was to name it."""


class Attempt:
    """One try. Every rank of the replica makes the same ones, in the same order.

    Args:
        iteration: the iteration whose state is saved.
        number: counts the attempts of this replica.
    """

    def __init__(self, iteration: int, number: int) -> None:
        from torch.distributed import PrefixStore
        from torch.distributed.distributed_c10d import _get_default_store

        self.iteration = iteration
        # The store in which the replica's ranks met: it does not take part in any collective.
        self._store = PrefixStore(f"recover save {number}", _get_default_store())

    def note(self, problem: str) -> None:
        """Lets all ranks of the replica know, from their next collective on."""
        place = self._store.add("problems", 1)
        self._store.set(f"problem {place}", problem)

    @property
    def problem(self) -> str | None:
        """What was noted first, by whichever rank."""
        return self._store.get("problem 1").decode() if self._store.add("problems", 0) else None

    def check(self) -> None:
        """Called by all ranks behind a collective.

        Raises:
            NotWritten: on all of them.
        """
        if self.problem is not None:
            raise NotWritten


def tolerate(
    owner: Any, name: str, current: Callable[[], Attempt | None], instead: Callable[..., Any] = lambda *args: None
) -> None:
    """Wraps what a rank does with the disk between two collectives: a failure of the disk is noted, not raised.

    Args:
        owner: module or class.
        name: of the function there.
        current: the attempt that is under way; None: the function is the stock one.
        instead: gives the result of a call that failed.
    """
    stock = getattr(owner, name)

    @functools.wraps(stock)
    def on_disk(*args: Any, **options: Any) -> Any:
        attempt = current()
        if attempt is None:
            return stock(*args, **options)
        try:
            return stock(*args, **options)
        except Exception as error:
            problem = disk_problem(error)
            if problem is None:
                raise
            attempt.note(problem)
            return instead(*args)

    setattr(owner, name, on_disk)
