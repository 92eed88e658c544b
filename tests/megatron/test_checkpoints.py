"""Checkpoints survive their leader and a full disk: cut off at each moment, refused by the disk at each place."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from torch.distributed.checkpoint import FileSystemReader
from training_runs import Curve, assert_same_curve, assert_survived, recover, vanilla

from megatron_recover.errors import ExitCode
from megatron_recover.faults import SAVE_STEPS
from megatron_recover.megatron import tracker

TP2 = "--tensor-model-parallel-size 2"
ASYNC = "--async-save --use-persistent-ckpt-worker --async-strategy mcore"
NO_SPACE = "No space left on device"
CHECKPOINT_MB = 5
"""Room that one checkpoint takes, rounded up: 4.2 MB."""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, on which there is room for two checkpoints and not for three."""
    folder = tmp_path / "small"
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={2 * CHECKPOINT_MB}m", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(["mount", *options], capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a small tmpfs; test_each_place_where_the_disk_can_refuse needs no mount")
    yield folder
    subprocess.run(["umount", str(folder)], check=True, capture_output=True)


def refuse(path: Path) -> None:
    """Whoever writes to ``path`` is told by the kernel that there is no space."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to("/dev/full")


def folder_of(save: Path, iteration: int) -> Path:
    return save / f"iter_{iteration:07d}"


def saved_iterations(curve: Curve) -> list[int]:
    """Iterations of the checkpoints that were completed, in order."""
    found = re.findall(r"successfully saved checkpoint from iteration\s+(\d+)", curve.done.out)
    return [int(number) for number in found]


def names_in(save: Path) -> list[str]:
    return sorted(path.name for path in save.iterdir())


def names_of(*iterations: int) -> list[str]:
    """What there is after these checkpoints were completed, and nothing else was left."""
    return [*(f"iter_{iteration:07d}" for iteration in iterations), tracker.NAME]


def complaints(curve: Curve) -> dict[int, str]:
    """Iteration -> the line that says that its checkpoint could not be saved."""
    lines = [line for line in curve.done.out.splitlines() if "could NOT be saved" in line]
    return {int(re.findall(r"checkpoint of iteration (\d+)", line)[0]): line for line in lines}


def assert_counts(save: Path, iteration: int) -> None:
    """This checkpoint is named, and all is on disk that its own table of contents lists."""
    assert tracker.read(str(save)) == iteration
    folder = folder_of(save, iteration)
    contents = FileSystemReader(folder).read_metadata().storage_data
    assert contents
    for place in contents.values():
        assert (folder / place.relative_path).stat().st_size >= place.offset + place.length


def assert_goes_on(save: Path, iteration: int, flags: str = "", num_ranks: int = 1) -> None:
    """A run that is resumed follows the failure-free curve."""
    assert_counts(save, iteration)
    load = f"--load {save} --override-opt_param-scheduler {flags}"
    resumed = recover(num_ranks, load, iterations=iteration + 2)
    assert sorted(resumed.losses) == [iteration + 1, iteration + 2]
    del resumed.losses[iteration + 2]  # Megatron logs the mean of the first two losses there
    assert_same_curve(resumed, vanilla(num_ranks, flags))


@pytest.mark.parametrize(
    "flags", ["", pytest.param(ASYNC, marks=pytest.mark.slow)], ids=["by-the-rank", "in-the-background"]
)
def test_a_full_disk_costs_checkpoints_and_nothing_else(flags: str, small_disk: Path) -> None:
    """Two checkpoints fit. The last two saves fail, so the job must not end as if it had saved."""
    save = f"--save {small_disk} --save-interval 2 {flags}"
    curve = recover(2, save, iterations=8, code=ExitCode.NOT_SAVED)
    assert sorted(curve.losses) == list(range(1, 9)), curve.done.explain()
    assert_same_curve(curve, vanilla(1))
    assert saved_iterations(curve) == [2, 4]
    sixth, last = complaints(curve)[6], complaints(curve)[8]
    assert NO_SPACE in sixth and "of 10 MiB free" in sixth
    assert "the last good checkpoint stays, that of iteration 4" in sixth
    assert "tried again after iteration 8 (--save-interval 2)" in sixth
    assert "The job ends here" in last
    assert "the state after iteration 8 is NOT saved" in curve.done.err
    assert f"that of iteration 4: make room and start again with --load {small_disk}" in curve.done.err
    assert curve.of("finish")[-1]["exit_code"] == ExitCode.NOT_SAVED
    assert not curve.of("failure")
    assert names_in(small_disk) == names_of(2, 4)
    assert_counts(small_disk, 4)


def test_each_place_where_the_disk_can_refuse_one_rank_of_a_replica(tmp_path: Path) -> None:
    """The other rank must not wait for it, and both must come to the same result; then there is room again."""
    refuse(tmp_path / f"{tracker.NAME}.new")
    refuse(folder_of(tmp_path, 2) / "__1_0.distcp")
    refuse(folder_of(tmp_path, 3) / "__0_0.distcp")
    refuse(folder_of(tmp_path, 4) / ".metadata.tmp")
    refuse(folder_of(tmp_path, 5) / "metadata.json")
    folder_of(tmp_path, 6).write_text("a file where the folder should be")
    curve = recover(4, f"{TP2} --save {tmp_path} --save-interval 1 --log-progress", iterations=8)
    assert sorted(curve.losses) == list(range(1, 9)), curve.done.explain()
    assert_same_curve(curve, vanilla(2, TP2))
    assert not curve.of("failure")
    said = complaints(curve)
    assert sorted(said) == [1, 2, 3, 4, 5, 6]
    assert all(NO_SPACE in said[iteration] for iteration in range(1, 6)), said
    assert "there is no earlier checkpoint" in said[1]
    assert "File exists" in said[6]
    assert saved_iterations(curve) == [7, 8]
    assert (tmp_path / "progress.txt").read_text().count("Saved checkpoint") == 2
    assert not any(folder_of(tmp_path, iteration).is_dir() for iteration in range(1, 7))
    assert_counts(tmp_path, 8)


@pytest.mark.slow
def test_each_place_where_the_disk_can_refuse_in_the_background(tmp_path: Path) -> None:
    refuse(tmp_path / f"{tracker.NAME}.new")
    refuse(folder_of(tmp_path, 2) / "__1_0.distcp")
    refuse(folder_of(tmp_path, 4) / ".metadata.tmp")
    refuse(folder_of(tmp_path, 6) / "metadata.json")
    curve = recover(4, f"{TP2} --save {tmp_path} --save-interval 2 {ASYNC}", iterations=9)
    assert_same_curve(curve, vanilla(2, TP2))
    # Which of the first saves met the tracker's draft that cannot be written is a matter of who was first.
    assert {2, 4, 6} <= set(complaints(curve)) | {2}
    assert all(NO_SPACE in line for line in complaints(curve).values())
    assert saved_iterations(curve)[-1] == 9
    assert_counts(tmp_path, 9)


@pytest.mark.slow
def test_the_old_format_on_a_disk_that_refuses_one_rank_of_a_replica(tmp_path: Path) -> None:
    refuse(folder_of(tmp_path, 2) / "mp_rank_01" / "model_optim_rng.pt")
    curve = recover(4, f"{TP2} --save {tmp_path} --save-interval 2 --ckpt-format torch", iterations=4)
    assert sorted(curve.losses) == [1, 2, 3, 4], curve.done.explain()
    assert_same_curve(curve, vanilla(2, TP2))
    assert sorted(complaints(curve)) == [2]
    assert saved_iterations(curve) == [4]
    assert not folder_of(tmp_path, 2).exists()


@pytest.mark.slow
def test_below_the_minimum_on_a_full_disk_the_job_does_not_say_that_it_saved(tmp_path: Path) -> None:
    """And the checkpoint before it, which is that of another iteration, stays."""
    refuse(folder_of(tmp_path, 3) / "__0_0.distcp")
    save = f"--save {tmp_path} --save-interval 2 --recover-min-replicas 2"
    kill = ["kill:rank=0,iteration=4,phase=backward,microbatch=0"]
    curve = recover(2, save, iterations=8, inject=kill, code=ExitCode.TOO_FEW_REPLICAS)
    assert "the state after iteration 3 is NOT saved: No space left on device" in curve.done.err
    assert "is saved in" not in curve.done.err
    assert "The job ends here" in complaints(curve)[3]
    assert_counts(tmp_path, 2)


@pytest.mark.slow
def test_a_job_that_leaves_early_does_not_pretend_to_have_saved(tmp_path: Path) -> None:
    """As with an exit signal or a time limit, Megatron itself would end it with exit code 0."""
    refuse(folder_of(tmp_path, 3) / "__0_0.distcp")
    save = f"--save {tmp_path} --save-interval 2 --exit-interval 3"
    curve = recover(2, save, iterations=8, code=ExitCode.NOT_SAVED)
    assert sorted(curve.losses) == [1, 2, 3]
    assert "the state after iteration 3 is NOT saved: No space left on device" in curve.done.err
    assert "The job ends here" in complaints(curve)[3]
    assert_counts(tmp_path, 2)


@pytest.mark.slow
def test_a_checkpoint_that_counts_is_not_written_over(tmp_path: Path) -> None:
    """Below the minimum right after a save: the state is saved already, and a full disk must not cost it."""
    save = f"--save {tmp_path} --save-interval 2 --recover-min-replicas 2"
    kill = ["kill:rank=0,iteration=3,phase=backward,microbatch=0"]
    curve = recover(2, save, iterations=8, inject=kill, code=ExitCode.TOO_FEW_REPLICAS)
    assert saved_iterations(curve) == [2]
    assert "the checkpoint of iteration 2 is complete already" in curve.done.out
    assert f"the state after iteration 2 is saved in {tmp_path}" in curve.done.err
    assert_counts(tmp_path, 2)


STEPS = {step: number for number, step in enumerate(SAVE_STEPS)}


@pytest.mark.parametrize(
    ("step", "rank"),
    [(step, rank) for step in STEPS for rank in (0, 1) if (step, rank) != ("named", 1)],  # the first rank names it
)
@pytest.mark.slow
def test_a_save_that_is_cut_off_is_saved_again_by_the_next_leader(step: str, rank: int, tmp_path: Path) -> None:
    """Each rank of the leader replica is killed at each step of its save, with the other one in the middle of it."""
    save = f"{TP2} --save {tmp_path} --save-interval 2"
    kill = [f"kill:rank={rank},iteration=4,phase=save,step={STEPS[step]}"]
    curve = recover(4, save, iterations=6, inject=kill)
    assert_survived(curve, vanilla(2, TP2), iterations=6, lost=[0])
    # One that counts already is not written again (its success is printed after it is named: not by the one killed).
    assert saved_iterations(curve) == ([2, 6] if step == "named" else [2, 4, 6])
    assert ("the checkpoint of iteration 4 is complete already" in curve.done.out) == (step == "named")
    assert names_in(tmp_path) == names_of(2, 4, 6)
    assert_counts(tmp_path, 6)
    (tmp_path / tracker.NAME).write_text("4")
    assert_counts(tmp_path, 4)


@pytest.mark.slow
def test_the_checkpoint_before_counts_until_the_next_one_is_whole(tmp_path: Path) -> None:
    """All replicas die in the middle of the same save, one after another: what is left is the save before."""
    kills = [f"kill:rank={rank},iteration=4,phase=save,step={STEPS['writing']}" for rank in range(3)]
    save = f"--save {tmp_path} --save-interval 2"
    once = ("--max-restarts", "0")
    curve = recover(3, save, iterations=6, inject=kills, code=ExitCode.NO_REPLICA_LEFT, options=once)
    assert sorted(curve.losses) == [1, 2, 3, 4]
    assert folder_of(tmp_path, 4).is_dir()
    assert_counts(tmp_path, 2)


@pytest.mark.slow
def test_another_replica_is_lost_while_the_leader_saves(tmp_path: Path) -> None:
    kill = ["kill:rank=2,iteration=4,phase=save"]
    curve = recover(3, f"--save {tmp_path} --save-interval 4", iterations=6, inject=kill)
    assert_survived(curve, vanilla(1), iterations=6, lost=[2])
    assert saved_iterations(curve) == [4, 6]


def test_a_save_in_the_background_that_is_lost_with_its_leader_is_made_up_for(tmp_path: Path) -> None:
    """The leader dies when its shards are written and not named: the next one saves the state it has by then."""
    kill = [f"kill:rank=0,iteration=6,phase=save,step={STEPS['written']}"]
    curve = recover(2, f"--save {tmp_path} --save-interval 6 --exit-interval 11 {ASYNC}", iterations=12, inject=kill)
    assert sorted(curve.losses) == list(range(1, 12)), curve.done.explain()
    assert_same_curve(curve, vanilla(1))
    saved = saved_iterations(curve)
    # It dies at the beginning of iteration 7 (or of a later one, if the shards took that long): saved after that.
    # No other save is due before the end.
    assert saved[0] in (7, 8, 9, 10), curve.done.explain()
    assert saved[1:] == [11]
    assert_counts(tmp_path, 11)
    (tmp_path / tracker.NAME).write_text(str(saved[0]))
    assert_goes_on(tmp_path, saved[0])


@pytest.mark.parametrize("step", ["begin", "writing", "named"])
@pytest.mark.slow
def test_the_leader_dies_at_other_steps_of_a_save_in_the_background(step: str, tmp_path: Path) -> None:
    kill = [f"kill:rank=0,iteration=4,phase=save,step={STEPS[step]}"]
    curve = recover(4, f"{TP2} --save {tmp_path} --save-interval 4 {ASYNC}", iterations=7, inject=kill)
    assert_survived(curve, vanilla(2, TP2), iterations=7, lost=[0])
    saved = saved_iterations(curve)
    assert saved[-1] == 7
    assert set(saved) & {4, 5, 6}, curve.done.explain()
    assert_counts(tmp_path, 7)


@pytest.mark.slow
def test_the_leader_dies_in_the_last_save_in_the_background(tmp_path: Path) -> None:
    """Training is over, only the writing is not: the next leader finds the end unsaved, and saves it."""
    kill = [f"kill:rank=0,iteration=4,phase=save,step={STEPS['written']}"]
    curve = recover(2, f"--save {tmp_path} --save-interval 4 {ASYNC}", iterations=4, inject=kill)
    assert sorted(curve.losses) == [1, 2, 3, 4], curve.done.explain()
    assert saved_iterations(curve) == [4]
    assert_counts(tmp_path, 4)


@pytest.mark.slow
def test_what_is_saved_in_the_background_is_the_state_of_its_iteration(tmp_path: Path) -> None:
    """Writing pauses between two files of a rank, while training goes on in the tensors that are being saved."""
    flags = f"--save {tmp_path} --save-interval 4 {ASYNC} --ckpt-assume-constant-structure --dist-ckpt-workers 2"
    pause = [f"pause:rank=0,iteration=4,phase=save,step={STEPS['writing']}"]
    curve = recover(2, flags, iterations=12, inject=pause)
    out = curve.done.out
    assert out.index("iteration        6/") < out.index("successfully saved checkpoint from iteration       4")
    (tmp_path / tracker.NAME).write_text("4")
    assert_goes_on(tmp_path, 4)


@pytest.mark.slow
def test_nothing_of_a_save_in_the_background_outlives_the_job(tmp_path: Path) -> None:
    """The harness fails a job of which processes are left; here, that none but the ranks was ever needed."""
    script = Path(__file__).with_name("children_program.py")
    curve = recover(2, f"--save {tmp_path} --save-interval 2 {ASYNC}", iterations=4, script=str(script))
    assert [result["children"] for result in curve.done.results] == [[], []]
    assert not [process for process in psutil.process_iter() if str(tmp_path) in " ".join(_command(process))]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
