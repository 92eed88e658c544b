"""Is a rank that is only busy ever taken for dead? Real Megatron on an overloaded host, for as long as you like.

Starts one job after another until the time is over: each builds its data sets afresh, trains, evaluates, saves
checkpoints, reads with data workers and compiles (torch.compile) in the middle of training, while other processes
keep every core busy. Any failure that is reported is a false alarm, as nothing is killed.

examples:
  scripts/bench/false_alarms.py                          10 minutes, 8 ranks, 2 busy processes
  scripts/bench/false_alarms.py --minutes 1 --ranks 4
  scripts/bench/false_alarms.py --heartbeat-timeout 2    how low could the timeout be?

Ends with 1 if there was a false alarm. Writes runs/false_alarms.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_recover.timeouts import HEARTBEAT_TIMEOUT_S

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("busy_pretrain.py")
MODEL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--position-embedding-type rope --micro-batch-size 2 --global-batch-size 32 --train-iters 12 --lr 1e-3 "
    "--lr-decay-style constant --num-workers 1 --log-interval 1 --eval-iters 1 --eval-interval 4 --save-interval 4 "
    "--split 90,10,0 --tokenizer-type NullTokenizer --vocab-size 2048 --recover --recover-device cpu"
)


def keep_busy() -> None:
    """A process that computes for ever."""
    number = 1
    while True:
        number = (number * 6364136223846793005 + 1442695040888963407) % (1 << 64)


def run_job(ranks: int, timeout_s: float, data: Path) -> dict[str, Any]:
    """One job. Returns what its ranks and its event log said."""
    with tempfile.TemporaryDirectory(prefix="false-alarms-") as folder:
        events = Path(folder) / "events.jsonl"
        command = [sys.executable, "-m", "megatron_recover.cli", "launch", "-n", str(ranks), "--", str(PROGRAM)]
        command += [*MODEL.split(), "--data-path", str(data), "--data-cache-path", f"{folder}/cache"]
        command += ["--save", f"{folder}/save", "--recover-events", str(events)]
        command += ["--recover-heartbeat-timeout", f"{timeout_s:g}"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=1800, check=False)
        log = [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []
    results = [json.loads(line.split("RESULT ", 1)[1]) for line in done.stdout.splitlines() if "RESULT {" in line]
    return {
        "exit_code": done.returncode,
        "false_alarms": [event for event in log if event["event"] in ("failure", "leave")],
        "silences_s": [result["longest_silence_s"] for result in results],
        "compile_s": [result["compile_s"] for result in results],
        "error": "" if done.returncode == 0 else done.stderr[-3000:],
    }


def main() -> int:
    """Runs jobs until the time is over and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--minutes", type=float, default=10.0, metavar="M")
    parser.add_argument("--ranks", type=int, default=8, metavar="N")
    parser.add_argument("--busy", type=int, default=2, metavar="K", help="processes that only compute")
    parser.add_argument("--heartbeat-timeout", type=float, default=HEARTBEAT_TIMEOUT_S, metavar="S")
    parser.add_argument("--data", type=Path, default=REPOSITORY / "data" / "demo" / "corpus", metavar="PREFIX")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "runs" / "false_alarms.json", metavar="FILE")
    options = parser.parse_args()
    if not options.minutes > 0:
        parser.error("--minutes: give more than 0")
    if not options.data.with_suffix(".idx").exists():
        parser.error(f"there is no {options.data}.idx: run scripts/demo/prepare.py first, or give --data")
    console = Console()
    busy = [multiprocessing.Process(target=keep_busy, daemon=True) for _ in range(options.busy)]
    for process in busy:
        process.start()
    begin, jobs = time.monotonic(), []
    try:
        while time.monotonic() - begin < options.minutes * 60:
            job = run_job(options.ranks, options.heartbeat_timeout, options.data)
            jobs.append(job)
            worst = max(job["silences_s"], default=float("nan"))
            console.print(
                f"job {len(jobs)}, minute {(time.monotonic() - begin) / 60:.1f}: exit code {job['exit_code']}, "
                f"{len(job['false_alarms'])} false alarms, longest silence {worst:.2f} s {job['error']}"
            )
    finally:
        for process in busy:
            process.kill()
    silences = [silence for job in jobs for silence in job["silences_s"]]
    alarms = sum(len(job["false_alarms"]) for job in jobs)
    failed = sum(job["exit_code"] != 0 for job in jobs)
    table = Table(title="Busy ranks taken for dead")
    columns = ("minutes", "jobs", "ranks", "busy", "timeout (s)", "false alarms", "median (s)", "longest silence (s)")
    for column in columns:
        table.add_column(column, justify="right")
    table.add_row(
        f"{(time.monotonic() - begin) / 60:.1f}",
        str(len(jobs)),
        str(options.ranks),
        str(options.busy),
        f"{options.heartbeat_timeout:g}",
        str(alarms),
        f"{statistics.median(silences):.2f}" if silences else "-",
        f"{max(silences):.2f}" if silences else "-",
    )
    console.print(table)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    used = {name: str(value) for name, value in vars(options).items()}
    options.out.write_text(json.dumps({"options": used, "jobs": jobs}, indent=1))
    return int(alarms > 0 or failed > 0)


if __name__ == "__main__":
    sys.exit(main())
