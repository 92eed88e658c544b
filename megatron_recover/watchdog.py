"""The thread that renews a rank's lease and ends a rank that makes no progress.

Three things can keep a rank from ever coming to the next agreement while its process lives, and each has its watch:

- the process does nothing at all (stopped, Python's lock held): this thread does not run either, the lease runs out
  and the keeper ends the process (``lease``, ``keeper``);
- the training thread hangs, in a collective of its own replica or in an endless loop: no phase change for the progress
  timeout (before training: the setup timeout), waiting for other replicas not counted; this thread ends the process;
- the engine thread hangs while it moves data although all peers are there: likewise, after the repair timeout.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

from megatron_recover.lease import SETUP_LEASE_S, Lease, Stage
from megatron_recover.timeouts import SETUP_TIMEOUT_S

ENDING_TIMEOUT_S = 60.0
"""Lease of a rank that is about to end: exit handlers may upload for a while."""

_TICK_S = 0.25


class Watchdog:
    """Watches over this process. ``progress`` and ``waiting`` are for the training thread, ``moving`` for the engine.

    Args:
        lease: renewed here.
        heartbeat_timeout_s: lease during training.
        progress_timeout_s: how long the training thread may go without a phase change; 0: for ever.
        setup_timeout_s: the same before training, while models and data sets are built.
        moving_timeout_s: how long the engine may take to move one bucket when all peers are there.
        fail: ends the process as a failure that the others repair; called on this thread with the reason.
        is_fenced: others may take this rank for dead without killing it (MPI's own detector does): then a rank whose
            lease has run out kills itself.
    """

    def __init__(
        self,
        lease: Lease,
        *,
        heartbeat_timeout_s: float,
        progress_timeout_s: float,
        setup_timeout_s: float = SETUP_TIMEOUT_S,
        moving_timeout_s: float,
        fail: Callable[[str], None],
        is_fenced: bool = False,
    ) -> None:
        self._lease = lease
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._progress_timeout_s = progress_timeout_s
        self._setup_timeout_s = setup_timeout_s
        self._moving_timeout_s = moving_timeout_s
        self._fail = fail
        self._is_fenced = is_fenced
        self._is_training = self._is_waiting = self._is_finished = False
        self._progress_at = self._beat_at = time.monotonic()
        self._moving_since: float | None = None
        self._moving_limit_s = moving_timeout_s
        self.longest_silence_s = 0.0
        """Longest time between two renewals of the lease during training: how near it came to the timeout."""
        self._end = threading.Event()
        lease.enter(Stage.SETTING_UP, SETUP_LEASE_S)
        self._thread = threading.Thread(target=self._main, name="recover-watchdog", daemon=True)
        self._thread.start()

    def train(self) -> None:
        """Training begins: from here on the heartbeat timeout holds, and progress is watched. May be called again."""
        if not self._is_training:
            self._progress_at = time.monotonic()
            self._is_training = True
            self._lease.enter(Stage.TRAINING, self._heartbeat_timeout_s)

    def finish(self) -> None:
        """All living ranks have agreed that training is over."""
        self._is_training, self._is_finished = False, True
        self._lease.enter(Stage.ENDING, ENDING_TIMEOUT_S)

    def stop(self) -> None:
        """Ends the thread: the lease is not renewed any more, and nothing is looked at."""
        self._end.set()
        self._thread.join()

    def progress(self) -> None:
        """The training thread has come to another phase."""
        self._progress_at = time.monotonic()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, the training thread waits for other replicas, which have watchdogs of their own."""
        self._is_waiting = True
        try:
            yield
        finally:
            self._progress_at = time.monotonic()
            self._is_waiting = False

    @contextlib.contextmanager
    def moving(self, share: float = 1.0) -> Iterator[None]:
        """Inside, the engine moves data between ranks that are all there; for at most this share of the timeout."""
        self._moving_limit_s = share * self._moving_timeout_s
        self._moving_since = time.monotonic()
        try:
            yield
        finally:
            self._moving_since = None

    def check(self) -> None:
        """Kills this process if others may have taken it for dead: call before anything that they would see."""
        if self._is_fenced and self._is_training and time.monotonic() - self._beat_at > self._heartbeat_timeout_s:
            os.write(2, b"megatron_recover: this rank was silent for too long and is taken for dead: it ends\n")
            os.kill(os.getpid(), signal.SIGKILL)

    def _main(self) -> None:
        tick = min(_TICK_S, self._heartbeat_timeout_s / 8)
        while not self._end.wait(tick):
            self.check()
            now = time.monotonic()
            away, self._beat_at = now - self._beat_at, now
            self._lease.renew()
            if self._is_training:
                self.longest_silence_s = max(self.longest_silence_s, away)
            if away > 4 * tick:  # this process was not running: that is no fault of its threads
                self._progress_at += away
                if self._moving_since is not None:
                    self._moving_since += away
                continue
            self._look(now)

    def _look(self, now: float) -> None:
        stuck = now - self._progress_at
        flag, limit = "--recover-progress-timeout", self._progress_timeout_s
        if not self._is_training:
            flag, limit = "--recover-setup-timeout", self._setup_timeout_s
        moving_since = self._moving_since
        if not self._is_finished and not self._is_waiting and 0 < limit < stuck:
            self._give_in(
                f"its training thread has made no progress for {stuck:.0f} s ({flag} {limit:g}); "
                "the stacks above show where it is"
            )
        elif moving_since is not None and now - moving_since > self._moving_limit_s:
            what = (
                "a part of a reduction has not ended for {:.0f} s although all ranks are in it"
                if self._moving_limit_s == self._moving_timeout_s
                else "its gradient was not ready to be reduced for {:.0f} s, and others wait for it"
            )
            flag = f" (--recover-repair-timeout {self._moving_timeout_s:g})"
            self._give_in(what.format(now - moving_since) + flag)

    def _give_in(self, reason: str) -> None:
        with contextlib.suppress(Exception):
            faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
        self._fail(reason)
