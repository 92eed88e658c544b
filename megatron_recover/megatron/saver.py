"""Saves on the leader replica: what came of them, and what the other replicas have to know about it.

Two votes of every agreement tell them: that a save is under way in the background, and that the last one failed. Only
ranks that save say so, so all ranks read the same, and a new leader knows what it has to make up for.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

from megatron_recover.faults import SAVE_STEPS
from megatron_recover.megatron import background, tracker
from megatron_recover.megatron.adapter import Adapter
from megatron_recover.megatron.attempt import Attempt, NotNamed, NotWritten
from megatron_recover.megatron.decisions import DURATION, SIGNAL
from megatron_recover.megatron.disk import disk_problem, free_space
from megatron_recover.telemetry.streams import say

UNDER_WAY, FAILED = "a save is under way", "the last save failed"


class Saver:
    """All saves of a run. One per process; each method is called by all ranks, or by all ranks of the leader."""

    def __init__(self, adapter: Adapter) -> None:
        self.current: Attempt | None = None
        """The attempt that the training thread is busy with; only on ranks that save."""
        self.lost_one = False
        """A leader was lost while it saved in the background. The same on all ranks."""
        self.is_ending = False
        """The job ends after this save (as far as that is known before it)."""
        self._adapter, self._session = adapter, adapter.session
        self._attempts = 0
        self._scheduled: list[Attempt] = []  # in the background and not concluded, oldest first
        self._failed = False
        self._problem: str | None = None
        self._was_under_way = self._had_failed = False  # as of the last agreement
        self._stale: int | None = None
        self._session.vote(UNDER_WAY, background.is_under_way)
        self._session.vote(FAILED, lambda: self._failed)
        adapter.on_leader_change.append(self._take_over)
        adapter.on_agreement.append(self._agreed)

    def _take_over(self) -> None:
        # It may have been finished in time, and not be lost at all; nobody is left who could say.
        self.lost_one = self.lost_one or self._was_under_way
        if self._session.is_leader:
            self._failed = self._had_failed

    def _agreed(self) -> None:
        self._was_under_way = self._session.decisions[UNDER_WAY]
        self._had_failed = self._session.decisions[FAILED]

    def starts(self) -> None:
        """Training begins. A checkpoint that is named already was made by this job's predecessors."""
        settings = _settings()
        if not settings.save:
            return
        named = tracker.read(settings.save)
        is_ours = settings.load and os.path.realpath(settings.load) == os.path.realpath(settings.save)
        self._stale = None if is_ours and named == settings.iteration else named

    def save(self, iteration: int, stock: Callable[[], None]) -> None:
        """One save: by the leader, and by the next one if it is lost before all ranks have come to the end of it."""
        if not self._session.is_leader:
            self._adapter.at("save")
        self._session.by_leader(lambda: self._save(iteration, stock), check=False)
        self.lost_one = False
        if not self.is_unsaved:
            self._stale = None  # what the folder names from now on is this job's

    def finish(self) -> None:
        """Waits until the leader has finished what it saves in the background."""
        from megatron.training import async_utils

        self._session.by_leader(lambda: async_utils.maybe_finalize_async_save(blocking=True), check=False)

    @property
    def is_unsaved(self) -> bool:
        """Whether the last save failed, as of the last agreement."""
        return self._session.decisions[FAILED]

    def explain(self) -> str:
        """Why the last save failed, what is left, and what to do: the end of a sentence."""
        folder = _settings().save
        last = tracker.read(folder)
        why = self._problem or "the disk did not take it"
        resume = (
            f"the last good checkpoint is that of iteration {last}: make room and start again with --load {folder}"
            if last is not None
            else "there is no checkpoint: make room and start again"
        )
        return f"{why} ({folder}); {resume}"

    def at_step(self, step: str) -> None:
        """Marks a step of the save that the training thread is busy with, for telemetry and failure injection."""
        if step == "named":
            self._stale = None
        if self.current is None:
            return
        if self.current in self._scheduled:  # training has gone on since
            self._session.inject("save", self.current.iteration, SAVE_STEPS.index(step))
        else:
            self._adapter.at("save", SAVE_STEPS.index(step))

    def wrote_a_part(self) -> None:
        """One of the files of this rank is on disk (on the thread that writes it)."""
        attempt = self._scheduled[0] if self._scheduled else self.current
        if attempt is not None:
            self._session.watchdog.progress()  # a save that is slow is none that hangs
            self._session.inject("save", attempt.iteration, SAVE_STEPS.index("writing"))

    def check_after_barrier(self) -> None:
        """Raises NotWritten on all ranks of the replica, if one of them has noted a problem."""
        import torch

        if self.current is not None:
            torch.distributed.barrier()
            self.current.check()

    def check_written(self) -> None:
        """All is on disk, and a barrier has followed: now it may be named."""
        if self.current is not None:
            self.current.check()
        self.at_step("written")

    def schedule(self, steps: list[Callable[[], None]]) -> Callable[[], None]:
        """The current attempt goes on in the background. Returns ``steps``, which follow then, as one."""
        assert self.current is not None
        self._scheduled.append(self.current)
        return functools.partial(self._conclude_later, self.current, steps)

    def _conclude_later(self, attempt: Attempt, steps: list[Callable[[], None]]) -> None:
        import torch

        with self._making(attempt):
            for step in steps:
                step()
        torch.distributed.barrier()  # what the first rank noted when it named it
        self._scheduled.remove(attempt)
        self._conclude(attempt)

    def _save(self, iteration: int, stock: Callable[[], None]) -> None:
        import torch

        self._adapter.at("save", SAVE_STEPS.index("begin"))
        if self._is_saved(iteration):
            self._failed = False
            return
        self._attempts += 1
        attempt = Attempt(iteration, self._attempts)
        in_background = _settings().async_save
        with self._making(attempt, join=None if in_background else torch.distributed.barrier):
            stock()
        if not in_background or attempt.problem is not None:
            self._conclude(attempt)

    @contextlib.contextmanager
    def _making(self, attempt: Attempt, join: Callable[[], Any] | None = None) -> Iterator[None]:
        """An attempt that ends in the same way on all ranks of the replica; other errors than a disk's pass through.

        Args:
            attempt: becomes the current one.
            join: the collective in which the others wait when the first rank could not name the checkpoint.
        """
        from torch.distributed.checkpoint.api import CheckpointException

        self.current = attempt
        try:
            with _tolerating_torch_save(attempt):
                yield
        except NotWritten:
            pass
        except NotNamed:
            if join is not None:
                join()
        except CheckpointException as error:  # raised by all ranks at once; the reason is with those that met it
            if (problem := disk_problem(error)) is not None:
                attempt.note(problem)
            if attempt.problem is None:
                raise
        finally:
            self.current = None

    def _conclude(self, attempt: Attempt) -> None:
        import torch

        self._problem = attempt.problem
        self._failed = self._problem is not None
        if not self._failed or torch.distributed.get_rank() != 0:
            return
        settings = _settings()
        free, last = free_space(settings.save), tracker.read(settings.save)
        if last != attempt.iteration:
            from megatron.training.checkpointing import get_checkpoint_name

            unfinished = get_checkpoint_name(settings.save, attempt.iteration, return_base_dir=True)
            shutil.rmtree(unfinished, ignore_errors=True)
        stays = "there is no earlier checkpoint"
        if last is not None:
            stays = f"the last good checkpoint stays, that of iteration {last}"
        say(
            f"the checkpoint of iteration {attempt.iteration} could NOT be saved in {settings.save}: {self._problem}"
            f"{f' ({free})' if free else ''}; {stays}, and what was written of this one is removed. "
            f"{self._what_next(attempt.iteration)}"
        )

    def _what_next(self, iteration: int) -> str:
        settings, decisions = _settings(), self._session.decisions
        interval, end = settings.save_interval, settings.train_iters
        exits = settings.exit_interval and iteration % settings.exit_interval == 0
        if self.is_ending or exits or iteration >= end or decisions[SIGNAL] or decisions[DURATION]:
            return "The job ends here."
        again = "at the end of training"
        if interval and (following := (self._adapter.completed // interval + 1) * interval) <= end:
            again = f"after iteration {following} (--save-interval {interval})"
        return f"Training goes on; make room there, it is tried again {again}."

    def _is_saved(self, iteration: int) -> bool:
        """Whether this job has saved this very state: a lost leader was through with it, or it was saved before.

        A checkpoint that counts is never written over: a kill in the middle would leave it broken, and named. One
        that a predecessor left in the folder loses its name first.
        """
        import torch
        from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine

        found = [False]
        folder = _settings().save
        if torch.distributed.get_rank() == 0 and tracker.read(folder) == iteration:
            # What is saved for a repetition of the iteration in another job differs in the machine's state.
            is_repetition = get_rerun_state_machine().state == RerunState.WILL_RERUN_FROM_CHECKPOINT
            found[0] = iteration != self._stale and not is_repetition
            if not found[0]:
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(folder, tracker.NAME))
            else:
                say(f"the checkpoint of iteration {iteration} is complete already")
        torch.distributed.broadcast_object_list(found, src=0)
        return found[0]


@contextlib.contextmanager
def _tolerating_torch_save(attempt: Attempt) -> Iterator[None]:
    """``--ckpt-format torch`` writes with ``torch.save``, on several ranks between two collectives."""
    import torch

    if _settings().use_dist_ckpt:
        yield
        return
    stock = torch.save

    def save(*args: Any, **options: Any) -> None:
        try:
            if attempt.problem is None:
                stock(*args, **options)
        except Exception as error:
            problem = disk_problem(error)
            if problem is None:
                raise
            attempt.note(problem)

    torch.save = save
    try:
        yield
    finally:
        torch.save = stock


def _settings() -> Any:
    from megatron.training import get_args

    return get_args()
