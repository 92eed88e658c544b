"""Cases on the real Megatron: ``scripts/pretrain_gpt.py`` on CPU, against vanilla Megatron under torchrun.

The failure-free curve is that of one replica without ``--recover``: Megatron's losses do not depend on the number of
data-parallel replicas. It is run once for each layout, and kept beside the results.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from megatron_recover.errors import UserError
from trials.case import MEGATRON_LAYOUTS, Case, Result
from trials.jobs import REPOSITORY, Ended, run
from trials.judge import (
    HEARTBEAT_TIMEOUT_S,
    LAUNCHER_OPTIONS,
    PROGRESS_TIMEOUT_S,
    REPAIR_TIMEOUT_S,
    SETUP_TIMEOUT_S,
    Findings,
    Wrong,
    difference,
    judge,
)

SCRIPT = REPOSITORY / "scripts" / "pretrain_gpt.py"
DATA = REPOSITORY / "data" / "demo"
REFERENCES = REPOSITORY / "runs" / "chaos" / "references"

# Deep enough for two pipeline stages, and with several gradient buckets, so that a rank can be lost between two.
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--position-embedding-type rope --init-method-std 0.08 --micro-batch-size 2 --global-batch-size 16 "
    "--lr 2e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-decay-iters 20 --attention-dropout 0 --hidden-dropout 0 "
    "--num-workers 0 --log-interval 1 --recover-device cpu --ddp-bucket-size 10000 --eval-iters 1"
)
_SLOWER = 3
"""A real iteration on a few cores takes longer than one of the core trainer: so do the timeouts."""

_TRAINING = re.compile(r"iteration\s+(\d+)/.*?lm loss: (\S+) ")
_VALIDATION = re.compile(r"validation loss at iteration (\d+)( on [a-z ]+)? \| lm loss value: (\S+)")

Curves = dict[str, dict[int, list[float]]]


def run_case(case: Case, number: int, folder: Path) -> Result:
    """Runs a case in an empty folder."""
    command = [sys.executable, "-m", "megatron_recover.cli", "launch", "-n", str(case.num_ranks)]
    command += [*LAUNCHER_OPTIONS, "--", str(SCRIPT), *_flags(case)]
    command += ["--recover", "--recover-policy", case.policy, "--recover-events", str(folder / "events.jsonl")]
    command += ["--recover-check-replicas-interval", "1"]
    command += ["--recover-heartbeat-timeout", f"{_SLOWER * HEARTBEAT_TIMEOUT_S:g}"]
    command += ["--recover-progress-timeout", f"{_SLOWER * PROGRESS_TIMEOUT_S:g}"]
    command += ["--recover-setup-timeout", f"{_SLOWER * SETUP_TIMEOUT_S:g}"]
    command += ["--recover-repair-timeout", f"{REPAIR_TIMEOUT_S:g}"]
    saved = str(folder / "checkpoints")
    command += ["--save", saved, "--load", saved, "--save-interval", str(case.save_every)]
    if case.overlap:
        command.append("--overlap-grad-reduce")
    for fault in case.faults:
        command += ["--recover-inject", fault.spec]
    reference(case)  # now, so that it does not run beside the case
    return judge(case, number, run(command, folder, case.deadline_s), folder, read)


def read(case: Case, ended: Ended, folder: Path) -> Findings:
    """Reads Megatron's log; replicas compare each other bit by bit in every iteration by themselves.

    Raises:
        Wrong: an iteration is missing or not on the curve, or the checkpoint of the end is not there.
    """
    ours, theirs = _read_log(ended.out), reference(case)
    for what, curve in theirs.items():
        missing = set(curve) - set(ours[what])
        if missing:
            raise Wrong(f"{what} loss of iterations {sorted(missing)} was not logged")
    # A lost leader's last lines are there twice, and so are iterations that a restart has repeated: all must be right.
    largest = max(_compare(ours[what], theirs[what], f"{what} loss") for what in ours)
    latest = folder / "checkpoints" / "latest_checkpointed_iteration.txt"
    if not latest.exists() or latest.read_text().strip() != str(case.iterations):
        raise Wrong("the checkpoint of the last iteration is not there")
    events = (folder / "events.jsonl").read_text().splitlines()
    tries = 1 + ended.err.count("; starting again (try ")
    lost = {replica for line in events if '"event": "repair"' in line for replica in json.loads(line)["replicas_lost"]}
    alive = sorted(set(range(case.num_replicas)) - lost)
    return Findings(tries, alive, largest)


def _compare(ours: Mapping[int, list[float]], theirs: Mapping[int, list[float]], what: str) -> float:
    pairs = [(number, value) for number, values in ours.items() for value in values]
    return max((difference({n: [value]}, {n: theirs.get(n, [])[:1]}, what) for n, value in pairs), default=0.0)


def reference(case: Case) -> Curves:
    """The curves of vanilla Megatron.

    Raises:
        UserError: vanilla Megatron does not run here.
    """
    return _reference(tuple(_flags(case)), case.replica_size)


@functools.cache
def _reference(flags: tuple[str, ...], num_ranks: int) -> Curves:
    key = hashlib.sha256(json.dumps([flags, num_ranks, SCRIPT.read_text()]).encode()).hexdigest()[:16]
    folder = REFERENCES / key
    kept = folder / "curves.json"
    if not kept.exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        ended = run([*command, str(SCRIPT), *flags], folder, 300.0)
        curves = _read_log(ended.out)
        if ended.code != 0 or not curves["training"]:
            raise UserError(f"vanilla Megatron did not run (exit code {ended.code}): see {folder}/err.log")
        draft = kept.with_suffix(".part")
        draft.write_text(json.dumps(curves))
        draft.replace(kept)
    found = json.loads(kept.read_text())
    return {what: {int(number): values for number, values in curve.items()} for what, curve in found.items()}


def _flags(case: Case) -> list[str]:
    layout = MEGATRON_LAYOUTS[case.layout][2]
    counts = f"--train-iters {case.iterations} --eval-interval {case.eval_every}"
    return [*MODEL.split(), *counts.split(), *layout.split(), *_data_flags()]


@functools.cache
def _data_flags() -> tuple[str, ...]:
    """Real English text, tokenised, made when it is not there; training then needs only the vocabulary's size."""
    prepare = [sys.executable, str(REPOSITORY / "scripts" / "demo" / "prepare.py"), "--dir", str(DATA)]
    subprocess.run(prepare, check=True, timeout=300, capture_output=True)
    data = ["--data-path", str(DATA / "corpus"), "--split", "90,10,0"]
    return (*data, "--tokenizer-type", "NullTokenizer", "--vocab-size", "2048")


def _read_log(text: str) -> Curves:
    found: Curves = {"training": {}, "validation": {}, "last validation": {}}
    for number, loss in _TRAINING.findall(text):
        found["training"].setdefault(int(number), []).append(float(loss))
    for number, at_the_end, loss in _VALIDATION.findall(text):
        what = "last validation" if at_the_end else "validation"
        found[what].setdefault(int(number), []).append(float(loss))
    return found
