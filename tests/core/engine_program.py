"""Layer 1 by itself: sums over replicas, with ranks that kill themselves. numpy only.

argv[1] is JSON: replica_size, iterations, microbatches, sizes (elements of each bucket), kills
([rank, iteration, where, index]; where: start, reduce, exchange, attempt, idle, repaired).
Every microbatch adds (id + 1) * iteration to each element, so a committed sum is known exactly.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from typing import Any

import numpy as np

from megatron_recover.collectives import runtime
from megatron_recover.collectives.engine import Engine, Reduction
from megatron_recover.collectives.repair import Repair
from megatron_recover.workload import get_policy

faulthandler.register(signal.SIGUSR1, all_threads=True)


def main() -> None:
    job: dict[str, Any] = json.loads(sys.argv[1])
    runtime.check_environment()
    comms = runtime.start(job["replica_size"])
    iteration = 0

    def die(where: str, index: int = 0) -> None:
        if [comms.rank, iteration, where, index] in job["kills"]:
            if "exit_code" in job:
                os._exit(job["exit_code"])
            os.kill(os.getpid(), signal.SIGKILL)

    repairs: list[Repair] = []

    def repaired(report: Repair) -> None:
        repairs.append(report)
        die("repaired", len(repairs))

    def give_up(reason: str) -> None:
        print(f"gave up: {reason}", file=sys.stderr, flush=True)
        os._exit(73)

    engine = Engine(comms, on_repair=repaired, on_orphaned=lambda: os._exit(0), on_give_up=give_up)
    engine.start()
    policy = get_policy("balanced", num_replicas=comms.layout.num_replicas)
    total = job["microbatches"]
    epoch, alive = engine.epoch, engine.alive
    wrong: list[str] = []
    rounds = 0
    for iteration in range(1, job["iterations"] + 1):
        die("start")
        if any(kill[1] == iteration and kill[2] == "idle" for kill in job["kills"]):
            die("idle")
            limit = time.monotonic() + 20
            while engine.epoch == epoch:  # nothing is posted: the engine has to find out by itself
                assert time.monotonic() < limit, "the engine did not notice a death while idle"
                time.sleep(0.001)
        plan = policy.assign(total, alive)
        done: list[int] = []
        todo = list(plan.ids_of(comms.replica))
        local = [np.zeros(size, np.float32) for size in job["sizes"]]
        while True:
            rounds += 1
            done += todo
            for array in local:
                array += np.float32(sum(j + 1 for j in todo) * iteration)
            tasks = []
            for index, array in enumerate(local):
                task = Reduction(lambda a=array: a, np.empty_like(array), lambda i=index: die("reduce", i))
                tasks.append((task, engine.all_reduce(task, epoch)))
            die("exchange")
            payload = json.dumps({"ids": done, "fill": "x" * (iteration * 1500 * (comms.replica + 1))}).encode()
            parts = engine.exchange(payload, epoch).result()
            ok = all(future.result() for _, future in tasks) and parts is not None
            die("attempt")
            attempt = engine.attempt(ok, epoch, votes=1 << comms.rank).result()
            epoch, alive = attempt.epoch, attempt.alive
            if attempt.ok:
                break
            plan = policy.reassign(plan, alive)
            todo = list(plan.ids_of(comms.replica))[len(done) :]
        expected = float(total * (total + 1) // 2 * iteration)
        for index, (task, _) in enumerate(tasks):
            if not np.all(task.result == expected):
                wrong.append(f"iteration {iteration} bucket {index}: {task.result[:3]} is not {expected}")
        assert parts is not None
        ids = sorted(j for part in parts.values() for j in json.loads(part)["ids"])
        if ids != list(range(total)) or tuple(parts) != alive:
            wrong.append(f"iteration {iteration}: ids {ids} of {tuple(parts)}")
        members = sum(1 << rank for replica in alive for rank in comms.layout.ranks_of(replica))
        if attempt.votes != members:
            wrong.append(f"iteration {iteration}: votes {attempt.votes:b} are not {members:b}")
    engine.attempt(True, epoch).result()
    engine.close()
    result = {
        "rank": comms.rank,
        "alive": list(alive),
        "epoch": epoch,
        "rounds": rounds,
        "wrong": wrong,
        "lost": [list(r.ranks_lost) for r in repairs],
        "repair_ms": [r.repair_s * 1e3 for r in repairs],
    }
    print("RESULT " + json.dumps(result), flush=True)
    os._exit(0)


main()
