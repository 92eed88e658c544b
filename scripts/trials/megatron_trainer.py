"""Cases on the real Megatron."""

from __future__ import annotations

from pathlib import Path

from trials.case import Case, Result


def run_case(case: Case, number: int, folder: Path) -> Result:
    raise NotImplementedError
