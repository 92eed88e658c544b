"""Who is in a communicator, in start ranks. Local: group translation, no communication."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI


def translate(group: MPI.Group, start: MPI.Intracomm) -> tuple[int, ...]:
    """Start ranks of the members of ``group``, sorted. Frees ``group``."""
    start_group = start.Get_group()
    try:
        return tuple(sorted(group.Translate_ranks(list(range(group.Get_size())), start_group)))
    finally:
        start_group.Free()
        group.Free()


def members(comm: MPI.Intracomm, start: MPI.Intracomm) -> tuple[int, ...]:
    """Start ranks of the members of ``comm``, dead or alive, sorted."""
    return translate(comm.Get_group(), start)


def failed(comm: MPI.Intracomm, start: MPI.Intracomm) -> tuple[int, ...]:
    """Start ranks of the members of ``comm`` known here to be dead, sorted."""
    return translate(comm.Get_failed(), start)
