"""scripts/pretrain_gpt.py, in which the data workers of start rank 1 are killed after two iterations."""

from __future__ import annotations

import os
import runpy
import threading
import time
from pathlib import Path

import psutil

from megatron_recover.megatron.adapter import get_adapter

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "pretrain_gpt.py"


def kill_workers_after_two_iterations() -> None:
    adapter = get_adapter()
    assert adapter is not None
    while adapter.completed < 2:
        time.sleep(0.001)
    for child in psutil.Process().children():
        child.kill()


if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    threading.Thread(target=kill_workers_after_two_iterations, daemon=True).start()
runpy.run_path(str(SCRIPT), run_name="__main__")
