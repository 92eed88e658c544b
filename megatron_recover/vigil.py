"""What the launcher sees of the ranks of its host while they run, and does when their keepers cannot.

A rank has a keeper that kills it when its lease has run out (``keeper``). Two things are left for the launcher: a
keeper that is stopped together with its rank, and the start. Until MPI is up on all ranks nobody can repair: a rank
that is lost there leaves the others waiting in MPI_Init or in the first collectives, for ever.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from megatron_recover.lease import LeaseState, Stage, read_lease
from megatron_recover.processes import JobProcesses

MARGIN_S = 2.0
"""How long a lease must have been over before the launcher acts: the keeper comes first."""
START_GRACE_S = 2.0
"""How long the other ranks have to end by themselves when one is gone at the start, so that an error which all of
them meet is told as such."""
_AFTER_AWAY_S = 10.0
"""How long ranks and keepers have at least to come back, when the launcher finds that all of the host was away."""
_AWAY_S = 3.0  # without a look: the launcher was itself not running and knows nothing about the time in between
_STACKS_S = 0.5  # for the ranks to print their stacks
_MANY = 8  # ranks named in a message


class Vigil:
    """Looks after the ranks of this host. Call ``look`` after each scan of the processes.

    Args:
        job_dir: the job's directory on this host, where the leases are.
        num_ranks: ranks of the job.
        start_timeout_s: how long the start may stand still.
    """

    def __init__(self, job_dir: Path, num_ranks: int, start_timeout_s: float) -> None:
        self._job_dir = job_dir
        self._num_ranks = num_ranks
        self._start_timeout_s = start_timeout_s
        self._last_look: float | None = None
        self._over_since: dict[int, float] = {}
        self._came_back_at = float("-inf")
        self._gone_since: float | None = None
        self._moved_at: float | None = None
        self._state_of_start: object = None
        self._is_started = False
        self.is_managed = False
        """Ranks of this job keep leases: they run under ``megatron_recover.run``."""
        self.is_starting = True
        """Ranks of this host are not through the start yet, as far as can be seen."""

    def conclude(self) -> None:
        """After the job: a short one may have been through the start between two looks."""
        leases = [read_lease(self._job_dir, rank) for rank in range(self._num_ranks)]
        self.is_managed = any(leases)
        if any(state.stage > Stage.STARTING for state in leases if state):
            self.is_starting = False

    def look(self, processes: JobProcesses, now: float) -> str | None:
        """Kills ranks whose lease is over. Returns why the start has failed, when it has."""
        if self._last_look is not None and now - self._last_look > _AWAY_S:
            self._over_since.clear()
            self._came_back_at = now
            self._gone_since = self._moved_at = None
        self._last_look = now
        self._kill_overdue(processes, now)
        return None if self._is_started else self._failed_start(processes, now)

    def _kill_overdue(self, processes: JobProcesses, now: float) -> None:
        for rank in processes.ranks:
            state = read_lease(self._job_dir, rank)
            if state is None or not state.pid:
                continue
            # A keeper that is stopped also outlives its rank, and MPI would wait for it.
            is_gone = state.keeper_pid != 0 and not _is_working(state.pid)
            is_spared = now - self._came_back_at < max(_AFTER_AWAY_S, state.timeout_s)
            if is_spared or (not state.is_over and not is_gone):
                self._over_since.pop(rank, None)
                continue
            # A keeper that works may have its reasons: it gives a rank another period when it was itself away.
            margin = MARGIN_S if is_gone or not _acts(state.keeper_pid) else MARGIN_S + 2 * state.timeout_s
            if now - self._over_since.setdefault(rank, now) < margin:
                continue
            what = (
                "has ended and its keeper does not say so"
                if is_gone
                else f"has given no sign of life for {state.age_s:.1f} s (its limit is {state.timeout_s:g} s) and its "
                "keeper does nothing about it"
            )
            _say(f"rank {rank} (process {state.pid}) {what}: both are killed, the others go on without its replica")
            with contextlib.suppress(OSError):
                os.kill(state.pid, signal.SIGUSR1)  # its stacks, if it can still print them
                time.sleep(_STACKS_S)
            processes.kill_rank(rank)

    def _failed_start(self, processes: JobProcesses, now: float) -> str | None:
        leases = {rank: read_lease(self._job_dir, rank) for rank in range(self._num_ranks)}
        here = {rank: state for rank, state in leases.items() if state or rank in processes.ranks_seen}
        if not any(here.values()):
            return None  # nothing has begun, or a program that keeps no leases
        self.is_managed = True
        if any(state.stage > Stage.STARTING for state in here.values() if state):
            # The first collectives have ended for one rank, so all have taken part in them: losses are repaired now.
            self._is_started, self.is_starting = True, False
            return None
        alive = {rank for rank, state in here.items() if rank in processes.ranks or (state and _is_there(state))}
        gone = sorted(here.keys() - alive)
        if gone and alive:
            self._gone_since = now if self._gone_since is None else self._gone_since
            if now - self._gone_since >= START_GRACE_S:
                return f"{_ranks(gone)} ended before MPI was up on all ranks, so the others could not start"
        loaded = {rank for rank in alive if _has_mpi(here[rank])}
        state_of_start = (frozenset(alive), frozenset(loaded), len(here))
        if self._moved_at is None or state_of_start != self._state_of_start:
            self._state_of_start, self._moved_at = state_of_start, now
        if alive and now - self._moved_at >= self._start_timeout_s:
            return self._stood_still(here, alive, loaded)
        return None

    def _stood_still(self, here: dict[int, LeaseState | None], alive: set[int], loaded: set[int]) -> str:
        """Says who keeps the others waiting, as well as that can be told; lets the ranks print their stacks."""
        stopped = {rank for rank in alive if _is_stopped(here[rank])}
        late = alive - loaded
        missing = set(range(self._num_ranks)) - here.keys()
        if stopped:
            who, verbs, what = stopped, ("is", "are"), "stopped (SIGSTOP)"
        elif late:
            who, verbs, what = late, ("has", "have"), "not come as far as loading MPI"
        elif missing:
            who, verbs, what = missing, ("has", "have"), "not been seen on this host"
        else:
            who, verbs, what = alive, ("has", "have"), "not come out of MPI_Init and the first collectives"
        for rank in alive - stopped:
            state = here[rank]
            if state is not None and state.pid:
                with contextlib.suppress(OSError):
                    os.kill(state.pid, signal.SIGUSR1)
        time.sleep(_STACKS_S)
        return (
            f"nothing has moved for --start-timeout {self._start_timeout_s:g} seconds while the ranks were starting: "
            f"{_ranks(who)} {verbs[len(who) > 1]} {what}"
        )


def _ranks(ranks: Iterable[int]) -> str:
    numbers = sorted(ranks)
    words = ", ".join(str(rank) for rank in numbers[:_MANY]) + (", ..." if len(numbers) > _MANY else "")
    return f"rank{'s' if len(numbers) > 1 else ''} {words}"


def _is_there(state: LeaseState) -> bool:
    return _is_working(state.keeper_pid or state.pid)


def _is_working(pid: int) -> bool:
    """Whether a process is there, and no zombie."""
    return _status(pid) not in (None, psutil.STATUS_ZOMBIE)


def _acts(pid: int) -> bool:
    """Whether a process is there and not stopped."""
    return _status(pid) not in (None, psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED)


def _is_stopped(state: LeaseState | None) -> bool:
    return state is not None and _status(state.pid) == psutil.STATUS_STOPPED


def _status(pid: int) -> str | None:
    """What the kernel says of a process; None when it is not there (or 0)."""
    try:
        return psutil.Process(pid).status() if pid else None
    except psutil.Error:
        return None


def _has_mpi(state: LeaseState | None) -> bool:
    """Whether a rank has loaded the MPI library."""
    if state is None or not state.pid:
        return False
    try:
        with open(f"/proc/{state.pid}/maps") as maps:
            return any("libmpi.so" in line for line in maps)
    except OSError:
        return False


def _say(text: str) -> None:
    print(f"megatron-recover: {text}", file=sys.stderr, flush=True)
