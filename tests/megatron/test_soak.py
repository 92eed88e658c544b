"""A short slice of the soak in scripts/chaos.py, with a fixed seed, on the real Megatron."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from harness import REPOSITORY, run

CHAOS = str(REPOSITORY / "scripts" / "chaos.py")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_slice_of_the_soak_on_megatron(tmp_path: Path) -> None:
    out = tmp_path / "chaos.json"
    command = [sys.executable, CHAOS, "--trainer", "megatron", "--failures", "6", "--seed", "1", "--out", str(out)]
    done = run(command, timeout=850)
    assert done.code == 0, done.explain()
    by_verdict = json.loads(out.read_text())["totals"]["failures_by_verdict"]
    assert by_verdict["hung"] == by_verdict["wrong"] == 0
