"""What counts as the disk's fault, and the file that names the checkpoint: whole at any moment."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_recover.megatron import tracker
from megatron_recover.megatron.disk import DiskFailure, disk_problem, free_space

REPOSITORY = Path(__file__).resolve().parents[2]


def caused_by(error: BaseException) -> RuntimeError:
    try:
        raise RuntimeError("worker failure") from error
    except RuntimeError as outer:
        return outer


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG, errno.ESTALE])
def test_what_the_system_says_of_a_file_is_the_disks_fault(number: int) -> None:
    error = OSError(number, os.strerror(number), "file")
    assert disk_problem(error) == disk_problem(caused_by(error)) == os.strerror(number)


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
        TimeoutError("the store did not answer"),
        RuntimeError("gloo: connection closed by peer"),
        ValueError("cannot pickle"),
    ],
)
def test_other_errors_are_not(error: Exception) -> None:
    assert disk_problem(error) is None
    assert disk_problem(caused_by(error)) is None


def save_to_stream() -> None:
    with open("/dev/full", "wb") as stream:
        torch.save(torch.zeros(1 << 16), stream)


def save_to_path() -> None:
    torch.save(torch.zeros(1 << 16), "/dev/full")


@pytest.mark.parametrize(
    ("save", "words"), [(save_to_stream, "No space left on device"), (save_to_path, "could not be written")]
)
def test_torchs_own_writer_on_a_full_device(save: Callable[[], None], words: str) -> None:
    """It hides the error of a stream behind one of its own, and that of a path in its text."""
    with pytest.raises((OSError, RuntimeError)) as raised:
        save()
    assert words in (disk_problem(raised.value) or "")


def test_errors_that_ranks_sent_each_other_count() -> None:
    from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert disk_problem(CheckpointException("write", {1: _wrap_exception(full)})) == "No space left on device"
    assert disk_problem(CheckpointException("write", {1: _wrap_exception(DiskFailure("quota"))})) == "quota"
    assert disk_problem(CheckpointException("write", {})) is None


def test_free_space(tmp_path: Path) -> None:
    assert " of " in free_space(str(tmp_path))
    assert free_space(str(tmp_path / "nothing")) == ""


def test_the_tracker_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / tracker.NAME
    path.write_text("4")
    with tracker.replacing(str(path)) as file:
        file.write("6")
        file.flush()
        assert tracker.read(str(tmp_path)) == 4
    assert tracker.read(str(tmp_path)) == 6
    assert [one.name for one in tmp_path.iterdir()] == [tracker.NAME]


def test_a_kill_in_the_middle_leaves_the_old_tracker(tmp_path: Path) -> None:
    path = tmp_path / tracker.NAME
    path.write_text("4")
    program = (
        "import os, signal; from megatron_recover.megatron import tracker\n"
        f"with tracker.replacing({str(path)!r}) as file:\n"
        "    file.write('6'); file.flush(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert tracker.read(str(tmp_path)) == 4


def test_a_tracker_that_cannot_be_written_stays(tmp_path: Path) -> None:
    path = tmp_path / tracker.NAME
    path.write_text("4")
    Path(f"{path}.new").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space"), tracker.replacing(str(path)) as file:
        file.write("6")
    assert tracker.read(str(tmp_path)) == 4
    assert [one.name for one in tmp_path.iterdir()] == [tracker.NAME]


@pytest.mark.parametrize("text", ["", "release", "4x"])
def test_a_tracker_that_names_no_iteration(text: str, tmp_path: Path) -> None:
    assert tracker.read(str(tmp_path)) is None
    (tmp_path / tracker.NAME).write_text(text)
    assert tracker.read(str(tmp_path)) is None
