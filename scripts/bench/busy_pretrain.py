"""One rank of false_alarms.py: scripts/pretrain_gpt.py, compiling in the middle, and telling how silent it was.

Prints ``RESULT {json}`` at its end: the longest time during training in which it did not renew its lease.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import time
from pathlib import Path
from typing import Any

import torch

from megatron_recover.megatron.adapter import get_adapter

SCRIPT = Path(__file__).resolve().parents[1] / "pretrain_gpt.py"
COMPILE_IN = 3

adapter = get_adapter()
assert adapter is not None
session = adapter.session
compiled_s = [0.0]


def compile_something() -> None:
    """What a first call of a compiled model does: imports the compiler, traces, runs a C++ compiler."""
    begin = time.monotonic()

    @torch.compile(dynamic=False)
    def block(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x @ x.T).softmax(-1) * x.sum(0)

    block(torch.randn(32, 32))
    compiled_s[0] = time.monotonic() - begin


begin_iteration = session.iteration


def iteration(number: int, *args: Any, **options: Any) -> Any:
    if number == COMPILE_IN and options.get("phase", "train") == "train" and not compiled_s[0]:
        compile_something()
    return begin_iteration(number, *args, **options)


session.iteration = iteration  # type: ignore[method-assign]


@atexit.register
def tell() -> None:
    result = {
        "rank": session.rank,
        "longest_silence_s": session.watchdog.longest_silence_s,
        "compile_s": compiled_s[0],
    }
    os.write(1, f"RESULT {json.dumps(result)}\n".encode())


runpy.run_path(str(SCRIPT), run_name="__main__")
