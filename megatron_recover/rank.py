"""A rank from its first line to its last: runs the training script, and ends in a way that others can live with.

Started by ``run`` in a process of its own, under a keeper.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import runpy
import signal
import sys
import time
from collections.abc import Sequence

from megatron_recover.errors import ExitCode, RecoverError, UserError
from megatron_recover.faults import FaultInjector, faults_of_this_try
from megatron_recover.lease import own_lease
from megatron_recover.leaving import (
    code_of,
    describe,
    end_together,
    leave_as_failed,
    report_error,
    write_status,
)
from megatron_recover.preflight import ScriptArguments
from megatron_recover.session import Session

ORPHAN_GRACE_S = 1.0
"""How long a rank whose own groups broke waits to be found an orphan before it reports an error."""


def main(argv: Sequence[str]) -> None:
    """Runs the script ``argv[0]`` with the arguments after it. Does not return."""
    arguments = list(argv)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    script, sys.argv = arguments[0], arguments
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    try:
        _inject_at_launch(arguments[1:])
        if "--recover" in arguments[1:]:
            from megatron_recover.megatron.install import install

            install(arguments[1:])
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr, flush=True)
            write_status(code, f"the training script ended with exit code {code}")
            leave_as_failed(f"the script ended with exit code {code}", quiet=True)
    except UserError as error:
        if _rank() == 0:
            print(f"error: {error}", file=sys.__stderr__, flush=True)
        write_status(error.exit_code, str(error))
        leave_as_failed(str(error), quiet=True)
    except RecoverError as error:  # raised on all living ranks together
        if (session := Session.current()) is not None:
            _end_in_agreement(session, error)
        _fail(error)
    except BaseException as error:
        _fail(error)
    session = Session.current()
    if session is None:
        write_status(0, "done")
        end_together(0)
    else:
        _end_in_agreement(session, None)


def _inject_at_launch(arguments: Sequence[str]) -> None:
    """Carries out an injected failure that is due before MPI is up."""
    specs = ScriptArguments(arguments).values("--recover-inject")
    if any("launch" in spec for spec in specs):
        FaultInjector(faults_of_this_try(specs, None), _rank()).at("launch", 0)


def _end_in_agreement(session: Session, error: RecoverError | None) -> None:
    """The leader writes down how it ended (the next one does, if it is lost in that), all agree, then all leave."""
    code, reason = (0, "done") if error is None else (code_of(error), str(error))
    for fault in session.pending_faults:
        if fault.phase == "exit":
            continue
        message = f"fault injection: {fault.spec} did not happen: this rank never came there"
        print(message, file=sys.__stderr__, flush=True)

    def write_down() -> None:
        if session.coordinate == 0:
            if error is not None:
                print(f"error: {error}", file=sys.__stderr__, flush=True)
            write_status(code, reason)
            session.observer.finished(code, reason)

    session.is_ending = True
    session.by_leader(write_down, check=False)
    session.at("exit")
    # A rank that is lost here is lost after everything was written.
    session.close()
    end_together(code)


def _fail(error: BaseException) -> None:
    session = Session.current()
    if session is not None and session.layout.replica_size > 1 and _is_communication_error(error):
        # Most likely a peer of this replica died: then the engine sees that in a moment and ends this process,
        # quietly, as an orphan.
        time.sleep(ORPHAN_GRACE_S)
    with contextlib.suppress(Exception):
        report_error(error, _rank())
        if session is None and type(error).__module__.startswith("mpi4py"):
            # A peer was lost before the engine was there to repair it: the launcher starts again.
            write_status(ExitCode.GAVE_UP, f"MPI failed at the start: {describe(error)}")
        else:
            write_status(code_of(error), describe(error))
    leave_as_failed(f"{type(error).__name__}", quiet=True)


def _is_communication_error(error: BaseException) -> bool:
    """Whether an error comes from the replica's own torch.distributed groups."""
    words = ("gloo", "nccl", "connection", "c10d", "tcpstore", "socket")
    return isinstance(error, (RuntimeError, OSError)) and any(word in str(error).lower() for word in words)


def _rank() -> int:
    return own_lease().rank

