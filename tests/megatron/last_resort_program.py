"""scripts/pretrain_gpt.py, in which iteration 5 of the first try cannot be survived: RECOVER_TEST_LAST says how.

``give-up``: rank 1 gives the whole job up. ``power-off``: the host of rank 1 (a node of ``cluster.py``) is gone.
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

from cluster import power_off

from megatron_recover.megatron.adapter import get_adapter

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "pretrain_gpt.py"


def fail_in_iteration_5() -> None:
    adapter = get_adapter()
    assert adapter is not None
    session = adapter.session
    stock_at = session.at

    def at(phase: str, *index: Any) -> None:
        stock_at(phase, *index)
        if session.current_iteration == 5 and phase == "backward":
            if os.environ["RECOVER_TEST_LAST"] == "power-off":
                power_off()
            session._give_up("told to give up")

    session.at = at  # type: ignore[method-assign]


if os.environ["MEGATRON_RECOVER_TRY"] == "1" and os.environ["OMPI_COMM_WORLD_RANK"] == os.environ["RECOVER_TEST_RANK"]:
    fail_in_iteration_5()
runpy.run_path(str(SCRIPT), run_name="__main__")
