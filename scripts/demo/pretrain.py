"""``make pretrain``: pre-train a small GPT with Megatron, kill replicas on the way, and compare the curves.

Prepares the demo's data, runs the training without failures, runs the same again with SIGKILLs, and reports.
Everything lands in ``runs/pretrain/``: ``reference.log``, ``train.log``, ``events.jsonl``, ``loss.png``.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rich.console import Console

from job import JobResult, run_job
from megatron_recover.errors import UserError
from prepare import DemoData, prepare
from report import make_console, report
from run_log import Run, differences, read_run
from run_view import RunView

ROOT = Path(__file__).resolve().parents[2]
_TAIL_LINES = 30
_TOLERANCE = 1e-5
"""Largest relative difference in loss that counts as the same curve (float32 sums in another order)."""

# A small GPT, but every part of a real one; several gradient buckets, so that a kill can hit between them.
# With the usual initial deviation of 0.02, a model this narrow passes points where its residual stream is
# almost zero, and the loss of one iteration jumps.
MODEL = shlex.split("""
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128
    --position-embedding-type rope --init-method-std 0.08
    --transformer-impl local --attention-dropout 0 --hidden-dropout 0 --attention-backend unfused
    --no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion
    --no-bias-dropout-fusion --no-rope-fusion --use-cpu-initialization --distributed-backend gloo
    --disable-gloo-process-groups
""")
TRAINING = shlex.split("""
    --micro-batch-size 2 --global-batch-size 32 --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine
    --lr-warmup-iters 3 --weight-decay 0.1 --clip-grad 1.0 --seed 1234 --split 100,0,0
    --eval-iters 0 --eval-interval 1000 --num-workers 0 --log-interval 1
    --overlap-grad-reduce --ddp-bucket-size 300000
""")


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run."""

    iterations: int
    replicas: int
    injections: tuple[str, ...]
    out: Path
    timeout_s: float

    @property
    def events(self) -> Path:
        """Where the run with failures writes its events."""
        return self.out / "events.jsonl"


def default_injections(iterations: int, replicas: int) -> tuple[str, ...]:
    """Two kills, one in backward and one in the middle of the gradient reduction (one for two replicas)."""
    first, second = max(1, round(iterations * 8 / 30)), max(2, round(iterations * 16 / 30))
    kills = (
        f"kill:rank=1,iteration={first},phase=backward,microbatch=1",
        f"kill:rank=2,iteration={second},phase=reduce,bucket=1",
    )
    return kills[: replicas - 1]


def launch_command(plan: Plan, data: DemoData, injections: Sequence[str], events: Path | None) -> list[str]:
    """The command line a user would type, from the launcher to the last argument of the script."""
    launcher = Path(sys.executable).with_name("megatron-recover")
    if not launcher.exists():
        raise UserError(f"{launcher} is missing: install the package first, with make venv.")
    command = [
        str(launcher),
        "launch",
        "-n",
        str(plan.replicas),
        "--",
        str(ROOT / "scripts" / "pretrain_gpt.py"),
    ]
    command += [
        *MODEL,
        *TRAINING,
        "--train-iters",
        str(plan.iterations),
        "--lr-decay-iters",
        str(plan.iterations),
    ]
    command += ["--data-path", str(data.prefix), "--tokenizer-type", "HuggingFaceTokenizer"]
    command += ["--tokenizer-model", str(data.tokenizer), "--recover", "--recover-device", "cpu"]
    if events is not None:
        command += ["--recover-events", str(events)]
    for spec in injections:
        command += ["--recover-inject", spec]
    return command


def train(
    title: str, command: list[str], log: Path, plan: Plan, events: Path | None, console: Console
) -> JobResult:
    """Run one of the two trainings, showing what it does."""
    env = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    # the tokenizer lies on disk; without this, transformers asks the network first, on every rank
    env.setdefault("HF_HUB_OFFLINE", "1")
    with RunView(title, plan.iterations, plan.replicas, events, console) as view:
        result = run_job(command, log, plan.timeout_s, on_line=view.line, on_tick=view.tick, env=env)
        view.finish(result.exit_code == 0 and not result.timed_out)
    return result


def explain(result: JobResult, log: Path, plan: Plan) -> None:
    """Say how a run went wrong and show the end of its log, on stderr."""
    tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
    print(f"--- last {len(tail)} lines of {log}", *tail, "---", sep="\n", file=sys.stderr)
    how = (
        f"took longer than {plan.timeout_s:.0f} s (--timeout)"
        if result.timed_out
        else f"ended with {result.exit_code}"
    )
    print(f"pretrain: the run {how}; the whole log is {log}.", file=sys.stderr)


def verdict(reference: Run, run: Run, plan: Plan) -> str | None:
    """Why the two runs do not show what they should, or None where they do."""
    for name, found in (("failure-free run", reference), ("run with failures", run)):
        if len(found.points) != plan.iterations:
            return f"the {name} logged {len(found.points)} of {plan.iterations} iterations"
    lost = sum(len(failure.ranks) for failure in run.failures)
    if lost < len(plan.injections):
        return f"{len(plan.injections)} kills were asked for, but {plan.events} reports {lost} lost ranks"
    for iteration, difference in differences(reference, run, "loss").items():
        if not difference <= _TOLERANCE * abs(reference.points[iteration].loss):
            return f"at iteration {iteration} the losses differ by {difference:.1e}"
    return None


def pretrain(plan: Plan, console: Console) -> int:
    """The whole demo; returns the exit code.

    Raises:
        UserError: something is missing before anything runs.
    """
    console.print("Preparing text and tokenizer (pydoc_data.topics) ...", style="dim")
    data = prepare(ROOT / "data" / "demo")
    console.print(
        f"Data: {data.documents} documents, {data.tokens:,} tokens in {data.prefix.parent}", highlight=False
    )
    plan.out.mkdir(parents=True, exist_ok=True)
    reference_log, train_log = plan.out / "reference.log", plan.out / "train.log"
    for old in (reference_log, train_log, plan.events, plan.out / "loss.png"):
        old.unlink(missing_ok=True)

    runs: list[tuple[str, Path, tuple[str, ...], Path | None]] = [
        ("without failures", reference_log, (), None),
        ("with failures", train_log, plan.injections, plan.events),
    ]
    for title, log, injections, events in runs:
        command = launch_command(plan, data, injections, events)
        result = train(title, command, log, plan, events, console)
        if result.exit_code != 0 or result.timed_out:
            explain(result, log, plan)
            return result.exit_code if result.exit_code > 0 else 1

    reference = read_run(reference_log, ())
    run = read_run(plan.out, ("train.log",))
    report(reference, run, plan.out / "loss.png", console)
    console.print(
        f"Events:  {plan.events}\nLogs:    {train_log}, {reference_log}", highlight=False, soft_wrap=True
    )
    problem = verdict(reference, run, plan)
    if problem is not None:
        print(f"pretrain: {problem}.", file=sys.stderr)
        return 1
    lost = sum(len(failure.replicas) for failure in run.failures)
    console.print(
        f"{lost} of {plan.replicas} replicas lost, {run.redone} microbatches redone, the same curve.",
        style="bold",
    )
    return 0


def _stop(number: int, _frame: FrameType | None) -> None:
    """On a signal that would end this process at once: unwind instead, so that the job is ended too."""
    raise SystemExit(128 + number)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description="Pre-train with Megatron on CPU, kill replicas, keep the curve."
    )
    parser.add_argument("--iterations", type=int, default=30, metavar="N", help="default: %(default)s")
    parser.add_argument("--replicas", type=int, default=4, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--inject",
        action="append",
        default=None,
        metavar="SPEC",
        help="failure to inject, as for --recover-inject; repeatable, replaces the two default kills",
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "runs" / "pretrain", metavar="DIR", help="default: %(default)s"
    )
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="S", help="limit of each run (default: 300 s)"
    )
    args = parser.parse_args(argv)
    try:
        if args.replicas < 2:
            raise UserError(f"--replicas {args.replicas}: give 2 or more, or nobody is left to take over.")
        if args.iterations < 4:
            raise UserError(
                f"--iterations {args.iterations}: give 4 or more, so that failures have a before and after."
            )
        injections = tuple(args.inject or default_injections(args.iterations, args.replicas))
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _stop)
        plan = Plan(args.iterations, args.replicas, injections, args.out, args.timeout)
        return pretrain(plan, make_console())
    except UserError as error:
        print(f"pretrain: {error}", file=sys.stderr)
        return int(error.exit_code)
    except KeyboardInterrupt:
        print("pretrain: interrupted; the job was ended.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
