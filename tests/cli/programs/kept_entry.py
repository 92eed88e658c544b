"""Stands in for megatron_recover.run: each rank has its keeper and its lease, and runs the script as it is.

Without torch, whose import is most of the time that such a small job takes.
"""

import faulthandler
import os
import runpy
import signal
import sys

from megatron_recover.keeper import keep


def run_script() -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


keep(run_script, os.environ["MEGATRON_RECOVER_JOB_DIR"], int(os.environ["OMPI_COMM_WORLD_RANK"]))
os._exit(0)
