"""Layer 1 alone, to time repairs: ranks sum an array again and again, and some of them kill themselves. No torch.

Run by the launcher with ``--entry trials.repair_program``; the last argument is JSON: ``victims`` (rank of each
iteration in which one is lost, in order), ``elements`` (of the array), ``out`` (file for the result).
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_recover.collectives import runtime
from megatron_recover.collectives.engine import Engine, Reduction
from megatron_recover.collectives.repair import Repair
from megatron_recover.leaving import write_status

QUIET_ITERATIONS = 3
"""Iterations without a failure before each one with."""


def main() -> None:
    """Does not return."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    job: dict[str, Any] = json.loads(sys.argv[-1])
    runtime.check_environment()
    comms = runtime.start(replica_size=1)
    repairs: list[Repair] = []
    engine = Engine(comms, on_repair=repairs.append, on_give_up=lambda reason: os._exit(73))
    engine.start()
    ones: NDArray[np.float32] = np.ones(job["elements"], np.float32)
    result = np.empty_like(ones)
    epoch = engine.epoch
    for victim in job["victims"]:
        for turn in range(QUIET_ITERATIONS + 1):
            is_last = turn == QUIET_ITERATIONS
            if is_last and comms.rank == victim:
                time.sleep(0.01)  # the others wait for it in the reduction by now
                os.kill(os.getpid(), signal.SIGKILL)
            while True:
                done = engine.all_reduce(Reduction(lambda: ones, result), epoch)
                attempt = engine.attempt(done.result(), epoch).result()
                epoch = attempt.epoch
                if attempt.ok:
                    break
            if not np.all(result == len(attempt.alive)):
                print(f"rank {comms.rank}: the sum is {result[0]}, not {len(attempt.alive)}", file=sys.stderr)
                os._exit(1)
    mine = json.dumps([report.repair_s * 1e3 for report in repairs]).encode()
    everybodys = engine.exchange(mine, epoch).result()
    if everybodys is not None and comms.rank == min(everybodys):
        Path(job["out"]).write_text(json.dumps([json.loads(part) for part in everybodys.values()]))
        write_status(0, "done")
    engine.attempt(True, epoch).result()
    engine.closing()
    engine.close()
    os._exit(0)


if __name__ == "__main__":
    main()
