"""scripts/pretrain_gpt.py, in which one rank gets SIGTERM after two iterations (start rank 1, and only that one)."""

from __future__ import annotations

import os
import runpy
import signal
import threading
import time
from pathlib import Path

from megatron_recover.megatron.adapter import get_adapter

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "pretrain_gpt.py"


def terminate_after_two_iterations() -> None:
    adapter = get_adapter()
    assert adapter is not None
    while adapter.completed < 2:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGTERM)


if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    threading.Thread(target=terminate_after_two_iterations, daemon=True).start()
runpy.run_path(str(SCRIPT), run_name="__main__")
