"""Runs of the real Megatron for tests: vanilla under torchrun, and with --recover under our launcher."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import REPOSITORY, Finished, run

SCRIPT = str(REPOSITORY / "scripts" / "pretrain_gpt.py")
MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--position-embedding-type rope --init-method-std 0.08 --micro-batch-size 2 --global-batch-size 16 "
    "--lr 2e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-decay-iters 20 --attention-dropout 0 --hidden-dropout 0 "
    "--eval-iters 0 --eval-interval 1000 --num-workers 0 --log-interval 1 --recover-device cpu "
    "--ddp-bucket-size 10000"
)

LAYOUTS = {
    "dp4": (4, 1, ""),
    "tp2dp3": (6, 2, "--tensor-model-parallel-size 2"),
    "pp2dp3": (6, 2, "--pipeline-model-parallel-size 2"),
    "tp2pp2dp2": (8, 4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
}
"""Name -> (ranks, ranks of a replica, flags)."""

TIMEOUT = 240


@dataclass
class Curve:
    """What Megatron logged of a run."""

    done: Finished
    losses: dict[int, float] = field(default_factory=dict)
    grad_norms: dict[int, float] = field(default_factory=dict)
    validation: list[float] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)

    def of(self, event: str) -> list[dict[str, Any]]:
        """Events of a kind."""
        return [one for one in self.events if one["event"] == event]


def read_curve(done: Finished) -> Curve:
    """Losses and gradient norms by iteration."""
    curve = Curve(done)
    for number, loss, norm in re.findall(r"iteration\s+(\d+)/.*?lm loss: (\S+) .*?grad norm: (\S+)", done.out):
        curve.losses[int(number)] = float(loss)
        curve.grad_norms[int(number)] = float(norm)
    curve.validation = [float(value) for value in re.findall(r"validation loss at .*?lm loss value: (\S+)", done.out)]
    return curve


@functools.cache
def data_flags() -> tuple[str, ...]:
    """Flags for the demo's data set: real English text, tokenised. Made when it is not there."""
    folder = REPOSITORY / "data" / "demo"
    subprocess.run(
        [sys.executable, str(REPOSITORY / "scripts/demo/prepare.py"), "--dir", str(folder)],
        check=True,
        timeout=120,
        capture_output=True,
    )
    # The text is tokenised already, so training needs no tokenizer but the size of its vocabulary.
    data = ["--data-path", str(folder / "corpus"), "--split", "90,10,0"]
    return (*data, "--tokenizer-type", "NullTokenizer", "--vocab-size", "2048")


def vanilla(num_ranks: int, flags: str = "", *, iterations: int = 12) -> Curve:
    """Vanilla Megatron under torchrun; the same arguments give the same finished run."""
    return _vanilla(num_ranks, flags, iterations)


@functools.cache
def _vanilla(num_ranks: int, flags: str, iterations: int) -> Curve:
    words = [*MODEL.split(), *data_flags(), "--train-iters", str(iterations), *flags.split()]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    done = run([*torchrun, SCRIPT, *words], timeout=TIMEOUT)
    assert done.code == 0, done.explain()
    return read_curve(done)


def recover(
    num_ranks: int,
    flags: str = "",
    *,
    iterations: int = 12,
    inject: tuple[str, ...] | list[str] = (),
    script: str = SCRIPT,
    code: int = 0,
    env: dict[str, str] | None = None,
    options: tuple[str, ...] = (),
) -> Curve:
    """A run with --recover under the launcher (with these ``options``).

    Replicas are compared bit by bit in every iteration.
    """
    with tempfile.TemporaryDirectory(prefix="recover-events-") as folder:
        events = Path(folder) / "events.jsonl"
        words = [*MODEL.split(), *data_flags(), "--train-iters", str(iterations), "--recover"]
        words += ["--recover-events", str(events), "--recover-check-replicas-interval", "1", *flags.split()]
        for spec in inject:
            words += ["--recover-inject", spec]
        launcher = [sys.executable, "-m", "megatron_recover.cli", "launch", "-n", str(num_ranks), *options]
        done = run([*launcher, "--", script, *words], timeout=TIMEOUT, env=env)
        assert done.code == code, done.explain()
        curve = read_curve(done)
        if events.exists():
            curve.events = [json.loads(line) for line in events.read_text().splitlines()]
        return curve


def assert_same_curve(ours: Curve, theirs: Curve, relative: float = 1e-5) -> None:
    """Every iteration that ``ours`` logged has the loss that ``theirs`` has."""
    assert ours.losses, ours.done.explain()
    for number, loss in ours.losses.items():
        expected = theirs.losses[number]
        assert abs(loss - expected) <= relative * abs(expected), (
            f"iteration {number}: loss {loss} is not {expected}\n{ours.done.explain()}"
        )


def assert_survived(curve: Curve, reference: Curve, *, iterations: int, lost: list[int]) -> None:
    """The run went to its end on the failure-free curve, and its events say which replicas were lost."""
    assert sorted(curve.losses) == list(range(1, iterations + 1)), curve.done.explain()
    assert_same_curve(curve, reference)
    repaired = sorted(replica for event in curve.of("repair") for replica in event["replicas_lost"])
    assert repaired == sorted(lost), curve.events
    assert curve.of("finish")[-1]["exit_code"] == 0
    assert "did not happen" not in curve.done.err, curve.done.err
