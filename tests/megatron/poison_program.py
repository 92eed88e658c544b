"""scripts/pretrain_gpt.py, in which microbatch 5 of iteration 3 has a loss that is NaN wherever it runs."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import megatron.core.pipeline_parallel.schedules as schedules

from megatron_recover.megatron.adapter import get_adapter

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "pretrain_gpt.py"

adapter = get_adapter()
assert adapter is not None
stock = schedules.forward_step_calc_loss


def calc_loss(*args: Any, **options: Any) -> Any:
    tensor, *rest = stock(*args, **options)
    iteration = adapter.iteration
    if iteration is not None and iteration.number == 3 and adapter.units[adapter.position] == 5:
        tensor = tensor * float("nan")
    return (tensor, *rest)


schedules.forward_step_calc_loss = calc_loss
runpy.run_path(str(SCRIPT), run_name="__main__")
