"""What ps_bench says of matrix products on each device, over a grid of sizes of both matrices."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from machine import machine

from .lab import ExperimentFailed, Lab
from .made import read_mark
from .program import run_program

PUBLISHED = (120, 30, 20)  # m, k, n of the product from which on the GPU was faster: m × k by k × n.
SLOWER = 0.05  # By less than this share nothing counts as slower.
_DOUBLINGS = 8
_GPU_IS_MISSING = "--device=cuda: "

Size = tuple[int, int, int]  # m × k by k × n.


@dataclass(frozen=True)
class Grid:
    """Every number of rows of the first matrix with every second matrix."""

    rows: tuple[int, ...]  # m.
    seconds: tuple[tuple[int, int], ...]  # k and n, in the published proportion of 3 to 2.

    @property
    def flag(self) -> str:
        """For ps_bench."""
        return f"--grid={','.join(map(str, self.rows))}:{','.join(f'{k}x{n}' for k, n in self.seconds)}"

    @property
    def sizes(self) -> list[Size]:
        """All of them, the second matrix's changing faster."""
        return [(m, k, n) for m in self.rows for k, n in self.seconds]


def grid_of(lab: Lab) -> Grid:
    """Doublings around the published size, from a quarter of its rows and half of its second matrix on."""
    count = lab.pick(_DOUBLINGS, 4)
    return Grid(
        tuple(PUBLISHED[0] * 2**step // 4 for step in range(count)),
        tuple((PUBLISHED[1] * 2**step // 2, PUBLISHED[2] * 2**step // 2) for step in range(count)),
    )


@dataclass
class Measured:
    """One device: medians over the rounds, in seconds."""

    product_s: dict[Size, float] = field(default_factory=dict)
    with_copies_s: dict[Size, float] = field(default_factory=dict)


@dataclass
class Products:
    """All that was measured."""

    grid: Grid
    rounds: int
    threads: int  # Of the CPU's second measurement: its cores.
    one_thread: Measured
    all_threads: Measured | None  # None: there is one core.
    gpu: Measured | None
    no_gpu: str  # Why there is none, or "".


def measure(lab: Lab) -> Products:
    """All devices, by turns."""
    grid, rounds, cores = grid_of(lab), lab.pick(5, 1), int(machine()["cores"])
    no_gpu = why_no_gpu(lab)
    devices = "cpu" if no_gpu else "cpu,cuda"
    alone, together = [], []
    for number in range(rounds):
        alone += _rows(lab, f"one-thread-r{number + 1}", grid, [f"--device={devices}", "--threads=1"])
        if cores > 1:
            together += _rows(lab, f"all-threads-r{number + 1}", grid, ["--device=cpu", f"--threads={cores}"])
    return Products(
        grid,
        rounds,
        cores,
        _medians(alone, "cpu"),
        _medians(together, "cpu") if cores > 1 else None,
        None if no_gpu else _medians(alone, "cuda"),
        no_gpu,
    )


def why_no_gpu(lab: Lab) -> str:
    """What ps_bench says that is missing; "" where it can compute on a GPU."""
    command = [str(lab.bin / "ps_bench"), "gemm", "--device=cuda", "--grid=1:1x1"]
    try:
        run_program(lab, "gpu", command, lab.folder)
    except ExperimentFailed as failed:
        said = str(failed)
        return said.partition(_GPU_IS_MISSING)[2] or said
    return ""


def _rows(lab: Lab, name: str, grid: Grid, flags: list[str]) -> list[dict[str, Any]]:
    """Of one run of ps_bench, or of the same that was made before."""
    bench = lab.bin / "ps_bench"
    command = [str(bench), "gemm", "--json", grid.flag, *flags]
    identity = {"program": hashlib.sha256(bench.read_bytes()).hexdigest()[:16], "flags": command[1:]}
    out, mark = lab.folder / f"{name}.out", lab.folder / f"{name}.json"
    done = read_mark(mark, identity) if lab.may_keep(name) else None
    if done is None:
        mark.unlink(missing_ok=True)
        began = time.monotonic()
        run_program(lab, name, command, lab.folder)
        mark.write_text(json.dumps({**identity, **lab.note_made(name, time.monotonic() - began)}) + "\n")
        lab.say(f"{name} is done")
    else:
        lab.note_kept(name, done, mark)
    try:
        return json.loads(out.read_text())["rows"]
    except (OSError, ValueError, KeyError) as error:
        mark.unlink(missing_ok=True)
        raise ExperimentFailed(f"{name}: what ps_bench printed is not understood: {error}") from None


def _medians(rows: list[dict[str, Any]], device: str) -> Measured:
    by_size: dict[Size, list[dict[str, Any]]] = {}
    for row in rows:
        if row["device"] == device:
            by_size.setdefault((row["m"], row["k"], row["n"]), []).append(row)
    return Measured(
        {size: statistics.median(row["compute_s"] for row in own) for size, own in by_size.items()},
        {size: statistics.median(row["with_copies_s"] for row in own) for size, own in by_size.items()},
    )


def flops(size: Size) -> int:
    """Of a product: a multiplication and an addition for each of m·k·n."""
    m, k, n = size
    return 2 * m * k * n


def text(size: Size) -> str:
    """As people write it."""
    m, k, n = size
    return f"{m} × {k} by {k} × {n}"


def ratios(first: dict[Size, float], second: dict[Size, float]) -> dict[Size, float]:
    """How many times as long as the first the second takes, where both are known."""
    return {size: second[size] / first[size] for size in first if size in second}


def overtakes(grid: Grid, ratio: dict[Size, float], m: int) -> tuple[int, int] | None:
    """The second matrix from which on, up to the largest, the second is faster for this number of rows.

    It may be slower by SLOWER at most in between, which two measurements of the same may be.
    """
    found = None
    for k, n in reversed(grid.seconds):
        times = ratio.get((m, k, n), math.inf)
        if times > 1 + SLOWER:
            break
        if times < 1:
            found = (k, n)
    return found
