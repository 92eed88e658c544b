"""Launchers at work, for the tests of the command line: real mpirun, small programs in place of training scripts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
from harness import REPOSITORY, Finished, marked, run

PROGRAMS = Path(__file__).resolve().parent / "programs"
ENV = {"PYTHONPATH": f"{REPOSITORY}:{PROGRAMS}"}
CLI = [sys.executable, "-m", "megatron_recover.cli"]
LIMIT_S = 60.0


def line(
    *script: str, n: int = 2, options: tuple[str, ...] = (), entry: str | None = "plain_entry"
) -> list[str]:
    """Command line of a launcher; ``entry`` None: ranks are run as they are for a user, with their keepers."""
    own = () if entry is None else ("--entry", entry)
    return [*CLI, "launch", "-n", str(n), *own, *options, "--", *script]


def launch(*script: str, n: int = 2, options: tuple[str, ...] = (), entry: str | None = "plain_entry") -> Finished:
    """Runs a launcher to its end."""
    return run(line(*script, n=n, options=options, entry=entry), timeout=LIMIT_S, env=ENV)


class Running:
    """A launcher that is still at work. Its processes are killed at the end of the test (fixture ``running``)."""

    def __init__(
        self, *script: str, n: int = 2, options: tuple[str, ...] = (), entry: str | None = "plain_entry"
    ) -> None:
        self.mark = f"launch-{os.getpid()}-{time.monotonic_ns()}"
        self.process = subprocess.Popen(
            line(*script, n=n, options=options, entry=entry),
            env={**os.environ, **ENV, "RECOVER_TEST_MARK": self.mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def wait_until_ready(self, num_ranks: int = 2) -> list[int]:
        """Pids of the ranks, once each of them has said ``ready PID``."""
        assert self.process.stdout is not None
        pids: list[int] = []
        while len(pids) < num_ranks:
            word, _, pid = self.process.stdout.readline().partition(" ")
            if word == "TRY":
                continue
            assert word == "ready", self.process.communicate(timeout=5)
            pids.append(int(pid))
        time.sleep(0.3)  # one scan of the launcher
        return pids

    def end(self) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        out, err = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, out, err


def is_working(process: psutil.Process) -> bool:
    """Not ended, and not a zombie that waits for a slow init either."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end_all(jobs: list[Running]) -> None:
    """Kills what is left of launchers and their jobs."""
    for job in jobs:
        for process in marked(job.mark):
            process.kill()
