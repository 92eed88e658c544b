"""Failure injection: a rank ends itself, really, at a chosen point of a chosen iteration.

A specification is one word, so that it fits on a command line and into a batch script::

    kill:rank=3,iteration=5,phase=reduce,bucket=1

It is carried out by the rank it names, at the place in the code that says ``injector.at(...)``. Nothing is
simulated: ``kill`` is SIGKILL, so what follows is what follows a lost GPU or an out-of-memory kill. Faults happen in
the first try of a job only: one that the launcher starts again is to come to its end.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

from megatron_recover.errors import UserError

KINDS: Mapping[str, str] = {
    "kill": "kills itself",
    "segfault": "ends with a segmentation fault",
    "exit": "leaves with os._exit(0)",
    "crash": "leaves with os._exit(1)",
    "exception": "raises an exception",
    "oom": "runs out of memory",
    "stop": "stops itself (SIGSTOP)",
    "gil": "holds Python's lock for ever",
    "hang": "hangs for ever",
    "term": "is sent SIGTERM",
    "pause": "pauses for 2 s, which is no failure,",
    "corrupt": "flips a bit of its parameters",
    "nan": "makes a gradient NaN",
}
"""Kind of fault -> what the rank does, as the log line says it."""

STATE_KINDS = ("corrupt", "nan")
"""Kinds that change the training state; whoever owns it says how (``FaultInjector.state_changers``)."""

PHASES: Mapping[str, str | None] = {
    "launch": None,
    "init": None,
    "model": None,
    "datasets": None,
    "data": "microbatch",
    "forward": "microbatch",
    "backward": "microbatch",
    "reduce": "bucket",
    "commit": None,
    "after-commit": None,
    "optimizer": None,
    "eval": "microbatch",
    "save": "step",
    "takeover": None,
    "repair": "step",
    "exit": None,
}
"""Phase of a run -> what its index counts (None: the phase happens once)."""

ONCE_PHASES = ("launch", "init", "model", "datasets", "takeover", "repair", "exit")
"""Phases that belong to no iteration. Start (before MPI, after it, before model and data sets), the first time that
the rank leads after another one, the first repair it takes part in, and the end (all have agreed that it is one)."""

REPAIR_STEPS = ("begin", "settled", "shrunk", "done")
"""What ``step`` counts in a repair: a failure was noticed; before Shrink; between Shrink and Agree; after it."""

SAVE_STEPS = ("written", "begin", "named", "writing")
"""And in a save: all of it is on disk, but does not count as a checkpoint yet; before anything is written; it counts;
a part of it is on disk. Ranks that do not save know only the first."""

_STEPS = {"repair": REPAIR_STEPS, "save": SAVE_STEPS}

PAUSE_S = 2.0
TRY_VARIABLE = "MEGATRON_RECOVER_TRY"
"""Environment variable: which start of the job this is, from 1."""


def _phases(unit: str) -> str:
    return ", ".join(phase for phase, counted in PHASES.items() if counted == unit)


def _steps() -> str:
    lists = {phase: ", ".join(f"{n} {name}" for n, name in enumerate(names)) for phase, names in _STEPS.items()}
    return "; ".join(f"{phase}: {names}" for phase, names in lists.items())


GRAMMAR = f"""KIND:rank=R,iteration=I,phase=P[,microbatch=K][,bucket=K][,step=K]
  KIND        {", ".join(KINDS)}
  rank        start rank, from 0
  iteration   iteration, from 1, as the training log prints it; left out with
              {", ".join(ONCE_PHASES)}
  phase       {", ".join(PHASES)}
  microbatch  only with {_phases("microbatch")}: the K-th one, from 0,
              that this rank runs in the iteration (default 0)
  bucket      only with {_phases("bucket")}: number of the gradient bucket, from 0 (default 0)
  step        only with {_phases("step")} (default 0): {_steps()}
  for example kill:rank=3,iteration=5,phase=reduce,bucket=1 or stop:rank=0,phase=takeover"""


class InjectedFault(RuntimeError):
    """What a fault of kind ``exception`` raises: stands for any error inside the training script."""


class DeathRecorder(Protocol):
    """What the injector needs of a black box (telemetry.blackbox.BlackBox)."""

    def mark(self, phase: str, iteration: int, index: int = -1) -> None: ...

    def die(self) -> None: ...


@dataclass(frozen=True)
class Fault:
    """What one rank does to itself. ``index`` is the microbatch, bucket or step, ``iteration`` 0 in ``ONCE_PHASES``."""

    kind: str
    rank: int
    iteration: int
    phase: str
    index: int = 0

    @property
    def spec(self) -> str:
        """The specification that ``parse_fault`` reads back to this fault."""
        unit = PHASES[self.phase]
        place = f",{unit}={self.index}" if unit else ""
        when = "" if self.phase in ONCE_PHASES else f"iteration={self.iteration},"
        return f"{self.kind}:rank={self.rank},{when}phase={self.phase}{place}"

    def __str__(self) -> str:
        unit = PHASES[self.phase]
        place = f", {unit} {self.index}" if unit else ""
        when = "" if self.phase in ONCE_PHASES else f"iteration {self.iteration}, "
        return f"rank {self.rank} {KINDS[self.kind]} in {when}phase {self.phase}{place}"


def parse_fault(spec: str) -> Fault:
    """Reads one specification.

    Raises:
        UserError: says which part is wrong and why, and shows the grammar.
    """

    def refuse(what: str) -> UserError:
        return UserError(f"--recover-inject {spec!r}: {what}. The form is\n{GRAMMAR}")

    kind, colon, rest = spec.strip().partition(":")
    if kind not in KINDS:
        raise refuse(f"unknown kind {kind!r}, it must be one of {', '.join(KINDS)}")
    if not colon or not rest.strip():
        raise refuse(f"nothing follows {kind!r}, expected ':rank=R,iteration=I,phase=P'")

    parts: dict[str, str] = {}
    for part in rest.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key not in ("rank", "iteration", "phase", "microbatch", "bucket", "step"):
            raise refuse(f"unknown part {part.strip()!r}")
        if not equals or not value:
            raise refuse(f"{key!r} has no value, write {key}=...")
        if key in parts:
            raise refuse(f"{key!r} is given twice")
        parts[key] = value
    once = parts.get("phase") in ONCE_PHASES
    for key in ("rank", "phase") if once else ("rank", "iteration", "phase"):
        if key not in parts:
            raise refuse(f"{key!r} is missing")

    phase = parts.pop("phase")
    if once and "iteration" in parts:
        raise refuse(f"phase {phase!r} belongs to no iteration, leave out 'iteration'")
    if phase not in PHASES:
        raise refuse(f"unknown phase {phase!r}, it must be one of {', '.join(PHASES)}")
    numbers: dict[str, int] = {}
    for key, value in parts.items():
        least = 1 if key == "iteration" else 0
        if not (value.isascii() and value.isdigit()) or int(value) < least:
            raise refuse(f"{key}={value!r} is not a whole number from {least}")
        numbers[key] = int(value)
    for unit in ("microbatch", "bucket", "step"):
        if unit in numbers and PHASES[phase] != unit:
            raise refuse(f"{unit!r} has no meaning in phase {phase!r}")
    index = numbers.get(PHASES[phase] or "", 0)
    if phase in _STEPS and index >= len(_STEPS[phase]):
        raise refuse(f"a {phase} has steps 0 to {len(_STEPS[phase]) - 1}")
    return Fault(kind, numbers["rank"], numbers.get("iteration", 0), phase, index)


def parse_faults(specs: Iterable[str], num_ranks: int | None) -> tuple[Fault, ...]:
    """Reads all specifications of a run and checks them against each other.

    Args:
        specs: values of ``--recover-inject``, in order.
        num_ranks: ranks at start, or None where that is not known yet.

    Raises:
        UserError: a specification is wrong, names a rank that does not exist, or is the second for its
            rank (a rank ends with its first fault, so the second would never happen).
    """
    faults: dict[int, Fault] = {}
    for spec in specs:
        fault = parse_fault(spec)
        if num_ranks is not None and fault.rank >= num_ranks:
            raise UserError(
                f"--recover-inject {spec!r}: there is no rank {fault.rank}, "
                f"the job starts ranks 0 to {num_ranks - 1}."
            )
        if fault.rank in faults:
            raise UserError(
                f"--recover-inject {spec!r}: rank {fault.rank} already ends by "
                f"{faults[fault.rank].spec!r}; give each rank one fault."
            )
        faults[fault.rank] = fault
    return tuple(faults.values())


def faults_of_this_try(specs: Iterable[str], num_ranks: int | None) -> tuple[Fault, ...]:
    """As ``parse_faults``; nothing from the second start of a job on, which may have fewer ranks than faults name."""
    return parse_faults(specs, num_ranks) if os.environ.get(TRY_VARIABLE, "1") == "1" else ()


class FaultInjector:
    """Carries out the faults of one rank, each once.

    Args:
        faults: faults of the whole run; those of other ranks are ignored.
        rank: start rank of this process.
        blackbox: where the time of death is written before the rank ends, for the survivors to read.
    """

    def __init__(self, faults: Sequence[Fault], rank: int, blackbox: DeathRecorder | None = None) -> None:
        self._rank = rank
        self._blackbox = blackbox
        self._pending = {(f.phase, f.iteration, f.index): f for f in faults if f.rank == rank}
        self.state_changers: dict[str, Callable[[], None]] = {}
        """Kind (of ``STATE_KINDS``) -> how it is done to this rank's training state."""

    @property
    def pending(self) -> tuple[Fault, ...]:
        """Faults of this rank that have not happened; after the run, those whose place was never reached."""
        return tuple(self._pending.values())

    def armed(self, phase: str, iteration: int) -> bool:
        """Whether a fault of this rank is still to happen in this phase of this iteration."""
        return any(key[0] == phase and key[1] == iteration for key in self._pending)

    def at(self, phase: str, iteration: int, index: int = 0) -> None:
        """Called by the code that reaches this place; does not return when a kind is due that ends the rank.

        Args:
            phase: one of ``PHASES``.
            iteration: from 1; of no account in ``ONCE_PHASES``.
            index: microbatch (counted over those this rank runs in the iteration), bucket or step, from 0.

        Raises:
            InjectedFault: a fault of kind ``exception`` is due.
            MemoryError: a fault of kind ``oom`` is due.
        """
        if not self._pending:  # every rank without a fault, and all of them in a real run
            return
        fault = self._pending.pop((phase, 0 if phase in ONCE_PHASES else iteration, index), None)
        if fault is None:
            return
        message = f"fault injection: {fault}"
        # File descriptor 2 and not sys.stderr: only the leader's sys.stderr is shown.
        os.write(2, f"{message}\n".encode())
        if fault.kind == "pause":
            time.sleep(PAUSE_S)
            return
        if fault.kind in STATE_KINDS:
            if fault.kind not in self.state_changers:
                raise UserError(f"--recover-inject {fault.spec}: nothing here can be changed yet in phase {phase}.")
            self.state_changers[fault.kind]()
            return
        if fault.kind == "term":
            os.kill(os.getpid(), signal.SIGTERM)
            return
        if self._blackbox is not None:
            self._blackbox.mark(phase, iteration, index if PHASES[phase] else -1)
            self._blackbox.die()
        _end(fault.kind, message)


def _end(kind: str, message: str) -> NoReturn:
    """Ends this process, or keeps it from ever going on."""
    if kind == "exception":
        raise InjectedFault(message)
    if kind == "oom":
        _run_out_of_memory()
    if kind == "exit":
        os._exit(0)
    if kind == "crash":
        os._exit(1)
    if kind == "gil":
        while True:
            ctypes.PyDLL(None).sleep(3600)  # PyDLL keeps Python's lock during the call
    if kind == "hang":
        while True:
            time.sleep(3600)
    os.kill(os.getpid(), {"stop": signal.SIGSTOP, "segfault": signal.SIGSEGV}.get(kind, signal.SIGKILL))
    while True:  # woken up again: whoever finds that it was gone for too long ends it
        time.sleep(3600)


def _run_out_of_memory() -> NoReturn:
    """Asks for more than the process may have, as a batch system's limit would let it find out.

    Raises:
        MemoryError: always.
    """
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used, hard))
    hoard = []
    while True:
        hoard.append(bytearray(1 << 24))
