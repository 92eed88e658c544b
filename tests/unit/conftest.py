"""Megatron's parser as a script sees it, made once in a process of its own (importing Megatron takes
seconds)."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import hypothesis
import pytest

hypothesis.settings.register_profile("no clock", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("no clock")

PROGRAM = """
import json, sys
from megatron_recover.megatron import startup
startup.start(sys.argv[1:])
from megatron.training import arguments
if "--help" in sys.argv:
    arguments.parse_args()
def of_the_script(parser):
    parser.add_argument("--of-the-script", type=int)
    return parser
args = arguments.validate_args(arguments.parse_args(of_the_script))
print("ARGUMENTS", json.dumps(vars(args), default=str))
"""
WORDS = (
    "--recover --recover-device cpu --of-the-script 7 --tokenizer-type NullTokenizer --mock-data "
    "--vocab-size 512 --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 8 --train-iters 2 --lr 1e-3"
)


@pytest.fixture(scope="session")
def megatron_arguments() -> dict[str, Any]:
    """Attributes and values of a plain command line, parsed and validated by Megatron on the CPU."""
    out = _run(*WORDS.split())
    found: dict[str, Any] = json.loads(out.rsplit("ARGUMENTS ", 1)[1].splitlines()[0])
    return found


@pytest.fixture(scope="session")
def megatron_help() -> str:
    """What --help prints."""
    return _run("--recover-device", "cpu", "--help")


def _run(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
