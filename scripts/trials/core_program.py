"""The program of the core trainer: a small linear model on ``megatron_recover.session``, without Megatron.

Each rank of a replica holds a shard of the weights; the ranks of a replica need each other in every microbatch
(a sum over the ranks of the replica), as under tensor parallelism. Each microbatch also counts itself, so after a
commit it is known which microbatches went into the sum, and how often. argv[1] is JSON, made by ``core_trainer``.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_recover.collectives import runtime
from megatron_recover.faults import SAVE_STEPS, TRY_VARIABLE, FaultInjector, faults_of_this_try
from megatron_recover.recovery import Bucket
from megatron_recover.session import Iteration, Session
from megatron_recover.telemetry.recorder import Recorder
from trials.core_model import LEARNING_RATE, MOMENTUM, initial_weights, sample
from trials.inner_group import InnerGroup


class Trainer:
    """One rank of the job."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.folder = Path(job["folder"])
        self.wrong: list[str] = []
        self.losses: dict[int, list[float]] = {}
        self.evaluations: dict[int, list[float]] = {}
        self.session = _start(job)
        size, place = self.session.layout.replica_size, self.session.coordinate
        width = job["width"] // size
        self.mine = slice(place * width, (place + 1) * width)
        self.session.at("model")
        path = self.folder / f"replica-{self.session.replica}-{os.environ.get(TRY_VARIABLE, '1')}"
        self.inner = InnerGroup(path, size, place)
        self.weights = initial_weights(job["width"])[self.mine].copy()
        self.velocity = np.zeros_like(self.weights)
        self.session.at("datasets")
        self.session.by_leader(lambda: None)
        self.counts: NDArray[np.float64] = np.zeros(job["microbatches"])
        self.gradient = np.zeros_like(self.weights)
        self.session.injector.state_changers.update(corrupt=self._flip_a_bit, nan=self._lose_a_number)

    def run(self) -> None:
        """All iterations, from the last checkpoint on."""
        for step in range(self._load() + 1, self.job["iterations"] + 1):
            self.losses[step] = self._train(step)
            if step % self.job["eval_every"] == 0:
                self.evaluations[step] = self._evaluate(step)
            if step % self.job["save_every"] == 0:
                if not self.session.is_leader:
                    self.session.at("save")
                self.session.by_leader(lambda step=step: self._save(step))  # type: ignore[misc]
        self.session.agree()  # what was lost up to here is known to all now
        self._report()

    def _train(self, step: int) -> list[float]:
        session, total = self.session, self.job["microbatches"]
        session.fingerprint = (hashlib.sha256(self.weights.tobytes()).hexdigest(),)
        self.counts[:] = 0
        self.gradient[:] = 0
        half = self.gradient.size // 2
        parts = {"counts": self.counts, "upper": self.gradient[half:], "lower": self.gradient[:half]}
        iteration = session.iteration(step, total, [Bucket(name, array) for name, array in parts.items()])
        index = 0
        for current in iteration.rounds():
            for turn, microbatch in enumerate(current.ids):
                session.at("data", index)
                inputs, target = sample(self.job["width"], step, microbatch)
                session.at("forward", index)
                error = self._predict(inputs) - target
                session.at("backward", index)
                self._meet()
                scale = error / (np.sqrt(self.job["width"]) * total)
                self.gradient += inputs[self.mine] * scale
                self.counts[microbatch] += 1
                iteration.record(microbatch, 0.5 * error**2)
                iteration.add("count", 1)
                index += 1
                if self.job["overlap"] and turn == len(current.ids) - 1:
                    iteration.bucket_ready(1)
                    iteration.bucket_ready(0)
        self._check(iteration)
        session.at("optimizer")
        self.velocity = MOMENTUM * self.velocity + self.gradient
        self.weights -= LEARNING_RATE * self.velocity
        return [float(value) for value in iteration.results]

    def _evaluate(self, step: int) -> list[float]:
        session, total = self.session, self.job["microbatches"]
        iteration = session.iteration(step, total, phase="eval")
        index = 0
        for current in iteration.rounds():
            for microbatch in current.ids:
                session.at("eval", index)
                inputs, target = sample(self.job["width"], -step, microbatch)
                iteration.record(microbatch, 0.5 * (self._predict(inputs) - target) ** 2)
                index += 1
        return [float(value) for value in iteration.results]

    def _predict(self, inputs: NDArray[np.float64]) -> float:
        part = float(inputs[self.mine] @ self.weights)
        return self.inner.sum(part) / float(np.sqrt(self.job["width"]))

    def _meet(self) -> None:
        self.inner.sum(0.0)

    def _check(self, iteration: Iteration) -> None:
        """Each microbatch once: by its own count in the reduced sum, its record, and the sum of the session."""
        if not np.array_equal(self.counts, np.ones(iteration.num_microbatches)):
            self.wrong.append(f"iteration {iteration.number}: microbatches were used {self.counts.tolist()} times")
        if any(value is None for value in iteration.results) or len(iteration.results) != iteration.num_microbatches:
            self.wrong.append(f"iteration {iteration.number}: results {iteration.results}")
        if iteration.sums.get("count") != iteration.num_microbatches:
            self.wrong.append(f"iteration {iteration.number}: sums {iteration.sums}")

    def _flip_a_bit(self) -> None:
        self.weights.view(np.int64)[0] ^= 1 << 51

    def _lose_a_number(self) -> None:
        self.gradient[0] = np.nan

    def _save(self, step: int) -> None:
        """By the ranks of the leader: a shard each, and at last the name of the checkpoint."""
        self._at_save("begin")
        folder = self.folder / f"checkpoint-{step}"
        folder.mkdir(exist_ok=True)
        shard = folder / f"shard-{self.session.coordinate}.npy"
        draft = shard.with_suffix(f".{os.getpid()}.npy")
        np.save(draft, np.stack([self.weights, self.velocity]))
        self._at_save("writing")
        draft.replace(shard)
        self._meet()
        self._at_save("written")
        if self.session.coordinate == 0:
            _write(self.folder / "latest", str(step))
        self._at_save("named")

    def _at_save(self, step: str) -> None:
        self.session.at("save", SAVE_STEPS.index(step))

    def _load(self) -> int:
        latest = self.folder / "latest"
        if not latest.exists():
            return 0
        step = int(latest.read_text())
        self.weights, self.velocity = np.load(
            self.folder / f"checkpoint-{step}" / f"shard-{self.session.coordinate}.npy"
        )
        return step

    def _report(self) -> None:
        session = self.session
        result = {
            "rank": session.rank,
            "coordinate": session.coordinate,
            "try": int(os.environ.get(TRY_VARIABLE, "1")),
            "losses": self.losses,
            "evaluations": self.evaluations,
            "weights": hashlib.sha256(self.weights.tobytes()).hexdigest(),
            "alive": list(session.alive),
            "wrong": self.wrong,
        }
        _write(self.folder / f"result-{session.rank}.json", json.dumps(result))


def _start(job: dict[str, Any]) -> Session:
    faults = faults_of_this_try(job["faults"], None)
    FaultInjector(faults, int(os.environ["OMPI_COMM_WORLD_RANK"])).at("launch", 0)
    runtime.check_environment()
    comms = runtime.start(job["replica_size"])
    events, job_dir = job["folder"] + "/events.jsonl", os.environ.get("MEGATRON_RECOVER_JOB_DIR")
    recorder = Recorder(comms.layout, comms.rank, events, job_dir)
    injector = FaultInjector(faults, comms.rank, recorder.blackbox)
    session = Session(comms, policy=job["policy"], injector=injector, observer=recorder, **job["session"])
    recorder.started(job["policy"], {})
    session.at("init")
    return session


def _write(path: Path, text: str) -> None:
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(text)
    draft.replace(path)


if __name__ == "__main__":
    Trainer(json.loads(sys.argv[1])).run()
