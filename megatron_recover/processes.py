"""The processes of a job on this host, whoever their parents are by now.

A job's id is in the environment of everything it starts, and so is the rank that started it
(``OMPI_COMM_WORLD_RANK``). That still holds when a rank has been killed and its children (data workers,
``multiprocessing`` managers) belong to init: they would sit on mpirun's pipes and keep the job from ending.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass

import psutil

JOB_VARIABLE = "MEGATRON_RECOVER_JOB"
_RANK_VARIABLE = "OMPI_COMM_WORLD_RANK"

ORPHAN_TERM_S = 0.3
"""How long a process must have been without its rank before it is asked to end."""
ORPHAN_KILL_S = 1.0
"""And before it is killed. With a scan every 0.5 s that is at most 2 s after the death of the rank."""
_LOOKS = 5  # at a process whose environment is empty: a kernel thread, or one in the middle of exec


@dataclass
class _Member:
    process: psutil.Process
    rank: int | None
    """Rank it belongs to; None for mpirun and its helpers."""
    is_rank: bool
    """What MPI's runtime takes for the rank: a child of mpirun (the rank's keeper, where it has one)."""


class JobProcesses:
    """Finds and ends the processes of one job. Not thread safe.

    Args:
        job_id: value of ``MEGATRON_RECOVER_JOB``.
    """

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self._members: dict[int, _Member] = {}
        self._others: set[int] = set()  # looked at and not of this job
        self._looks: dict[int, int] = {}
        self._orphan_since: dict[int, float] = {}
        self._segments = ""
        self._mpirun_pids: set[int] = set()
        self.ranks_seen: set[int] = set()
        """Ranks that ever ran on this host."""

    @property
    def ranks(self) -> dict[int, int]:
        """Living ranks on this host -> pid of the rank's keeper (of the rank itself where it has none), as of the
        last scan."""
        return {m.rank: pid for pid, m in self._members.items() if m.is_rank and m.rank is not None}

    def scan(self) -> None:
        """Looks at what runs now. Only new processes are asked for their environment, so this is cheap."""
        current = set(psutil.pids())
        self._others &= current
        for pid, member in list(self._members.items()):
            if not _is_alive(member.process):
                del self._members[pid]
            elif member.rank is None:  # perhaps on its way from mpirun's fork to a rank's exec
                self._look_at(pid, current)
        for pid in sorted(current):
            if pid not in self._members:
                self._look_at(pid, current)
        self.ranks_seen.update(self.ranks)
        if not self._segments and self.ranks:
            self._segments = _shared_memory_prefix(next(iter(self.ranks.values())))

    def end_orphans(self) -> None:
        """Ends processes whose rank is gone: asks first, kills a second later. Call after each scan."""
        now = time.monotonic()
        ranks = self.ranks
        orphans = {pid for pid, m in self._members.items() if m.rank is not None and m.rank not in ranks}
        self._orphan_since = {pid: self._orphan_since.get(pid, now) for pid in orphans}
        for pid, since in self._orphan_since.items():
            with contextlib.suppress(psutil.Error):
                if now - since >= ORPHAN_KILL_S:
                    self._members[pid].process.kill()
                elif now - since >= ORPHAN_TERM_S:
                    self._members[pid].process.terminate()

    def signal_ranks(self, signum: int, except_pids: Iterable[int] = ()) -> set[int]:
        """Sends a signal to the living ranks. Returns the pids it was sent to."""
        told = set(self.ranks.values()) - set(except_pids)
        for pid in told:
            with contextlib.suppress(psutil.Error):
                self._members[pid].process.send_signal(signum)
        return told

    def kill_rank(self, rank: int) -> None:
        """Kills a rank with everything it has started, its keeper too."""
        for member in self._members.values():
            if member.rank == rank:
                with contextlib.suppress(psutil.Error):
                    member.process.kill()

    def end_all(self, grace_s: float = 2.0) -> None:
        """Ends everything of the job on this host, mpirun too: SIGTERM, and SIGKILL after ``grace_s``."""
        for _ in range(5):  # again for what was started meanwhile
            self._others.clear()
            self.scan()
            processes = [member.process for member in self._members.values()]
            if not processes:
                break
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    process.terminate()
            _, alive = psutil.wait_procs(processes, timeout=grace_s)
            for process in alive:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(alive, timeout=2.0)

    def remove_leftovers(self) -> None:
        """Removes what MPI leaves behind when mpirun was killed: shared memory and its session folder."""
        if self._segments:
            for path in glob.glob(f"{glob.escape(self._segments)}*"):
                with contextlib.suppress(OSError):
                    os.unlink(path)
        for pid in self._mpirun_pids:
            shutil.rmtree(os.path.join(tempfile.gettempdir(), f"ompi.{pid}"), ignore_errors=True)

    def _look_at(self, pid: int, current: set[int]) -> None:
        if pid in self._others or pid == os.getpid():
            return
        try:
            process = psutil.Process(pid)
            parent = process.ppid()
            if process.status() == psutil.STATUS_ZOMBIE:
                return
        except psutil.Error:
            return
        try:
            environment = process.environ()
        except psutil.AccessDenied:  # another user's
            self._others.add(pid)
            return
        except psutil.Error:  # Linux says so of kernel threads too
            environment = {}
        if parent in current and parent not in self._members:
            self._look_at(parent, current)  # children are judged by their parents
        family = self._members.get(parent)
        if environment.get(JOB_VARIABLE) != self._job_id and family is None:
            self._looks[pid] = self._looks.get(pid, 0) + 1
            if environment or self._looks[pid] >= _LOOKS:
                self._others.add(pid)
                self._looks.pop(pid)
            return
        # A member without the variable has overwritten its environment (setproctitle does): like its parent.
        word = environment.get(_RANK_VARIABLE, "")
        rank = int(word) if word.isdigit() else None
        if rank is None and family is not None:
            rank = family.rank
        is_rank = rank is not None and family is not None and family.rank is None
        if rank is None:
            self._mpirun_pids.add(pid)
        self._members[pid] = _Member(process, rank, is_rank)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _shared_memory_prefix(pid: int) -> str:
    """Path of the job's shared memory segments without the rank at the end; empty where there is none."""
    try:
        with open(f"/proc/{pid}/maps") as maps:
            for line in maps:
                if "/sm_segment." in line:
                    return line[line.index("/") :].strip().rpartition(".")[0] + "."
    except OSError:
        pass
    return ""
