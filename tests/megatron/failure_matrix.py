"""The failure matrix: layouts x phases, and the slice of it that `make test` runs.

Other factors (overlap, policy, whether the victim's replica leads) vary from cell to cell so that each pair of
values of any two factors other than (layout, phase) comes up.
"""

from __future__ import annotations

from dataclasses import dataclass

from training_runs import LAYOUTS

PHASES = {
    "data": "microbatch=0",
    "forward": "microbatch=1",
    "backward": "microbatch=1",
    "reduce": "bucket=1",
    "commit": "",
    "after-commit": "",
    "optimizer": "",
    "eval": "microbatch=0",
    "save": "",
}
ITERATION = 4
"""The iteration in which a cell's rank is killed; evaluation and saving happen after it."""

EVALUATE_AND_SAVE = "--eval-iters 1 --eval-interval 4 --save-interval 4"


@dataclass(frozen=True)
class Cell:
    """One rank is killed in one phase of one iteration."""

    layout: str
    phase: str
    overlap: bool
    policy: str
    leader: bool
    """Whether the rank belongs to the replica that leads."""

    @property
    def name(self) -> str:
        overlap = "overlap" if self.overlap else "no-overlap"
        return f"{self.layout}-{self.phase}-{overlap}-{self.policy}-{'leader' if self.leader else 'other'}"

    @property
    def victim(self) -> int:
        """A rank of replica 0 or 1: its first where only that one has what the phase needs, else its last.

        (Megatron cuts gradients into buckets on the first pipeline stage only.)
        """
        num_ranks, size, _ = LAYOUTS[self.layout]
        first = 0 if self.leader else size
        inside = 0 if self.phase in ("data", "save", "reduce") else size - 1
        return min(first + inside, num_ranks - 1)

    @property
    def spec(self) -> str:
        unit = PHASES[self.phase]
        if self.phase == "reduce" and not self.overlap:
            unit = "bucket=0"  # without overlap Megatron makes one bucket
        place = f"kill:rank={self.victim},iteration={ITERATION},phase={self.phase}"
        return f"{place},{unit}" if unit else place

    @property
    def flags(self) -> str:
        overlap = "--overlap-grad-reduce" if self.overlap else ""
        return f"{LAYOUTS[self.layout][2]} {overlap} --recover-policy {self.policy} {EVALUATE_AND_SAVE}"


def cells() -> list[Cell]:
    """All layouts x phases, with the other factors spread over them."""
    found = []
    for row, layout in enumerate(LAYOUTS):
        for column, phase in enumerate(PHASES):
            turn = row + column
            found.append(
                Cell(
                    layout,
                    phase,
                    overlap=turn % 2 == 0,
                    policy=("balanced", "recover")[(turn // 2) % 2],
                    leader=(column + row // 2) % 2 == 0,
                )
            )
    return found


def in_slice(cell: Cell) -> bool:
    """Nine cells: each phase once, and every pair of values of layout, overlap, policy and leader."""
    row, column = list(LAYOUTS).index(cell.layout), list(PHASES).index(cell.phase)
    return (column + column // 4) % 4 == row
