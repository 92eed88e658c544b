"""The parent of a rank: sees to it that a rank which is lost is lost in a way that the others can repair.

MPI learns of a rank that dies from a signal, and not of one that ends with a non-zero exit code or is only stopped
(measured on Open MPI 5.0: the others would wait for it for ever). So a rank has a small parent, its keeper, which MPI's
runtime takes for the rank:

- the rank ends with a code that it has not announced (``os._exit(1)`` in a library, say): the keeper ends with SIGKILL;
- the rank does not renew its lease (``lease``): it is killed, and the keeper with it;
- the keeper is killed: the kernel kills the rank with it.

It is forked before anything is imported, so it costs a few megabytes and no time.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable

from megatron_recover.lease import Lease, Stage, inherit

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_LOOK_S = 0.25
_PR_SET_PDEATHSIG = 1


def keep(run: Callable[[], None], directory: str | None, rank: int) -> None:
    """Forks. The child returns from ``run`` (or leaves by itself); the parent never returns.

    Args:
        run: the rank.
        directory: the job's directory on this host, or None.
        rank: start rank, for the lease's name.
    """
    lease = Lease(directory, rank, keeper_pid=os.getpid())
    watched = {*_FORWARDED, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    keeper = os.getpid()
    child = os.fork()
    if child == 0:
        _die_with_parent(keeper)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        inherit(lease)
        run()
        return
    _leave_like(_watch(child, lease, watched), lease)


def _die_with_parent(keeper: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != keeper:  # it died before the kernel knew
        os.kill(os.getpid(), signal.SIGKILL)


def _watch(child: int, lease: Lease, watched: set[signal.Signals]) -> int:
    """Waits for the child; returns its wait status."""
    last_look = time.monotonic()
    spared_until = 0.0
    while True:
        received = signal.sigtimedwait(watched, _LOOK_S)
        if received is not None and received.si_signo in _FORWARDED:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, received.si_signo)
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        now = time.monotonic()
        state = lease.read()
        # A keeper that was itself not running (the whole job was frozen) knows nothing about the time in between. The
        # rank may wake up after it, and has another period to say that it is there.
        if now - last_look > 4 * _LOOK_S:
            spared_until = now + state.timeout_s
        last_look = now
        if state.is_over and now >= spared_until:
            _say(
                f"rank {state.rank} (process {child}) has given no sign of life for {state.age_s:.1f} s (its limit is "
                f"{state.timeout_s:g} s{_why(child)}): it is killed, the others go on without its replica"
                + ("; see --recover-heartbeat-timeout" if state.stage is Stage.TRAINING else "")
            )
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGUSR1)  # faulthandler prints the stacks, Python's lock or not
                signal.sigtimedwait({signal.SIGCHLD}, _LOOK_S)
                os.kill(child, signal.SIGKILL)
            lease.enter(Stage.ENDING)  # said already
            return os.waitpid(child, 0)[1]


def _why(pid: int) -> str:
    """What the kernel says about a process that does nothing."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state = file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
    return {"T": "; it is stopped", "t": "; a debugger holds it", "D": "; it waits for a disk or a device"}.get(
        state, "; one call holds Python's lock, or the host is overloaded"
    )


def _leave_like(status: int, lease: Lease) -> None:
    """Ends as MPI's runtime has to see the end of the rank."""
    if os.WIFEXITED(status):
        code = os.WEXITSTATUS(status)
        announced = lease.read().code
        if code in (0, announced):
            os._exit(code)
        _say(f"rank {lease.rank} ended with exit code {code}, without a word; the others go on without its replica")
    elif lease.read().stage is not Stage.ENDING and os.WTERMSIG(status) not in _FORWARDED:
        name = signal.Signals(os.WTERMSIG(status)).name
        perhaps = " (by hand, or by the kernel or the batch system for lack of memory)" if name == "SIGKILL" else ""
        _say(f"rank {lease.rank} was ended by {name}{perhaps}")
    os.kill(os.getpid(), signal.SIGKILL)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"megatron_recover: {text}\n".encode())
