"""Two ranks, one of which is killed: does this MPI notice, repair and go on?

Run by ``megatron-recover doctor`` as ``mpirun ... -n 2 python -m megatron_recover.collectives.selftest``.
The survivor prints one JSON object. Needs mpi4py only.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from array import array
from typing import Any

import mpi4py

SETTLE_S = 0.05
"""Between revoke and shrink: a death while the shrink runs can crash it."""
_NUM_ELEMENTS = 1 << 18  # 1 MiB of floats: the reduction moves data, it is not a single message


def main() -> None:
    """Rank 1 kills itself inside an all-reduce that rank 0 is in. Does not return (``os._exit``)."""
    mpi4py.rc.thread_level = "multiple"
    mpi4py.rc.finalize = False  # would hang: a rank is missing
    from mpi4py import MPI

    start = MPI.COMM_WORLD
    start.Set_errhandler(MPI.ERRORS_RETURN)
    if start.Get_size() != 2:
        sys.exit("the self-test runs on 2 ranks: mpirun --with-ft ulfm -n 2 python -m " + __spec__.name)
    world = start.Dup()
    world.Set_errhandler(MPI.ERRORS_RETURN)
    world.Barrier()
    if world.Get_rank() == 1:
        world.send(time.time(), dest=0)
        os.kill(os.getpid(), signal.SIGKILL)

    died_at = world.recv(source=1)
    report: dict[str, Any] = {
        "library": MPI.Get_library_version().split(",")[0].strip(),
        "mpi4py": mpi4py.__version__,
        "thread_multiple": MPI.Query_thread() >= MPI.THREAD_MULTIPLE,
    }
    report["detect_ms"] = _detect(world, died_at)
    begin = time.monotonic()
    world.Revoke()
    report["revoke_ms"] = _ms(begin)
    time.sleep(SETTLE_S)
    begin = time.monotonic()
    shrunk = world.Shrink()
    shrunk.Set_errhandler(MPI.ERRORS_RETURN)
    report["shrink_ms"] = _ms(begin)
    begin = time.monotonic()
    agreed = shrunk.Agree(1)
    values = array("f", [1.0]) * _NUM_ELEMENTS
    shrunk.Allreduce(MPI.IN_PLACE, values)
    report["go_on_ms"] = _ms(begin)
    report["survivors"] = shrunk.Get_size()
    report["passed"] = shrunk.Get_size() == 1 and agreed == 1 and set(values) == {1.0}
    print(json.dumps(report), flush=True)
    os._exit(0)


def _detect(world: Any, died_at: float) -> float:
    """Reduces until the death of the other rank comes out of it. Milliseconds from the death (same clock)."""
    from mpi4py import MPI

    while True:
        values = array("f", [1.0]) * _NUM_ELEMENTS
        try:
            world.Allreduce(MPI.IN_PLACE, values)
        except MPI.Exception as error:
            if error.Get_error_class() not in (MPI.ERR_PROC_FAILED, MPI.ERR_REVOKED):
                raise
            return round((time.time() - died_at) * 1e3, 2)


def _ms(begin: float) -> float:
    return round((time.monotonic() - begin) * 1e3, 2)


if __name__ == "__main__":
    main()
