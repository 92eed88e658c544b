"""The public core with a tiny PyTorch model, without Megatron. argv[1] is JSON: see ``JOB``.

Prints per rank: losses of all iterations, a hash of the parameters, who is alive, what was redone.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from megatron_recover.faults import FaultInjector, parse_faults
from megatron_recover.leaving import STOP_FILE
from megatron_recover.megatron.state_faults import flip_a_bit
from megatron_recover.recovery import Bucket
from megatron_recover.session import Iteration, Session, Silent

JOB: dict[str, Any] = {
    "replica_size": 1,
    "iterations": 6,
    "microbatches": 7,
    "policy": "balanced",
    "min_replicas": 1,
    "inject": [],
    "dtype": "float32",
    "overlap": False,
    "wrong": "",
    "poison": [],
    "whole_job": False,
    "options": {},
}


class Keep(Silent):
    """Keeps what was redone."""

    def __init__(self) -> None:
        self.redone = 0
        self.left: list[int] = []

    def leaving(self, replicas: tuple[int, ...], reason: str) -> None:
        self.left += replicas

    def committed(self, iteration: Iteration) -> None:
        self.redone += iteration.redone


def main() -> None:
    torch.set_num_threads(1)
    job = JOB | json.loads(sys.argv[1])
    keep = Keep()
    session = Session.start(
        job["replica_size"],
        policy=job["policy"],
        min_replicas=job["min_replicas"],
        injector=FaultInjector(parse_faults(job["inject"], None), int(_world_rank())),
        observer=keep,
        **job["options"],
    )
    if job["whole_job"]:  # as the launcher does before it signals
        (Path(os.environ["MEGATRON_RECOVER_JOB_DIR"]) / STOP_FILE).touch()
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    model.to(getattr(torch, job["dtype"]))
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    session.injector.state_changers.update(
        corrupt=lambda: flip_a_bit(parameters[0]), nan=lambda: parameters[0].grad.view(-1)[0].fill_(float("nan"))
    )
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    total = job["microbatches"]
    losses: list[list[float]] = []
    for step in range(1, job["iterations"] + 1):
        optimizer.zero_grad(set_to_none=False)
        buckets = [Bucket(f"parameter {n}", p.grad) for n, p in enumerate(reversed(parameters)) if p.grad is not None]
        iteration = session.iteration(step, total, buckets)
        count = 0
        for current in iteration.rounds():
            for place, microbatch in enumerate(current.ids):
                generator = torch.Generator().manual_seed(1000 * step + microbatch)
                inputs = torch.randn(4, 8, generator=generator).to(parameters[0].dtype)
                session.at("forward", count)
                loss = ((model(inputs) - inputs.sum(1, keepdim=True)) ** 2).mean() / total
                session.at("backward", count)
                if [step, microbatch] in job["poison"]:
                    loss = loss * float("nan")
                loss.backward()
                iteration.record(microbatch, loss.item())
                iteration.add("samples", 4)
                count += 1
                if job["overlap"] and place == len(current.ids) - 1:
                    for index in reversed(range(len(buckets))):  # not in order: the ledger has to sort it out
                        iteration.bucket_ready(index)
                    if current.number == 1 and not job["inject"]:
                        # The round is open on every rank (each waits here), and the bucket is reduced all the same.
                        assert iteration.wait_for_bucket(0, timeout_s=30)
            if job["wrong"] == f"forget {session.rank} {step}":
                iteration._records.clear()
                iteration.plan = session.policy.assign(total, session.alive[:-1])
        session.fingerprint = (hashed(parameters),)
        session.at("optimizer")
        if job["wrong"] == f"drift {session.rank} {step}":
            session.fingerprint = ("drifted",)
        assert iteration.sums["samples"] == 4 * total
        losses.append([float(value) for value in iteration.results])
        optimizer.step()
    result = {
        "rank": session.rank,
        "losses": losses,
        "parameters": hashed(parameters),
        "left": keep.left,
        "alive": list(session.alive),
        "redone": keep.redone,
        "leader": session.leader,
    }
    print("RESULT " + json.dumps(result), flush=True)
    session.close()


def hashed(parameters: list[torch.nn.Parameter]) -> str:
    flat = torch.cat([parameter.detach().float().reshape(-1) for parameter in parameters])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def _world_rank() -> str:
    return os.environ["OMPI_COMM_WORLD_RANK"]


main()
