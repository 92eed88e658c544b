"""Starts real jobs for tests: a hard timeout, stacks of every rank when it is hit, nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from megatron_recover.collectives.runtime_params import MPI_PARAMETERS

REPOSITORY = Path(__file__).resolve().parent.parent
CORE = Path(__file__).resolve().parent / "core"


@dataclass
class Finished:
    """A job that has ended."""

    code: int
    out: str
    err: str
    seconds: float
    results: list[dict[str, Any]] = field(default_factory=list)
    """What the ranks printed as ``RESULT {json}``, in the order in which it came."""

    def explain(self) -> str:
        tail = f"--- out\n{self.out[-6000:]}\n--- err\n{self.err[-6000:]}"
        return f"exit code {self.code} after {self.seconds:.1f} s\n{tail}"


def _end(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        try:
            process.kill()
        except psutil.Error:
            pass
    psutil.wait_procs(processes, timeout=5)


def run(command: Sequence[str], *, timeout: float, env: dict[str, str] | None = None) -> Finished:
    """Runs a command in a session of its own; past ``timeout`` every rank prints its stacks and is killed."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RECOVER_TEST_MARK": mark, **(env or {})}
    begin = time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            list(command), stdout=out, stderr=err, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
        )
        timed_out = False
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
            ours = marked(mark)
            for one in ours:  # programs register faulthandler for SIGUSR1
                if "python" in one.name():
                    one.send_signal(signal.SIGUSR1)
            psutil.wait_procs(ours, timeout=2)
            _end(marked(mark))
            process.kill()
            code = process.wait()
        left = marked(mark)
        _end(left)
        out.seek(0)
        err.seek(0)
        done = Finished(code, out.read(), err.read(), time.monotonic() - begin)
    if timed_out:
        raise AssertionError(f"did not end within {timeout} s: {' '.join(command)}\n{done.explain()}")
    done.results = [
        json.loads(line.split("RESULT ", 1)[1]) for line in done.out.splitlines() if "RESULT {" in line
    ]
    return done


def marked(mark: str) -> list[psutil.Process]:
    """Living processes that were started by the test with this mark, ours excepted."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("RECOVER_TEST_MARK") == mark and process.pid != os.getpid():
                found.append(process)
        except psutil.Error:
            continue
    return found


def mpirun(num_ranks: int, program: Sequence[str], *, timeout: float, env: dict[str, str] | None = None) -> Finished:
    """Runs ``python PROGRAM...`` on ``num_ranks`` ranks of a bare mpirun, without our launcher."""
    binary = str(Path(sys.executable).with_name("mpirun"))
    if not Path(binary).exists():
        binary = shutil.which("mpirun") or binary
    command = [binary, "--with-ft", "ulfm", "--oversubscribe", "--bind-to", "none", "-n", str(num_ranks)]
    if os.geteuid() == 0:
        command.insert(1, "--allow-run-as-root")
    for name, value in MPI_PARAMETERS.items():
        command += ["--mca", name, value]
    job = tempfile.mkdtemp(prefix="recover-test-")
    try:
        return run(
            [*command, sys.executable, *program],
            timeout=timeout,
            env={"MEGATRON_RECOVER_JOB_DIR": job, **(env or {})},
        )
    finally:
        shutil.rmtree(job, ignore_errors=True)
