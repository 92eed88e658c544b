"""Stands in for megatron_recover.run: runs the script as it is, so that only the launcher is tested."""

import runpy
import sys

sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
