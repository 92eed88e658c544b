"""The MPI behaviour that layer 1 relies on, by itself: argv[1] names the case. mpi4py and numpy only."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time

import numpy as np

from megatron_recover.collectives import membership, runtime

faulthandler.register(signal.SIGUSR1, all_threads=True)
case = sys.argv[1]
comms = runtime.start(1)
from mpi4py import MPI  # noqa: E402  (loaded by runtime.start with the right settings)

rank, world, cross = comms.rank, comms.world, comms.cross
result: dict[str, object] = {"rank": rank}


def wait_for_death(limit: float = 20.0) -> float:
    begin = time.monotonic()
    while not membership.failed(world, comms.start):
        MPI.COMM_SELF.Iprobe()
        assert time.monotonic() - begin < limit, "a death was not noticed"
    return time.monotonic() - begin


if case in ("sigkill", "exit0"):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL) if case == "sigkill" else os._exit(0)
    wait_for_death()
    result["failed"] = membership.failed(world, comms.start)
elif case == "agree":
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    flag = np.array([1], np.int32)
    try:
        request = world.Iagree(flag)
        while not request.Test():
            pass
        result["outcome"] = int(flag[0])
    except MPI.Exception as error:
        result["outcome"] = "failed" if error.Get_error_class() == MPI.ERR_PROC_FAILED else str(error)
elif case == "revoke":
    if rank == 0:  # never comes to the all-reduce; it wakes the others
        cross.Revoke()
    else:
        send, receive = np.ones(1 << 20, np.float32), np.empty(1 << 20, np.float32)  # outlive the failed call
        try:
            cross.Allreduce(send, receive)
            result["outcome"] = "completed"
        except MPI.Exception as error:
            result["outcome"] = "revoked" if error.Get_error_class() == MPI.ERR_REVOKED else str(error)
    world.Barrier()  # only cross is revoked; nobody leaves before all have their outcome
elif case == "shrink":
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for_death()
    world.Revoke()
    small = world.Shrink()
    result["members"] = membership.members(small, comms.start)
    result["sum"] = float(small.allreduce(rank))
print("RESULT " + json.dumps(result), flush=True)
os._exit(0)
