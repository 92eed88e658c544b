"""The ``megatron-recover`` command."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence

from megatron_recover.errors import EXIT_TABLE, ExitCode, UserError
from megatron_recover.faults import GRAMMAR

_DESCRIPTION = "Pre-training with Megatron that goes on when GPUs are lost."
_EPILOG = """commands:
  launch        start a training script on N ranks
  doctor        say in one screen whether this machine is ready
  prepare-data  turn text into the .bin/.idx pair that Megatron reads

a first run:
  megatron-recover doctor
  megatron-recover prepare-data --text notes.txt --tokenizer gpt2 --out data/notes
  megatron-recover launch -n 4 -- pretrain_gpt.py --recover --data-path data/notes ...

`megatron-recover COMMAND --help` explains each one.
"""
_LAUNCH_USAGE = "megatron-recover launch -n N [options] [mpirun options] -- SCRIPT ARGS"


def _exit_codes() -> str:
    """The table of exit codes, for a terminal."""
    rows = []
    for code, name, advice in EXIT_TABLE:
        rows += textwrap.wrap(f"{code:<7} {name}: {advice}", 100, initial_indent="  ", subsequent_indent=" " * 10)
    return "\n".join(rows)


_LAUNCH_EPILOG = f"""SCRIPT is any Megatron pretrain_*.py (unchanged; --recover among its ARGS) or any program
on megatron_recover.session. The N ranks are cut into replicas of tensor x pipeline x context parallel
size x --recover-shards ranks. Options that are not listed here go to mpirun as they are.

examples:
  four replicas of one rank each, on this machine:
    megatron-recover launch -n 4 -- pretrain_gpt.py --recover --tensor-model-parallel-size 1 ...
  try out a failure: rank 3 is killed in the gradient reduction of iteration 5:
    megatron-recover launch -n 4 -- pretrain_gpt.py --recover ... \\
        --recover-inject kill:rank=3,iteration=5,phase=reduce,bucket=1
  two hosts of eight ranks, and a network interface for mpirun:
    megatron-recover launch -n 16 --host a:8,b:8 --mca btl_tcp_if_include eth0 -- \\
        pretrain_gpt.py --recover ...

failures, --recover-inject:
  {GRAMMAR}

signals: SIGTERM, SIGHUP and the first Ctrl-C are passed to the ranks as SIGTERM (with Megatron's
--exit-signal-handler they save and end); the second Ctrl-C ends the job at once.

restarts: what cannot be survived inside an iteration (exit codes 71 and 73, the loss of a host, a start that
does not come up) starts the job again from its last checkpoint in --save, on what is left of it; at most
--max-restarts times, and not when a try came no further than the one before.

exit codes (for any but 0 the last line says why):
{_exit_codes()}
"""
_DOCTOR_EPILOG = """It looks at Python, torch, CUDA, megatron-core, MPI and its fault tolerance, and runs two
ranks of which one is killed: the other has to notice, repair and go on.

example:
  megatron-recover doctor && sbatch train.sbatch

exit codes: 0 ready; 2 not ready, the last lines say what to do.
"""
_PREPARE_EPILOG = """Documents are read as a stream, tokenised, and written in Megatron's own format.

examples:
  a text file, with a tokenizer from a folder:
    megatron-recover prepare-data --text book.txt --tokenizer tokenizers/bpe --out data/book
  a data set of the Hugging Face hub:
    megatron-recover prepare-data --hf-dataset wikitext --split train --column text \\
        --tokenizer gpt2 --out data/wiki
  then train on it:
    megatron-recover launch -n 4 -- pretrain_gpt.py --recover --data-path data/book ...
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code. Mistakes of the user are one message and exit code 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    commands = {"launch": _launch, "doctor": _doctor, "prepare-data": _prepare_data}
    parser = argparse.ArgumentParser(
        prog="megatron-recover",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=commands, metavar="COMMAND", help="launch, doctor or prepare-data")
    if not words:
        parser.print_help()
        return ExitCode.BAD_CONFIGURATION
    command = parser.parse_args(words[:1]).command
    try:
        return commands[command](words[1:])
    except UserError as error:
        print(f"megatron-recover: error: {error}", file=sys.stderr, flush=True)
        return error.exit_code


def _launch(words: list[str]) -> int:
    from megatron_recover.launch import ENTRY_MODULE, MAX_RESTARTS, START_TIMEOUT_S, Launch, launch

    parser = argparse.ArgumentParser(
        prog="megatron-recover launch",
        usage=_LAUNCH_USAGE,
        description="Starts a training script on N ranks; it goes on when some of them are lost.",
        epilog=_LAUNCH_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # mpirun's own options must not be taken for short forms of ours
    )
    parser.add_argument(
        "-n", "-np", "--np", dest="num_ranks", type=int, required=True, metavar="N", help="ranks"
    )
    parser.add_argument("--timeout", type=float, metavar="S", help="stop the job after S seconds")
    parser.add_argument(
        "--log-dir", metavar="DIR", help="also append all output to DIR/stdout.log and DIR/stderr.log"
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=MAX_RESTARTS,
        metavar="N",
        help="start the job again from its last checkpoint at most N times; 0: never. Default: %(default)s",
    )
    parser.add_argument(
        "--start-timeout",
        type=float,
        default=START_TIMEOUT_S,
        metavar="S",
        help="take a start that stands still for S seconds for lost. Default: %(default)g",
    )
    parser.add_argument(
        "--entry", default=ENTRY_MODULE, help=argparse.SUPPRESS
    )  # for tests of the launcher itself
    split = words.index("--") if "--" in words else len(words)
    ours, script = words[:split], words[split + 1 :]
    options, mpirun_options = parser.parse_known_args(ours)
    if not script:
        raise UserError(
            f"no script: put `--` and the training script after the options, as in\n  {_LAUNCH_USAGE}"
        )
    return launch(
        Launch(
            num_ranks=options.num_ranks,
            script=script[0],
            script_arguments=tuple(script[1:]),
            mpirun_options=tuple(mpirun_options),
            timeout_s=options.timeout,
            log_dir=options.log_dir,
            max_restarts=options.max_restarts,
            start_timeout_s=options.start_timeout,
            entry=options.entry,
        )
    )


def _doctor(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="megatron-recover doctor",
        description="Says in one screen whether this machine can run megatron-recover.",
        epilog=_DOCTOR_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args(words)
    from megatron_recover.doctor import examine

    return examine()


def _prepare_data(words: list[str]) -> int:
    from megatron_recover import prepare_data

    parser = argparse.ArgumentParser(
        prog="megatron-recover prepare-data",
        description="Turns text into the .bin/.idx pair that Megatron reads.",
        epilog=_PREPARE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    prepare_data.add_arguments(parser)
    return prepare_data.main(parser.parse_args(words))


if __name__ == "__main__":
    sys.exit(main())
