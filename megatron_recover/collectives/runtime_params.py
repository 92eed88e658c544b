"""The MPI parameters that fault tolerance needs: one list for the launcher, the ranks and the self-test.

They travel as ``OMPI_MCA_<name>=<value>`` in the environment, so that a user's own ``--mca name value``
on mpirun's command line wins over them. That ULFM is on at all is ``mpirun --with-ft ulfm``.
"""

from __future__ import annotations

from collections.abc import Iterator

MPI_PARAMETERS: dict[str, str] = {
    # The only point-to-point layer with ULFM: ucx and the mtls do not report a dead peer.
    "pml": "ob1",
    # Neither is fault tolerant: agreement deadlocks across hosts with han (open-mpi/ompi#13915), and the
    # cuda component passes through buffers whose error paths lead nowhere.
    "coll": "^han,cuda",
    # News of a death also travels from rank to rank. Off by default; without it the news goes only by the
    # runtime's daemons, and a rank that waits for a peer on a lost host waits for ever.
    "mpi_ft_propagator_with_rbcast": "1",
}
"""Name -> value of each Open MPI parameter, without the ``OMPI_MCA_`` prefix."""


def as_environment() -> dict[str, str]:
    """``MPI_PARAMETERS`` as environment variables."""
    return {f"OMPI_MCA_{name}": value for name, value in MPI_PARAMETERS.items()}


def as_mpirun_options() -> Iterator[str]:
    """``MPI_PARAMETERS`` as words of an mpirun command line, to show a user who writes their own."""
    for name, value in MPI_PARAMETERS.items():
        yield from ("--mca", name, value)
