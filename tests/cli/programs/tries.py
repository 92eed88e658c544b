"""Ranks that end each try of a job as they are told: ``tries.py WHAT ...``, one word for each try, the last for all
that follow. What a word means stands in ``ENDS``; it may carry the iteration that the ranks come to (``gave-up@5``)."""

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import psutil

from megatron_recover import leaving
from megatron_recover.lease import Stage, own_lease
from megatron_recover.telemetry.blackbox import BlackBox

JOB_DIR = Path(os.environ["MEGATRON_RECOVER_JOB_DIR"])
RANK = int(os.environ["OMPI_COMM_WORLD_RANK"])
TRY = int(os.environ["MEGATRON_RECOVER_TRY"])
SECOND = RANK == 1


def sleep_for_ever() -> None:
    while True:
        time.sleep(3600)


def end(code: int, **status: int) -> None:
    """What all ranks do at an end that they have agreed on."""
    MPI.COMM_WORLD.Barrier()
    if RANK == 0:
        leaving.write_status(code, "as told", **status)
    MPI.COMM_WORLD.Barrier()
    own_lease().ends_with(code)
    os._exit(code)


def die_alone(how: str) -> None:
    """What the second rank does before MPI is up; the others wait for it in MPI_Init."""
    if not SECOND:
        return
    if how == "error":
        leaving.write_status(1, "the error of one rank")
        leaving.leave_as_failed("the error of one rank", quiet=True)
    if how == "hang":
        sleep_for_ever()
    os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)


def fail_everywhere() -> None:
    """What an import error does: all ranks meet it, each at its own time, and each leaves by itself."""
    time.sleep(0.5 * RANK)
    leaving.write_status(1, "the error of all ranks")
    leaving.leave_as_failed("the error of all ranks", quiet=True)


def gave_up() -> None:
    if RANK == 0:
        leaving.give_up("a repair\ndid not end")
    sleep_for_ever()


def freeze() -> None:
    """The second rank is stopped with its keeper; the others see that both are killed."""
    own_lease().enter(Stage.TRAINING, 1.0)
    if SECOND:
        keeper = os.getppid()
        print(f"frozen {keeper} {os.getpid()}", flush=True)
        os.kill(keeper, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
    begin = time.monotonic()
    MPI.COMM_WORLD.Set_errhandler(MPI.ERRORS_RETURN)
    while not MPI.COMM_WORLD.Get_failed().Get_size() and time.monotonic() - begin < 30:
        MPI.COMM_WORLD.Iprobe()  # lets MPI look at its connections
        own_lease().renew()
        time.sleep(0.02)
    print(f"killed after {time.monotonic() - begin:.1f} s", flush=True)
    leaving.write_status(0, "done")
    own_lease().ends_with(0)
    os._exit(0)


def wait() -> None:
    own_lease().enter(Stage.TRAINING, 2.0)
    print(f"ready {os.getpid()}", flush=True)
    while True:
        own_lease().renew()
        time.sleep(0.05)


def host_lost() -> None:
    """The host of the second rank is switched off (a node of tests/cluster.py)."""
    if SECOND:
        from cluster import power_off

        power_off()
    wait()


def left_behind(job: str) -> int:
    """Ranks of the tries before that are still on this host."""
    found = 0
    for process in psutil.process_iter() if TRY > 1 else ():
        with contextlib.suppress(psutil.Error):
            theirs = process.environ()
            found += theirs.get("MEGATRON_RECOVER_JOB") == job and int(theirs["MEGATRON_RECOVER_TRY"]) < TRY
    return found


def leave_behind() -> None:
    """Every rank has what a training rank has beside it, some of which ignores SIGTERM. The second is stopped for
    good and never comes to the end; the third is killed; the others end as if in order, and clear nothing up."""
    own_lease().enter(Stage.TRAINING, 2.0)
    context = multiprocessing.get_context("fork")
    manager = context.Manager()  # what Megatron's checkpoint writer uses; it outlives a rank that is killed
    workers = [context.Process(target=sleep_for_ever, daemon=True), context.Process(target=sleep_stubbornly)]
    for worker in workers:
        worker.start()
    shared = manager.list([worker.pid for worker in workers])
    print(f"beside rank {RANK}: {manager._process.pid} {list(shared)}", flush=True)  # type: ignore[attr-defined]
    MPI.COMM_WORLD.Barrier()
    if SECOND:
        os.kill(os.getpid(), signal.SIGSTOP)
    if RANK == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    leaving.write_status(0, "done")
    own_lease().ends_with(0)
    os._exit(0)


def sleep_stubbornly() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleep_for_ever()


BEFORE_MPI = {
    "die": lambda: die_alone("kill"),
    "stop": lambda: die_alone("stop"),
    "hang": lambda: die_alone("hang"),
    "error": lambda: die_alone("error"),
    "all-fail": fail_everywhere,
}
ENDS = {
    "done": lambda: end(0),
    "gave-up": gave_up,
    "lost-one": lambda: end(73, replicas_left=MPI.COMM_WORLD.Get_size() - 1),
    "too-few": lambda: end(70),
    "differ": lambda: end(72),
    "freeze": freeze,
    "wait": wait,
    "host-lost": host_lost,
    "leave-behind": leave_behind,
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
}

words = sys.argv[1:]
what, _, iteration = words[min(TRY, len(words)) - 1].partition("@")
BEFORE_MPI.get(what, lambda: None)()

import mpi4py  # noqa: E402

mpi4py.rc.finalize = False
from mpi4py import MPI  # noqa: E402

MPI.COMM_WORLD.Barrier()
own_lease().enter(Stage.SETTING_UP, 300.0)
if RANK == 0:
    job = os.environ["MEGATRON_RECOVER_JOB"]
    seen = {"try": TRY, "ranks": MPI.COMM_WORLD.Get_size(), "dir": str(JOB_DIR), "job": job, "left": left_behind(job)}
    print("TRY", json.dumps(seen), flush=True)
if iteration:
    BlackBox(JOB_DIR, RANK).mark("forward", int(iteration), 0)
MPI.COMM_WORLD.Barrier()
ENDS.get(what, lambda: end(0))()
sleep_for_ever()
