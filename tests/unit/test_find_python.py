"""``scripts/find_python.sh``: only a Python 3.12 that works counts, wherever it lies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REAL = Path(sys.executable).resolve()
"""This interpreter's own binary: works from any place, unlike the link in .venv."""

pytestmark = pytest.mark.skipif(sys.version_info[:2] != (3, 12), reason="needs to run on Python 3.12 itself")


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def working(path: Path) -> Path:
    return script(path, f'exec {REAL} "$@"')


def find(home: Path, *path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the finder with nothing of this machine's Pythons in sight but what the test put there."""
    tools = home / "tools"
    tools.mkdir(exist_ok=True)
    for tool in ("bash", "sort", "cat"):
        if not (tools / tool).exists():
            found = next(p for d in os.environ["PATH"].split(":") if (p := Path(d) / tool).is_file())
            (tools / tool).symlink_to(found)
    search = ":".join(map(str, [*path, tools]))
    return subprocess.run(
        [str(tools / "bash"), str(ROOT / "scripts" / "find_python.sh")],
        env={"PATH": search, "HOME": str(home), **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_shim_that_only_complains_is_passed_over_for_a_later_python(tmp_path: Path) -> None:
    shims, good = tmp_path / "shims", tmp_path / "good"
    script(shims / "python3.12", 'echo "pyenv: python3.12: command not found" >&2; exit 127')
    working(good / "python3.12")
    result = find(tmp_path, shims, good)
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()).resolve() == REAL
    assert result.stdout.count("\n") == 1


@pytest.mark.parametrize(
    "body",
    [
        "exit 1",
        "exit 0",  # ends well but is no Python
        "echo 3.11",  # another version
    ],
)
def test_a_broken_python_on_path_gives_way_to_pyenv(tmp_path: Path, body: str) -> None:
    script(tmp_path / "shims" / "python3.12", body)
    working(tmp_path / ".pyenv" / "versions" / "3.12.9" / "bin" / "python3.12")
    result = find(tmp_path, tmp_path / "shims")
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()).resolve() == REAL


def test_the_newest_of_several_in_pyenv(tmp_path: Path) -> None:
    versions = tmp_path / "elsewhere" / "versions"
    for version in ("3.12.2", "3.12.10"):
        script(
            versions / version / "bin" / "python3.12",
            f'case "$*" in *executable*) echo {version} ;; *) exec {REAL} "$@" ;; esac',
        )
    result = find(tmp_path, PYENV_ROOT=str(tmp_path / "elsewhere"))
    assert result.stdout.strip() == "3.12.10"


def test_uv_is_asked_last(tmp_path: Path) -> None:
    hidden = working(tmp_path / "uv-pythons" / "bin" / "python3.12")
    script(tmp_path / "bin" / "uv", f'[ "$*" = "python find 3.12" ] && echo {hidden}')
    result = find(tmp_path, tmp_path / "bin")
    assert Path(result.stdout.strip()).resolve() == REAL


def test_an_override_that_does_not_work_is_an_error(tmp_path: Path) -> None:
    working(tmp_path / "good" / "python3.12")
    result = find(tmp_path, tmp_path / "good", PYTHON=str(tmp_path / "nothing"))
    assert result.returncode == 1
    assert "PYTHON=" in result.stderr
    assert find(tmp_path, PYTHON=str(REAL)).returncode == 0


def test_nothing_found_says_what_to_do(tmp_path: Path) -> None:
    if any(Path(p).exists() for p in ("/usr/bin/python3.12", "/usr/local/bin/python3.12")):
        pytest.skip("this machine has a Python 3.12 in a usual place")
    result = find(tmp_path)
    assert result.returncode == 1
    assert result.stdout == ""
    assert "uv python install 3.12" in result.stderr
