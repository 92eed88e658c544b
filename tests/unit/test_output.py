"""What is left out of the ranks' output, and that nothing else is."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_recover.output import NoiseFilter, Pump

RULE = b"-" * 74 + b"\n"
SORRY = (
    RULE + b"Sorry!  You were supposed to get help about:\n    missing\nfrom the file:\n    help-mpi-ft.txt\n"
    b"But I couldn't find that topic in the file.  Sorry!\n" + RULE
)
OTHER = RULE + b"There are not enough slots available in the system\n\nplease\n" + RULE
REDEFINE = b"[node1:123] OPAL ERROR: Attempt to redefine an existing data type in file errhandler.c\n"


def through(data: bytes, sizes: list[int]) -> bytes:
    """``data`` through the filter, read in pieces of these sizes."""
    noise, out, sizes = NoiseFilter(), b"", [*sizes, len(data) + 1]
    while data:
        size = sizes.pop(0)
        out += noise.feed(data[:size])
        data = data[size:]
    return out + noise.flush()


@given(
    st.lists(st.sampled_from([SORRY, OTHER, b"a line\n", b"\n", b"---\n", b"\r 10% done\n"]), max_size=8),
    st.lists(st.integers(1, 60), max_size=40),
)
def test_only_noise_is_left_out(pieces: list[bytes], sizes: list[int]) -> None:
    wanted = b"".join(piece for piece in pieces if piece != SORRY)
    assert through(b"".join(pieces) + b"end", sizes) == wanted + b"end"


def test_the_line_about_a_data_type_is_left_out() -> None:
    assert through(b"before\n" + REDEFINE + b"after\n", []) == b"before\nafter\n"


def test_an_apology_that_does_not_end_is_shown() -> None:
    endless = SORRY.removesuffix(RULE) + b"line\n" * 40
    assert through(endless, [100, 200]) == endless


def test_unfinished_lines_are_shown_at_once() -> None:
    noise = NoiseFilter()
    assert noise.feed(b"10%") == b"10%"
    assert noise.feed(b"\r20%") == b"\r20%"
    assert noise.feed(b"\n" + b"-" * 74) == b"\n"
    assert noise.is_holding
    assert noise.feed(b"\nSorry") == b""
    assert noise.feed(b" for the delay\n") == RULE + b"Sorry for the delay\n"
    assert not noise.is_holding


def test_what_is_held_comes_when_nothing_follows() -> None:
    noise = NoiseFilter()
    assert noise.feed(RULE) == b""
    assert noise.flush() == RULE
    assert noise.flush() == b""
    assert noise.feed(b"--") == b""
    assert noise.flush() == b"--"
    assert noise.feed(b"--\n") == b"--\n"


def test_mpiruns_zero_bytes() -> None:
    assert through(OTHER + b"\0next\n", []) == OTHER + b"next\n"


@pytest.mark.timeout(20)
def test_pump_empties_the_pipe_when_nobody_reads() -> None:
    source, feed = os.pipe()
    reader, target = os.pipe()
    os.close(reader)
    with os.fdopen(source, "rb") as pipe:
        pump = Pump(pipe, target, None, NoiseFilter())
        pump.start()
        for _ in range(100):
            os.write(feed, b"x" * 4096)
        os.close(feed)
        pump.join(10)
        assert not pump.is_alive()
    os.close(target)


def test_reports_of_ranks_on_other_hosts_are_taken_out() -> None:
    noise = NoiseFilter()
    assert noise.feed(b'a\nmegatron-recover-sta') == b"a\n"
    assert noise.feed(b'tus: {"started": true}\nb\n') == b"b\n"
    assert noise.has_heard and noise.status is None
    assert noise.feed(b'megatron-recover-status: {"exit_code": 73, "reason": "r", "replicas_left": 2}\n') == b""
    assert noise.status is not None
    assert noise.status[1] == {"exit_code": 73, "reason": "r", "replicas_left": 2}
    noise.feed(b'megatron-recover-status: {"withdrawn": true}\n')
    assert noise.status[1] is None
