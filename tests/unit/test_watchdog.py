"""The watchdog thread: what it takes for a rank that hangs, and what it does not."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from megatron_recover.lease import Lease, Stage
from megatron_recover.watchdog import Watchdog


class Watched:
    """A watchdog with short times, and what it said."""

    def __init__(self, folder: Path, progress_timeout_s: float = 0.4, setup_timeout_s: float = 60.0) -> None:
        self.failed = threading.Event()
        self.reason = ""
        self.lease = Lease(folder, 0)
        self.dog = Watchdog(
            self.lease,
            heartbeat_timeout_s=1.0,
            progress_timeout_s=progress_timeout_s,
            setup_timeout_s=setup_timeout_s,
            moving_timeout_s=0.4,
            fail=self._fail,
        )

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *_: object) -> None:
        self.dog.stop()

    def _fail(self, reason: str) -> None:
        self.reason = reason
        self.failed.set()


def test_a_training_thread_that_comes_to_no_new_phase(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Watched(tmp_path) as watched:
        watched.dog.train()
        assert watched.failed.wait(10)
        assert "no progress" in watched.reason
        assert "--recover-progress-timeout 0.4" in watched.reason
        assert "test_a_training_thread" in capfd.readouterr().err  # its stack


@pytest.mark.parametrize("why", ["before training", "progress", "waiting", "never", "finished"])
def test_what_is_no_hang(why: str, tmp_path: Path) -> None:
    with Watched(tmp_path, progress_timeout_s=0.0 if why == "never" else 0.4) as watched:
        if why != "before training":
            watched.dog.train()
        if why == "finished":
            watched.dog.finish()
        limit = time.monotonic() + 1.2
        while time.monotonic() < limit and not watched.failed.is_set():
            if why == "progress":
                watched.dog.progress()
            with watched.dog.waiting() if why == "waiting" else threading.Lock():
                watched.failed.wait(0.1 if why == "progress" else 1.2)
        assert not watched.failed.is_set(), watched.reason


def test_a_reduction_that_does_not_end_although_all_are_there(tmp_path: Path) -> None:
    with Watched(tmp_path) as watched:
        with watched.dog.moving():
            assert watched.failed.wait(10)
        assert "a reduction has not ended" in watched.reason


def test_the_lease_is_renewed_and_follows_the_stage(tmp_path: Path) -> None:
    with Watched(tmp_path, progress_timeout_s=0.0) as watched:
        assert watched.lease.read().stage is Stage.SETTING_UP
        watched.dog.train()
        assert watched.lease.read().stage is Stage.TRAINING
        limit = time.monotonic() + 2.5
        while time.monotonic() < limit:
            assert not watched.lease.read().is_over
            time.sleep(0.02)
        watched.dog.finish()
        assert watched.lease.read().stage is Stage.ENDING


def test_a_setup_that_does_not_end(tmp_path: Path) -> None:
    with Watched(tmp_path, setup_timeout_s=0.4) as watched:
        assert watched.failed.wait(10)
    assert "--recover-setup-timeout 0.4" in watched.reason
