"""scripts/pretrain_gpt.py without --recover: Megatron's own training loop on the CPU, under torchrun."""

from __future__ import annotations

import math
import re
import sys

import pytest
from harness import REPOSITORY, run

SCRIPT = str(REPOSITORY / "scripts" / "pretrain_gpt.py")
GPT = (
    "--recover-device cpu --mock-data --tokenizer-type NullTokenizer --vocab-size 512 --num-layers 2 "
    "--hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 12 --lr 2e-3 --hidden-dropout 0 "
    "--attention-dropout 0 --eval-iters 0 --eval-interval 1000 --num-workers 0 --log-interval 1"
)


def pretrain(*flags: str) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of a run on two ranks, one of each an iteration."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    job = run([*torchrun, SCRIPT, *GPT.split(), *flags], timeout=150)
    assert job.code == 0, job.explain()
    losses = [float(value) for value in re.findall(r"lm loss: ([-+.\dEe]+|nan|inf)", job.out)]
    norms = [float(value) for value in re.findall(r"grad norm: ([-+.\dEe]+|nan|inf)", job.out)]
    return losses, norms


@pytest.mark.slow  # test_no_failure and test_failures compare with vanilla runs of these layouts, too
def test_layouts_train_alike() -> None:
    """Data parallel, and tensor plus sequence parallel: the same finite, falling losses."""
    losses, norms = pretrain()
    assert len(losses) == len(norms) == 12
    assert all(math.isfinite(value) for value in losses + norms)
    assert losses[-1] < losses[0] - 0.5

    split_losses, split_norms = pretrain("--tensor-model-parallel-size", "2", "--sequence-parallel")
    assert all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(losses, split_losses, strict=True))
    assert all(math.isclose(a, b, abs_tol=2e-3) for a, b in zip(norms, split_norms, strict=True))


def test_recover_without_mpi_is_refused() -> None:
    job = run([sys.executable, SCRIPT, *GPT.split(), "--recover"], timeout=60)
    assert job.code == 2, job.explain()
    assert job.err.startswith("error: --recover needs MPI")
    assert len(job.err.strip().splitlines()) == 1
