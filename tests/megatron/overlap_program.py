"""scripts/pretrain_gpt.py, printing how many gradient buckets were handed over while backward still ran."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

from megatron_recover.megatron.adapter import get_adapter
from megatron_recover.session import Iteration

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "pretrain_gpt.py"

adapter = get_adapter()
assert adapter is not None
rank, recorder = adapter.session.rank, adapter.recorder
committed = recorder.committed


def report(iteration: Iteration) -> None:
    committed(iteration)
    result = {"rank": rank, "early": iteration.early_buckets, "buckets": len(adapter.bucket_index)}
    print("RESULT " + json.dumps(result), file=sys.__stdout__, flush=True)


recorder.committed = report  # type: ignore[method-assign]
runpy.run_path(str(SCRIPT), run_name="__main__")
