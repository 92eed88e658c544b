"""One table of exit codes: in errors.py, in `launch --help`, and in README.md."""

from __future__ import annotations

import re

import pytest
from harness import REPOSITORY

from megatron_recover import cli
from megatron_recover.errors import EXIT_TABLE, ExitCode, name_of


def test_readme_has_this_table() -> None:
    rows = [f"| {code} | {name} | {advice} |" for code, name, advice in EXIT_TABLE]
    text = (REPOSITORY / "README.md").read_text().replace("`", "")
    found = re.findall(r"^\| (?:\d+|128\+s|others) \|.*\|$", text, re.MULTILINE)
    assert found == rows


def test_help_has_this_table(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["launch", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for code, name, advice in EXIT_TABLE:
        assert f"{code} {name}: {advice}" in text


def test_codes_are_told_by_name() -> None:
    assert name_of(ExitCode.GAVE_UP) == name_of(73) == "gave up"
    assert [name_of(code) for code in (124, 143, 17)] == ["timed out", "stopped by a signal", "the script's own"]
    assert ExitCode(74) is ExitCode.SAVED_ON_SIGNAL and ExitCode(75) is ExitCode.NOT_FINITE
