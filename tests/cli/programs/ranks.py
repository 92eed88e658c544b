"""Ranks that do one thing the launcher has to cope with: ``ranks.py WHAT [ARGUMENT]``."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import mpi4py
import psutil

mpi4py.rc.finalize = False
from mpi4py import MPI  # noqa: E402

RANK = MPI.COMM_WORLD.Get_rank()
JOB_DIR = Path(os.environ["MEGATRON_RECOVER_JOB_DIR"])


def finish(code: int = 0, reason: str = "done") -> None:
    """What the last leader does at the end; the other ranks just leave."""
    sys.stdout.flush()
    if RANK == 0:
        (JOB_DIR / "status.json").write_text(json.dumps({"exit_code": code, "reason": reason}))
    os._exit(0)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # its new parent may take its time
    except psutil.NoSuchProcess:
        return False


def talk(code: str) -> None:
    print(f"out of rank {RANK}")
    print(f"err of rank {RANK}", file=sys.stderr)
    if RANK == 0:
        variables = ("MEGATRON_RECOVER_JOB", "OMPI_MCA_pml", "OMPI_MCA_mpi_ft_enable")
        print("ENV", json.dumps({name: os.environ.get(name) for name in variables} | {"dir": str(JOB_DIR)}))
        time.sleep(0.3)
        print("no newline at the end", end="")
    finish(int(code), "as the leader said")


def orphan(how: str) -> None:
    """Rank 1 dies and leaves a child that holds its stdout; rank 0 sees whether the child is ended."""
    note = JOB_DIR / "child"
    if RANK == 1:
        program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        child = subprocess.Popen(
            [sys.executable, "-c", program if how == "stubborn" else "import time; time.sleep(600)"]
        )
        time.sleep(0.5)
        note.write_text(str(child.pid))
        os.kill(os.getpid(), signal.SIGKILL)
    while RANK == 0 and not (note.exists() and note.read_text()):
        time.sleep(0.02)
    if RANK == 0 and how != "leave":
        begin, pid = time.monotonic(), int(note.read_text())
        while is_running(pid) and time.monotonic() - begin < 10:
            time.sleep(0.02)
        print(f"child gone after {time.monotonic() - begin:.2f} s")
    finish()


def daemon(_: str) -> None:
    """Rank 0 leaves a process of its own session behind, which no longer is anybody's child."""
    if RANK == 0:
        shell = "setsid sleep 600 >/dev/null 2>&1 </dev/null & echo daemon $!"
        print(subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True).stdout)
    finish()


def die(how: str) -> None:
    MPI.COMM_WORLD.Barrier()
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raise":
        raise ValueError("the script's own error")
    os._exit(int(how))


def wait(how: str) -> None:
    if how == "save":
        signal.signal(signal.SIGTERM, lambda *_: finish(0, "saved"))
    if how == "ignore":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    MPI.COMM_WORLD.Barrier()
    print(f"ready {os.getpid()}", flush=True)
    while True:
        time.sleep(0.05)


globals()[sys.argv[1]](sys.argv[2] if len(sys.argv) > 2 else "")
