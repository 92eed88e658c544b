"""Failure injection: a rank ends itself, really, at a chosen point of a chosen iteration.

A specification is one word, so that it fits on a command line and into a batch script::

    kill:rank=3,iteration=5,phase=reduce,bucket=1

It is carried out by the rank it names, at the place in the code that says ``injector.at(...)``. Nothing is
simulated: ``kill`` is SIGKILL, so what follows is what follows a lost GPU or an out-of-memory kill.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_recover.errors import UserError

KINDS: Mapping[str, str] = {
    "kill": "kills itself",
    "exit": "leaves with os._exit(0)",
    "exception": "raises an exception",
}
"""Kind of fault -> what the rank does, as the log line says it."""

PHASES: Mapping[str, str | None] = {
    "data": "microbatch",
    "forward": "microbatch",
    "backward": "microbatch",
    "reduce": "bucket",
    "commit": None,
    "after-commit": None,
    "optimizer": None,
    "eval": "microbatch",
    "save": None,
}
"""Phase of an iteration -> what its index counts (None: the phase happens once)."""

GRAMMAR = f"""KIND:rank=R,iteration=I,phase=P[,microbatch=K][,bucket=K]
  KIND        {", ".join(KINDS)}
  rank        start rank, from 0
  iteration   iteration, from 1, as the training log prints it
  phase       {", ".join(PHASES)}
  microbatch  only with {", ".join(p for p, i in PHASES.items() if i == "microbatch")}: the K-th one, from 0,
              that this rank runs in the iteration (default 0)
  bucket      only with {", ".join(p for p, i in PHASES.items() if i == "bucket")}: number of the gradient
              bucket, from 0 (default 0)
  for example kill:rank=3,iteration=5,phase=reduce,bucket=1"""


class InjectedFault(RuntimeError):
    """What a fault of kind ``exception`` raises: stands for any error inside the training script."""


class DeathRecorder(Protocol):
    """What the injector needs of a black box (telemetry.blackbox.BlackBox)."""

    def mark(self, phase: str, iteration: int, index: int = -1) -> None: ...

    def die(self) -> None: ...


@dataclass(frozen=True)
class Fault:
    """One rank's end. ``index`` is the microbatch or the bucket, 0 in phases that happen once."""

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
        return f"{self.kind}:rank={self.rank},iteration={self.iteration},phase={self.phase}{place}"

    def __str__(self) -> str:
        unit = PHASES[self.phase]
        place = f", {unit} {self.index}" if unit else ""
        return f"rank {self.rank} {KINDS[self.kind]} in iteration {self.iteration}, phase {self.phase}{place}"


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
        if key not in ("rank", "iteration", "phase", "microbatch", "bucket"):
            raise refuse(f"unknown part {part.strip()!r}")
        if not equals or not value:
            raise refuse(f"{key!r} has no value, write {key}=...")
        if key in parts:
            raise refuse(f"{key!r} is given twice")
        parts[key] = value
    for key in ("rank", "iteration", "phase"):
        if key not in parts:
            raise refuse(f"{key!r} is missing")

    phase = parts.pop("phase")
    if phase not in PHASES:
        raise refuse(f"unknown phase {phase!r}, it must be one of {', '.join(PHASES)}")
    numbers: dict[str, int] = {}
    for key, value in parts.items():
        least = 1 if key == "iteration" else 0
        if not (value.isascii() and value.isdigit()) or int(value) < least:
            raise refuse(f"{key}={value!r} is not a whole number from {least}")
        numbers[key] = int(value)
    for unit in ("microbatch", "bucket"):
        if unit in numbers and PHASES[phase] != unit:
            raise refuse(f"{unit!r} has no meaning in phase {phase!r}")
    index = numbers.get(PHASES[phase] or "", 0)
    return Fault(kind, numbers["rank"], numbers["iteration"], phase, index)


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

    @property
    def pending(self) -> tuple[Fault, ...]:
        """Faults of this rank that have not happened; after the run, those whose place was never reached."""
        return tuple(self._pending.values())

    def armed(self, phase: str, iteration: int) -> bool:
        """Whether a fault of this rank is still to happen in this phase of this iteration."""
        return any(key[0] == phase and key[1] == iteration for key in self._pending)

    def at(self, phase: str, iteration: int, index: int = 0) -> None:
        """Called by the code that reaches this place; does not return when a kill or an exit is due.

        Args:
            phase: one of ``PHASES``.
            iteration: from 1.
            index: microbatch (counted over those this rank runs in the iteration) or bucket, from 0.

        Raises:
            InjectedFault: a fault of kind ``exception`` is due.
        """
        if not self._pending:  # every rank without a fault, and all of them in a real run
            return
        fault = self._pending.pop((phase, iteration, index), None)
        if fault is None:
            return
        message = f"fault injection: {fault}"
        # File descriptor 2 and not sys.stderr: only the leader's sys.stderr is shown.
        os.write(2, f"{message}\n".encode())
        if self._blackbox is not None:
            self._blackbox.mark(phase, iteration, index if PHASES[phase] else -1)
            self._blackbox.die()
        if fault.kind == "exception":
            raise InjectedFault(message)
        if fault.kind == "exit":
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
