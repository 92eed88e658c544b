"""Stands in for megatron_recover.run: each rank has its keeper and its lease, and runs the script as it is."""

import os
import runpy
import sys

from megatron_recover.keeper import keep


def run_script() -> None:
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


keep(run_script, os.environ["MEGATRON_RECOVER_JOB_DIR"], int(os.environ["OMPI_COMM_WORLD_RANK"]))
os._exit(0)
