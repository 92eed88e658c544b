"""Ends a job whose launcher was killed. Started by the launcher: ``python -m megatron_recover.guard ID DIR``.

A launcher that gets SIGKILL (from the out-of-memory killer, say) can clear up nothing, and mpirun does not
reliably end its ranks then: sent SIGTERM at that moment, it left them running in half of the cases tried.
This process waits at the other end of a pipe. It sees the launcher go, whatever the reason, and does what the
launcher would have done.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_recover.processes import JobProcesses

_ENDED = b"ended"


@contextmanager
def guarded(job_id: str, job_dir: Path) -> Iterator[None]:
    """While the block runs, a guard stands by to end the job should this process be killed."""
    guard = subprocess.Popen(
        [sys.executable, "-m", __name__, job_id, str(job_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        try:
            guard.communicate(_ENDED, timeout=10.0)
        except (OSError, subprocess.TimeoutExpired):
            guard.kill()
            guard.wait()


def main(job_id: str, job_dir: str) -> None:
    """Returns when the launcher has ended, after clearing up if it did not do so itself."""
    if sys.stdin.buffer.read() == _ENDED:
        return
    processes = JobProcesses(job_id)
    processes.end_all()
    processes.remove_leftovers()
    shutil.rmtree(job_dir, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:3])
    os._exit(0)
