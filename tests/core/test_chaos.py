"""A short slice of the soak in scripts/chaos.py, with a fixed seed, on the core trainer."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from harness import REPOSITORY, run

CHAOS = str(REPOSITORY / "scripts" / "chaos.py")


def test_a_slice_of_the_soak(tmp_path: Path) -> None:
    out = tmp_path / "chaos.json"
    layouts = ["--layout", "6x1", "--layout", "8x1", "--layout", "6x2"]
    done = run([sys.executable, CHAOS, "--failures", "10", "--seed", "4", *layouts, "--out", str(out)], timeout=280)
    assert done.code == 0, done.explain()
    totals = json.loads(out.read_text())["totals"]
    assert totals["failures"] >= 10
    assert totals["failures_by_verdict"]["hung"] == totals["failures_by_verdict"]["wrong"] == 0
    assert totals["largest_relative_difference"] < 1e-9
    assert not list((tmp_path / "chaos").iterdir())


def test_a_case_is_repeated_from_its_words(tmp_path: Path) -> None:
    words = "core layout=4x2 microbatches=6 kill:rank=3,iteration=2,phase=backward,microbatch=1"
    out = tmp_path / "chaos.json"
    done = run([sys.executable, CHAOS, "--repeat", words, "--keep-logs", "--out", str(out)], timeout=120)
    assert done.code == 0, done.explain()
    (case,) = json.loads(out.read_text())["cases"]
    assert case["fired"] == ["kill:rank=3,iteration=2,phase=backward,microbatch=1"]
    assert case["detect_ms"] and case["repair_ms"]
    assert (Path(case["logs"]) / "err.log").exists()
