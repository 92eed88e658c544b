"""Cases on the core: ``core_program`` under the real launcher, and what its survivors have to report."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

from trials.case import Case, Result
from trials.core_model import Curve, failure_free
from trials.jobs import Ended, run
from trials.judge import (
    HEARTBEAT_TIMEOUT_S,
    LAUNCHER_OPTIONS,
    PROGRESS_TIMEOUT_S,
    REPAIR_TIMEOUT_S,
    SETUP_TIMEOUT_S,
    Findings,
    Wrong,
    difference,
    judge,
)

PROGRAM = Path(__file__).with_name("core_program.py")


def run_case(case: Case, number: int, folder: Path) -> Result:
    """Runs a case in an empty folder."""
    job = {
        "folder": str(folder),
        "replica_size": case.replica_size,
        "policy": case.policy,
        "overlap": case.overlap,
        "iterations": case.iterations,
        "microbatches": case.microbatches,
        "width": case.width,
        "eval_every": case.eval_every,
        "save_every": case.save_every,
        "faults": [fault.spec for fault in case.faults],
        "session": {
            "heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S,
            "progress_timeout_s": PROGRESS_TIMEOUT_S,
            "repair_timeout_s": REPAIR_TIMEOUT_S,
            "setup_timeout_s": SETUP_TIMEOUT_S,
        },
    }
    command = [sys.executable, "-m", "megatron_recover.cli", "launch", "-n", str(case.num_ranks)]
    command += [*LAUNCHER_OPTIONS, "--", str(PROGRAM), json.dumps(job)]
    return judge(case, number, run(command, folder, case.deadline_s), folder, read)


@functools.lru_cache(64)
def _reference(width: int, iterations: int, microbatches: int, eval_every: int) -> Curve:
    return failure_free(width, iterations, microbatches, eval_every)


def read(case: Case, ended: Ended, folder: Path) -> Findings:
    """Reads what the survivors wrote.

    Raises:
        Wrong: the invariant was broken, survivors differ, or a loss is not on the failure-free curve.
    """
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("result-*.json"))]
    if not results:
        raise Wrong("no rank came to its end")
    tries = max(one["try"] for one in results)
    results = [one for one in results if one["try"] == tries]
    _compare(case, results, tries)
    curve = _reference(case.width, case.iterations, case.microbatches, case.eval_every)
    largest = 0.0
    for what, expected in (("losses", curve.losses), ("evaluations", curve.evaluations)):
        ours = {int(step): values for step, values in results[0][what].items()}
        missing = set(expected) - set(ours)
        if tries == 1 and missing:
            raise Wrong(f"{what} of iterations {sorted(missing)} are missing")
        largest = max(largest, difference(ours, expected, what))
    return Findings(tries, results[0]["alive"], largest)


def _compare(case: Case, results: list[dict[str, Any]], tries: int) -> None:
    for one in results:
        if one["wrong"]:
            raise Wrong(f"rank {one['rank']}: {one['wrong'][0]}")
        for what in ("losses", "evaluations", "alive"):
            if one[what] != results[0][what]:
                raise Wrong(f"{what} of ranks {results[0]['rank']} and {one['rank']} differ")
        peers = [other for other in results if other["coordinate"] == one["coordinate"]]
        if one["weights"] != peers[0]["weights"]:
            raise Wrong(f"weights of ranks {peers[0]['rank']} and {one['rank']} differ")
    if tries == 1:
        expected = [r for r in range(case.num_ranks) if case.replica_of(r) in results[0]["alive"]]
        if sorted(one["rank"] for one in results) != expected:
            raise Wrong(f"ranks {[one['rank'] for one in results]} came to their end, not {expected}")
