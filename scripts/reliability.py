"""Times for docs/reliability.md: how long until a death is noticed, for each way to die, and how long a repair takes.

Detection is from the moment at which the rank dies (or stops to work) to the moment at which the leader of the
survivors notices; repair is from there to the agreed new world, on the slowest survivor. Everything is measured on
real processes under the real launcher: detection with the core trainer of chaos.py, 8 replicas of one rank; repair
with layer 1 alone, so that many ranks start fast.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from megatron_recover.collectives.repair import SETTLE_S
from megatron_recover.errors import UserError
from megatron_recover.faults import Fault
from trials import core_trainer
from trials.case import Case
from trials.figures import detection_table, draw_repair, repair_table
from trials.jobs import run
from trials.judge import HEARTBEAT_TIMEOUT_S, PROGRESS_TIMEOUT_S

KINDS = ("kill", "segfault", "exit", "crash", "exception", "oom", "stop", "gil", "hang")
RANKS = (2, 4, 8, 16, 32)
PHASES = ("forward", "backward", "commit", "optimizer", "data")
TIMEOUTS = {
    "stop": f"heartbeat timeout ({HEARTBEAT_TIMEOUT_S:g} s)",
    "gil": f"heartbeat timeout ({HEARTBEAT_TIMEOUT_S:g} s)",
    "hang": f"progress timeout ({PROGRESS_TIMEOUT_S:g} s)",
}
_EPILOG = """examples:
  everything, 30 trials each (about 20 minutes on 2 cores):
    python scripts/reliability.py
  only how fast SIGSTOP is found, 10 trials:
    python scripts/reliability.py --what detection --kinds stop --trials 10
  only repairs of 2 and 32 ranks:
    python scripts/reliability.py --what repair --ranks 2,32
"""


def detection_case(kind: str, turn: int, failures: int) -> Case:
    """A job in which ranks are lost one after another, in changing phases, the leader among them."""
    victims = [(turn + 3 * n) % 8 for n in range(failures)]
    faults = [
        Fault(kind, rank, 2 + n, PHASES[(turn + n) % len(PHASES)], 0) for n, rank in enumerate(dict.fromkeys(victims))
    ]
    return Case("core", "8x1", microbatches=16, width=4800, faults=tuple(faults))


def measure_detection(kind: str, trials: int, scratch: Path) -> list[float]:
    """Milliseconds from death to notice.

    Raises:
        UserError: a job did not survive.
    """
    found: list[float] = []
    turn = 0
    while len(found) < trials:
        case = detection_case(kind, turn, min(7, trials - len(found)))
        folder = Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=scratch)).resolve()
        result = core_trainer.run_case(case, turn, folder)
        if not result.is_good:
            raise UserError(f"{kind}: a job was {result.verdict}: {result.reason}\n  {case.command}\n  logs: {folder}")
        shutil.rmtree(folder)
        found += result.detect_ms
        turn += 1
        _say(f"{kind}: {len(found)} of {trials}")
    return found[:trials]


def measure_repair(ranks: int, trials: int, scratch: Path) -> list[float]:
    """Milliseconds of repairs in which one of about ``ranks`` ranks is lost (never fewer than 7/8 of them).

    Raises:
        UserError: a job did not survive.
    """
    found: list[float] = []
    while len(found) < trials:
        victims = [ranks - 1 - 2 * n for n in range(max(1, ranks // 8))]
        folder = Path(tempfile.mkdtemp(prefix=f"repair-{ranks}-", dir=scratch)).resolve()
        out = folder / "repairs.json"
        job = {"victims": victims, "elements": 1 << 16, "out": str(out)}
        program = Path(__file__).with_name("trials") / "repair_program.py"
        command = [sys.executable, "-m", "megatron_recover.cli", "launch", "-n", str(ranks)]
        command += ["--entry", "trials.repair_program", "--", str(program), json.dumps(job)]
        ended = run(command, folder, 60.0 + 3.0 * ranks)
        if ended.code != 0 or not out.exists():
            raise UserError(f"{ranks} ranks: exit code {ended.code}, {ended.last_words}; logs: {folder}")
        everybodys: list[list[float]] = json.loads(out.read_text())
        found += [max(times) for times in zip(*everybodys, strict=True)]
        shutil.rmtree(folder)
        _say(f"{ranks} ranks: {len(found)} of {trials}")
    return found[:trials]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--what", choices=("detection", "repair", "all"), default="all", help="default: all")
    parser.add_argument("--trials", type=int, default=30, metavar="N", help="of each kind or size (default: 30)")
    parser.add_argument("--kinds", default=",".join(KINDS), metavar="K,K", help="default: %(default)s")
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)), metavar="N,N", help="default: %(default)s")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/reliability.json"),
        metavar="FILE",
        help="the Markdown tables and the picture get the same name with .md and .png (default: %(default)s)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    args = build_parser().parse_args(argv)
    kinds, ranks = args.kinds.split(","), [int(word) for word in args.ranks.split(",")]
    scratch = args.out.parent / "reliability"
    scratch.mkdir(parents=True, exist_ok=True)
    figures: dict[str, dict[str, list[float]]] = {}
    tables: list[str] = []
    try:
        if unknown := set(kinds) - set(KINDS):
            raise UserError(f"--kinds {', '.join(sorted(unknown))}: choose from {', '.join(KINDS)}.")
        if args.what != "repair":
            figures["detect_ms"] = {kind: measure_detection(kind, args.trials, scratch) for kind in kinds}
            tables.append(detection_table(figures["detect_ms"], TIMEOUTS))
        if args.what != "detection":
            figures["repair_ms"] = {str(n): measure_repair(n, args.trials, scratch) for n in ranks}
            tables.append(repair_table(figures["repair_ms"]))
            draw_repair(figures["repair_ms"], SETTLE_S * 1e3, args.out.with_suffix(".png"))
    except UserError as error:
        print(f"reliability: {error}", file=sys.stderr)
        return int(error.exit_code)
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
    head = {"time": datetime.now(UTC).isoformat(timespec="seconds"), **machine}
    args.out.write_text(json.dumps({**head, **figures}, indent=1) + "\n")
    text = "\n\n".join(tables) + "\n"
    args.out.with_suffix(".md").write_text(text)
    print(text)
    _say(f"Results: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
