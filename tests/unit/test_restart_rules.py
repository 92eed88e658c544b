"""What decides about another try of a job, without starting one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_recover import hosts, mpi_install, restart
from megatron_recover.hosts import Host
from megatron_recover.restart import Checkpoints, Place
from megatron_recover.supervise import Outcome
from megatron_recover.telemetry.blackbox import Snapshot

GPT = "pretrain_gpt.py"


@pytest.mark.parametrize(
    ("places", "why"),
    [
        ([Place(5)], None),
        ([Place(5), Place(6)], None),
        ([Place(5), Place(5)], "(ended in iteration 5, the one before in iteration 5)"),
        ([Place(5), Place(4)], "(ended in iteration 4, the one before in iteration 5)"),
        ([Place(0), Place(0)], "before the first iteration"),
        ([Place(5), Place(0, True)], None),
        ([Place(5), Place(0, True), Place(0, True)], "did not get through the start either"),
        ([Place(5), Place(0, True), Place(5)], "no further"),
        ([Place(0, True), Place(1)], None),
    ],
)
def test_guard(places: list[Place], why: str | None) -> None:
    found = restart.lacks_progress(places)
    assert found is None if why is None else found is not None and why in found


def test_a_checkpoint_is_progress_too() -> None:
    boxes = [Snapshot(0, 1, 3, "forward", 0, 1.0, 0.0), Snapshot(1, 2, 4, "reduce", 0, 1.0, 0.0)]
    outcome = Outcome(0, None, 2, None, False, boxes)
    assert restart.place_of(outcome, None) == Place(4)
    assert restart.place_of(outcome, 6) == Place(6)
    assert restart.place_of(Outcome(0, None, 2, None, False, failed_start="why"), None).is_start


def test_only_checkpoints_of_this_job_count(tmp_path: Path) -> None:
    words = ("--recover", "--save", str(tmp_path))
    tracker = tmp_path / restart.TRACKER
    assert Checkpoints.of(GPT, words).last is None
    tracker.write_text("70\n")
    old = Checkpoints.of(GPT, words)
    assert old.last is None, "it was there before this job"
    tracker.write_text("2\n")
    assert old.last == 2
    tracker.write_text("release")
    assert old.last is None
    assert Checkpoints.of("own.py", ("--save", str(tmp_path))).folder is None, "another program's --save is its own"
    assert Checkpoints.of(GPT, ("--save", "msc://bucket/x")).folder is None


def test_arguments_that_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    words = ("--recover", "--load", "old", "--finetune", "--ckpt-step", "40", "--no-load-optim", "--lr", "1e-3")
    words += ("--override-ckpt-iteration=7", "--save", str(tmp_path))
    new, source = restart.arguments_of_next_try(GPT, words, tmp_path, 6)
    assert new == ("--recover", "--load", "old", "--lr", "1e-3", "--save", str(tmp_path), "--load", str(tmp_path))
    assert source == f"from the checkpoint of iteration 6 in {tmp_path}"


@pytest.mark.parametrize(
    ("script", "words", "source"),
    [
        (GPT, ("--recover", "--save", "s"), "from the beginning (no checkpoint has been written)"),
        (GPT, ("--recover",), "from the beginning (--save is not set)"),
        (GPT, ("--recover", "--save", "s", "--load", "old", "--finetune"), "from --load old"),
        ("own.py", ("--save", "s"), "with the same arguments"),
    ],
)
def test_arguments_when_there_is_no_checkpoint(script: str, words: tuple[str, ...], source: str) -> None:
    assert restart.arguments_of_next_try(script, words, Path("s"), None) == (words, source)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--recover", "--save", "s"), None),
        (("--recover", "--save", "s", "--no-save-optim"), "with --no-save-optim its checkpoints have no optimizer"),
        (("--recover", "--yaml-cfg", "x"), "with --yaml-cfg where it saves"),
        (("--recover", "--save", "msc://a"), "--save msc://a holds cannot be seen"),
        (("--recover", "--save", "msc://a", "--load", "msc://a"), None),
    ],
)
def test_refusals(words: tuple[str, ...], why: str | None) -> None:
    found = restart.refusal(GPT, words)
    assert found is None if why is None else found is not None and why in found
    assert restart.refusal("own.py", tuple(word for word in words if word != "--recover")) is None


@pytest.mark.parametrize(
    ("ranks", "size", "least", "left", "places", "expected"),
    [
        (8, 2, 1, 3, 8, 6),
        (8, 2, 1, None, 8, 8),
        (8, 2, 1, 0, 8, 8),
        (8, 2, 1, None, 5, 4),
        (8, 2, 2, 3, 3, 0),
        (8, 4, 1, 2, 3, 0),
    ],
)
def test_ranks_of_the_next_try(ranks: int, size: int, least: int, left: int | None, places: int, expected: int) -> None:
    assert restart.ranks_of_next_try(ranks, size, least, left, places) == expected


def test_hosts_are_read_by_mpirun_itself(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# two\na.example slots=3\nb.example slots=1\n")
    mpirun = mpi_install.find_mpirun()
    environment = {"HOME": "/", **os.environ}
    expected = [Host("a.example", 3), Host("b.example", 1)]
    for options in (["--hostfile", str(file)], ["--host", "a.example:3,b.example"]):
        assert hosts.allocated(mpirun, options, environment) == expected
    assert len(hosts.allocated(mpirun, [], environment)) == 1


def test_a_host_that_is_not_there_does_not_answer() -> None:
    agent = ("--mca", "plm_rsh_agent", "false")
    own = hosts.allocated(mpi_install.find_mpirun(), [], os.environ)
    there = hosts.answering(mpi_install.find_mpirun(), [*own, Host("nowhere.invalid", 2)], agent, os.environ)
    assert there == own


def test_options_for_the_hosts_that_are_left() -> None:
    options = ["--mca", "a", "b", "--host", "x:2,y:2", "--hostfile", "f", "--map-by", "node"]
    assert hosts.options_for([Host("y", 2)], options) == ("--host", "y:2", "--mca", "a", "b", "--map-by", "node")


@pytest.mark.parametrize(("ranks", "expected"), [(4, 4), (6, 4), (8, 4), (16, 8)])
def test_ranks_for_the_hosts_that_are_left(ranks: int, expected: int) -> None:
    whole = [Host("x", 4), Host("y", 4)]
    assert hosts.ranks_for(ranks, whole, whole[:1]) == expected
