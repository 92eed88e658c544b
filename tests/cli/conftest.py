"""Makes tests/harness.py and launching.py importable for the command-line tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from launching import Running, end_all  # noqa: E402


@pytest.fixture
def running() -> Iterator[list[Running]]:
    """Append each ``Running`` to it."""
    jobs: list[Running] = []
    yield jobs
    end_all(jobs)
