"""Lose ranks at random, many times, and see that every run comes to the right end.

Each case is a real job under the real launcher, in which up to all replicas but one are lost: in random layouts,
in random ways, at random moments, one after another or in the same moment. It has survived when it ends with exit
code 0, each microbatch was used exactly once, all losses are those of a run without failures (within 1e-5), and the
replicas that are left are those that had no fault.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from megatron_recover.errors import UserError
from trials import core_trainer, megatron_trainer
from trials.case import TRAINERS, Case, Result, parse_case
from trials.draw import READY_KINDS, READY_PHASES, Menu, draw
from trials.table import build_table, line, markdown, summary, write_json

_EPILOG = f"""examples:
  60 failures on the small trainer of the core, about 3 minutes on 2 cores:
    python scripts/chaos.py --failures 60 --seed 1
  12 failures on the real Megatron:
    python scripts/chaos.py --trainer megatron --failures 12
  only SIGKILL and SIGSTOP in the reduction and the repair, in 4 replicas of 2 ranks:
    python scripts/chaos.py --kinds kill,stop --phases reduce,repair --layout 8x2 --failures 20
  one case once more, as the table or the log of a failing one names it:
    python scripts/chaos.py --repeat 'core layout=4x1 kill:rank=1,iteration=3,phase=reduce,bucket=1'
  the same by number, ten times, keeping all logs:
    python scripts/chaos.py --seed 1 --case 17 --times 10 --keep-logs

kinds:  {", ".join(READY_KINDS)}
phases: {", ".join(READY_PHASES)}

A cell of the table counts the faults of a kind at a moment that really happened: 12 survived, 12+1r: one more only
because the launcher started the job again; HUNG and WRONG are spelled out (each fault of such a job counts).
exit codes: 0 nothing hung or was wrong; 1 something did; 2 refused.
"""
_MOST_CASES_FOR_NOTHING = 20
"""Cases in a row in which no fault happens, after which this stops."""


def run_case(case: Case, number: int, *, keep_logs: bool, root: Path) -> Result:
    """Runs one case in a folder of its own, which stays when it fails."""
    root.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"case-{number}-", dir=root)).resolve()
    trainer = core_trainer if case.trainer == "core" else megatron_trainer
    try:
        result = trainer.run_case(case, number, folder)
        (folder / "case.txt").write_text(f"{case.command}\n{result.verdict} {result.reason}\n")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if result.is_good and not keep_logs:
        shutil.rmtree(folder, ignore_errors=True)
        result.logs = ""
    return result


@contextmanager
def reporting(console: Console, wanted: int) -> Iterator[Callable[[Result], None]]:
    """A bar on a terminal, a line for each case in a log."""
    if not console.is_terminal:
        yield lambda result: console.print(line(result), soft_wrap=True, highlight=False, markup=False)
        return
    columns = [
        SpinnerColumn(),
        BarColumn(),
        TextColumn("{task.completed} of {task.total} failures"),
        TimeElapsedColumn(),
    ]
    with Progress(*columns, TextColumn("{task.description}"), console=console) as progress:
        task = progress.add_task("", total=wanted)

        def show(result: Result) -> None:
            if not result.is_good:
                console.print(line(result), soft_wrap=True, highlight=False, markup=False)
            progress.update(task, advance=len(result.fired), description=line(result).splitlines()[0])

        yield show


def cases(args: argparse.Namespace, menu: Menu) -> Iterator[tuple[int, Case]]:
    """What was asked for: one case some times, or new ones without end."""
    if args.repeat is not None or args.case is not None:
        case = parse_case(args.repeat) if args.repeat is not None else draw(menu, args.seed, args.case)
        for _ in range(args.times):
            yield args.case or 0, case
        return
    number = args.first_case
    while True:
        yield number, draw(menu, args.seed, number)
        number += 1


def chaos(args: argparse.Namespace, menu: Menu, console: Console) -> list[Result]:
    """Runs cases until the number of failures is reached. What was run is written, whatever ends it."""
    results: list[Result] = []
    single = args.repeat is not None or args.case is not None
    fired = for_nothing = 0
    head = {"seed": args.seed, "trainer": menu.trainer, "kinds": menu.kinds, "phases": menu.phases}
    with reporting(console, args.failures) as show:
        try:
            for number, case in cases(args, menu):
                result = run_case(case, number, keep_logs=args.keep_logs, root=args.out.parent / "chaos")
                results.append(result)
                show(result)
                write_json(results, args.out, head)
                fired += len(result.fired)
                for_nothing = 0 if result.fired else for_nothing + 1
                if not single and (fired >= args.failures or for_nothing >= _MOST_CASES_FOR_NOTHING):
                    break
        except KeyboardInterrupt:
            console.print("interrupted; the job was ended.", style="bold")
    return results


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--failures", type=int, default=20, metavar="N", help="failures that really happen (default: 20)"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="the cases depend on it alone (default: 1)")
    parser.add_argument("--trainer", choices=TRAINERS, default="core", help="default: core")
    parser.add_argument(
        "--layout", action="append", default=[], metavar="L", help="core: RANKSxSIZE; Megatron: dp4, ..."
    )
    parser.add_argument("--kinds", default=",".join(READY_KINDS), metavar="K,K", help="ways to be lost (default: all)")
    parser.add_argument("--phases", default=",".join(READY_PHASES), metavar="P,P", help="moments (default: all)")
    parser.add_argument("--first-case", type=int, default=1, metavar="K", help="begin with this case of the seed")
    parser.add_argument("--case", type=int, metavar="K", help="only this case of the seed")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="print the table of a run's FILE for the docs")
    parser.add_argument("--repeat", metavar="CASE", help="only this case, in the words that the output gives")
    parser.add_argument("--times", type=int, default=1, metavar="N", help="how often, with --case or --repeat")
    parser.add_argument("--keep-logs", action="store_true", help="also of cases that survived")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/chaos.json"), metavar="FILE", help="default: %(default)s"
    )
    return parser


def _stop(number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    args = build_parser().parse_args(argv)
    if args.markdown is not None:
        print(markdown(args.markdown))
        return 0
    if args.failures < 1:
        raise SystemExit("--failures: give 1 or more")
    console = Console() if sys.stdout.isatty() else Console(width=150)
    try:
        menu = Menu(args.trainer, tuple(args.layout), tuple(args.kinds.split(",")), tuple(args.phases.split(",")))
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _stop)
        results = chaos(args, menu, console)
    except UserError as error:
        print(f"chaos: {error}", file=sys.stderr)
        return int(error.exit_code)
    if not results:
        return 1
    console.print()
    console.print(build_table(results))
    for sentence in summary(results):
        console.print(sentence, highlight=False)
    bad = [result for result in results if not result.is_good]
    for result in bad:
        console.print(f"{result.verdict}: {result.reason}\n  {result.case.command}", soft_wrap=True, highlight=False)
    console.print(f"Results: {args.out}", highlight=False, soft_wrap=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
