"""Runs of Megatron take their time on a loaded machine; each has its own hard timeout (``training_runs.TIMEOUT``)."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.timeout(1200))
