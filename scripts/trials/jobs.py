"""Runs the job of a case: output into files, a hard deadline with the stacks of all ranks, nothing left behind."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from megatron_recover.faults import ONCE_PHASES, PHASES, Fault

SCRIPTS = Path(__file__).resolve().parents[1]
REPOSITORY = SCRIPTS.parent
_MARK = "MEGATRON_RECOVER_TRIAL"
_STACKS_S = 3.0
_LEAVE_S = 15.0
_HAPPENED = re.compile(r"fault injection: rank (\d+) .*? in (?:iteration (\d+), )?phase ([a-z-]+)(?:, [a-z]+ (\d+))?")


@dataclass(frozen=True)
class Ended:
    """A job that has ended, or was ended at its deadline."""

    code: int
    timed_out: bool
    seconds: float
    out: str
    err: str

    @property
    def last_words(self) -> str:
        """The last line of stderr that says something."""
        lines = [line for line in self.err.splitlines() if line.strip()]
        return lines[-1].strip()[:300] if lines else "nothing on stderr"


def run(command: Sequence[str], folder: Path, deadline_s: float) -> Ended:
    """Runs a command; its output goes to ``out.log`` and ``err.log`` in ``folder``.

    Past the deadline every rank prints its stacks into ``err.log``, and everything the command started is ended.
    """
    mark = secrets.token_hex(8)
    paths = [str(REPOSITORY), str(SCRIPTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), _MARK: mark}
    begin = time.monotonic()
    with open(folder / "out.log", "wb") as out, open(folder / "err.log", "wb") as err:
        process = subprocess.Popen(
            list(command), stdout=out, stderr=err, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
        )
        timed_out = False
        try:
            process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            timed_out = True
            _print_stacks(mark)
        finally:
            _end(process, mark)
    return Ended(
        process.returncode,
        timed_out,
        time.monotonic() - begin,
        (folder / "out.log").read_text(errors="replace"),
        (folder / "err.log").read_text(errors="replace"),
    )


def happened(err: str, faults: Iterable[Fault]) -> tuple[Fault, ...]:
    """Those of the faults whose ranks announced them on stderr just before they did them."""
    seen = {
        (int(rank), int(iteration or 0), phase, int(index or 0))
        for rank, iteration, phase, index in _HAPPENED.findall(err)
    }
    return tuple(
        fault
        for fault in faults
        if (
            fault.rank,
            0 if fault.phase in ONCE_PHASES else fault.iteration,
            fault.phase,
            fault.index if PHASES[fault.phase] else 0,
        )
        in seen
    )


def _started(mark: str) -> list[psutil.Process]:
    """Living processes with this mark in their environment, wherever their parents are by now."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(_MARK) == mark:
                found.append(process)
        except psutil.Error:
            continue
    return found


def _is_rank(process: psutil.Process) -> bool:
    """The process that MPI's runtime started (a rank's keeper passes the signal on to it)."""
    try:
        parent = process.parent()
        return "OMPI_COMM_WORLD_RANK" in process.environ() and (
            parent is None or "OMPI_COMM_WORLD_RANK" not in parent.environ()
        )
    except psutil.Error:
        return False


def _print_stacks(mark: str) -> None:
    for process in _started(mark):
        if _is_rank(process):
            try:
                process.send_signal(signal.SIGUSR1)
            except psutil.Error:
                continue
    time.sleep(_STACKS_S)


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """Ends what is left: first through the launcher, which clears up, then each process by its id."""
    for _ in range(2):  # the launcher asks the ranks after one, and ends them after two
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)
    try:
        process.wait(_LEAVE_S)
    except subprocess.TimeoutExpired:
        pass
    left = _started(mark)
    for one in left:
        try:
            one.kill()
        except psutil.Error:
            continue
    psutil.wait_procs(left, timeout=5)
    if process.poll() is None:
        process.kill()
        process.wait()
