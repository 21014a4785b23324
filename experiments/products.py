"""Matrix products over both matrices' sizes: the CPU's speed, and from which sizes on a GPU is faster."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from experiments.lab import ExperimentFailed, Lab, run_program
from experiments.page import NOT_MEASURED, Claim, Page
from experiments.shared.charts import Colours, Figure
from experiments.shared.machine import cores
from experiments.shared.pages import Table

PUBLISHED = (120, 30, 20)  # m, k, n of the product from which on the GPU was faster: m × k by k × n.
SLOWER = 0.05  # By less than this share nothing counts as slower.
WITHIN = 2.0  # A crossover is called there where its rows and columns differ by this factor at most.
_DOUBLINGS = 8
_GPU_IS_MISSING = "--device=cuda: "
_FULL_AT = 4.0  # Colours are full from so many doublings of a ratio on.
_FRAMED = f"The frame is the published {PUBLISHED[0]} × {PUBLISHED[1]} by {PUBLISHED[1]} × {PUBLISHED[2]}."

Size = tuple[int, int, int]  # m × k by k × n.
Times = dict[Size, float]  # Seconds, or ratios of them.


@dataclass(frozen=True)
class Grid:
    """Every number of rows of the first matrix with every second matrix."""

    rows: tuple[int, ...]  # m.
    seconds: tuple[tuple[int, int], ...]  # k and n, in the published proportion of 3 to 2.

    @property
    def flag(self) -> str:
        """For ps_bench."""
        return f"--grid={','.join(map(str, self.rows))}:{','.join(f'{k}x{n}' for k, n in self.seconds)}"


def grid_of(lab: Lab) -> Grid:
    """Doublings around the published size, from a quarter of its rows and half of its second matrix on."""
    m, k, n = PUBLISHED
    steps = [2**step for step in range(lab.pick(_DOUBLINGS, 4))]
    return Grid(tuple(m * step // 4 for step in steps), tuple((k * step // 2, n * step // 2) for step in steps))


@dataclass
class Products:
    """All that was measured: medians over the rounds."""

    grid: Grid
    one_thread: Times
    all_threads: Times | None  # None: there is one core.
    gpu: Times | None
    gpu_with_copies: Times | None
    no_gpu: str  # Why there is none, or "".


def measure(lab: Lab) -> Products:
    """All devices, by turns."""
    grid, count, no_gpu = grid_of(lab), len(cores()), _why_no_gpu(lab)
    devices = "cpu" if no_gpu else "cpu,cuda"
    alone, together = [], []
    for number in range(1, rounds(lab) + 1):
        alone += _rows(lab, f"one-thread-r{number}", grid, [f"--device={devices}", "--threads=1"])
        if count > 1:
            together += _rows(lab, f"all-threads-r{number}", grid, ["--device=cpu", f"--threads={count}"])
    gpu = [None if no_gpu else _medians(alone, "cuda", field) for field in ("compute_s", "with_copies_s")]
    all_threads = _medians(together, "cpu", "compute_s") if together else None
    return Products(grid, _medians(alone, "cpu", "compute_s"), all_threads, *gpu, no_gpu)


def rounds(lab: Lab) -> int:
    return lab.pick(5, 1)


def _why_no_gpu(lab: Lab) -> str:
    """What ps_bench says that is missing; "" where it can compute on a GPU."""
    command = [str(lab.bin / "ps_bench"), "gemm", "--device=cuda", "--grid=1:1x1"]
    try:
        run_program(lab, "gpu", command, lab.folder)
    except ExperimentFailed as failed:
        return str(failed).partition(_GPU_IS_MISSING)[2] or str(failed)
    return ""


def _rows(lab: Lab, name: str, grid: Grid, flags: list[str]) -> list[dict[str, Any]]:
    """What one run of ps_bench printed, or the same that was made before."""
    command = [str(lab.bin / "ps_bench"), "gemm", "--json", grid.flag, *flags]
    identity = {"program": lab.file_hash("ps_bench"), "flags": command[1:]}
    out, mark = lab.folder / f"{name}.out", lab.folder / f"{name}.json"

    def make() -> dict[str, Any]:
        run_program(lab, name, command, lab.folder)
        return {}

    lab.once(name, mark, identity, make)
    try:
        return json.loads(out.read_text())["rows"]
    except (OSError, ValueError, KeyError) as error:
        mark.unlink(missing_ok=True)
        raise ExperimentFailed(f"{name}: what ps_bench printed is not understood: {error}") from None


def _medians(rows: list[dict[str, Any]], device: str, field: str) -> Times:
    frame = pd.DataFrame(rows)
    return frame[frame["device"] == device].groupby(["m", "k", "n"])[field].median().to_dict()


def flops(size: Size) -> int:
    """A multiplication and an addition for each of m·k·n."""
    return 2 * math.prod(size)


def text(size: Size) -> str:
    m, k, n = size
    return f"{m} × {k} by {k} × {n}"


def factor(value: float) -> str:
    """Two digits, or all that are before the point."""
    return f"{value:.2g}" if value < 99.5 else f"{value:,.0f}"


def ratios(first: Times, second: Times) -> Times:
    """How many times as long as the first the second takes, where both are known."""
    return {size: second[size] / first[size] for size in first if size in second}


def overtakes(grid: Grid, ratio: Times, m: int) -> tuple[int, int] | None:
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


def run(lab: Lab) -> Page:
    """Measures all devices, by turns."""
    products = measure(lab)
    grid, cpu = products.grid, products.one_thread
    speeds = _speeds(cpu)
    best = max(speeds, key=speeds.__getitem__)
    threads, copies, alone = (
        None if other is None else ratios(cpu, other)
        for other in (products.all_threads, products.gpu_with_copies, products.gpu)
    )
    figures = [_speed_figure(grid, speeds, "cpu", "CPU, one thread")]
    if threads is not None:
        title, who = (
            f"Time with {len(cores())} threads, times that with one",
            f"the product with {len(cores())} threads",
        )
        figures.append(_ratio_figure(grid, threads, "threads", title, who))
    if products.gpu is not None:
        figures.append(_speed_figure(grid, _speeds(products.gpu), "gpu", "GPU"))
        for ratio, name, how in ((alone, "gpu-alone", "without copies"), (copies, "gpu-copies", "with copies")):
            title = f"Time on the GPU, {how}, times that of one CPU thread"
            figures.append(_ratio_figure(grid, ratio, name, title, "the GPU"))
    columns = {"GPU, without copies": alone, "GPU, with copies": copies, "more threads": threads}
    return Page(
        "Matrix products on CPU and GPU",
        _finding(products),
        "products.md.j2",
        [_claim(products, alone, with_copies=False), _claim(products, copies, with_copies=True)],
        tables={"times": _times(products), "crossovers": _crossovers(grid, columns)},
        figures=figures,
        values={
            "cells": f"{len(grid.rows) * len(grid.seconds)} sizes up to {text((grid.rows[-1], *grid.seconds[-1]))}",
            "threads": threads and sorted(threads.values()),
            "no_gpu": products.no_gpu,
            "here": speeds[PUBLISHED],
            "most": speeds[best],
            "best": text(best),
        },
    )


def _speeds(times: Times) -> Times:
    """GFLOP/s."""
    return {size: flops(size) / seconds / 1e9 for size, seconds in times.items()}


def _finding(products: Products) -> str:
    cpu_s = products.one_thread[PUBLISHED]
    said = f"At {text(PUBLISHED)} a CPU thread takes {1e6 * cpu_s:.1f} µs"
    if products.gpu is None:
        return f"{said} and a GPU was {NOT_MEASURED} (published: from there on the GPU is faster)."
    ratio = products.gpu[PUBLISHED] / cpu_s
    return f"{said} and the GPU {factor(ratio)} times as long (published: from there on the GPU is faster)."


def _claim(products: Products, gpu: Times | None, with_copies: bool) -> Claim:
    what = "product from which on the GPU is faster, " + ("with the copies" if with_copies else "without copies")
    m, grid, published = PUBLISHED[0], products.grid, text(PUBLISHED)
    if gpu is None:
        why = (
            f"No GPU: {products.no_gpu}. One thread of this CPU takes {1e6 * products.one_thread[PUBLISHED]:.1f} µs "
            "for the published product; a GPU would have to begin and end it"
            f"{' and copy three matrices' if with_copies else ''} in less, to be faster there."
        )
        return Claim(what, published, NOT_MEASURED, None, why)
    found = overtakes(grid, gpu, m)
    agrees: bool | None = found is not None and 1 / WITHIN <= found[0] / PUBLISHED[1] <= WITHIN
    ours = f"with {m} rows " + (
        f"from {text((m, *found))} on" if found else f"none up to {text((m, *grid.seconds[-1]))}"
    )
    place = f"Its crossover is {'' if agrees else 'not '}within a factor of {WITHIN:g} of the published sizes."
    if found is None:
        place = "It has no crossover here."
    elif found == grid.seconds[0]:
        agrees, place = None, "It is faster with all second matrices here, so that its crossover may be below them."
    why = (
        f"{place} At the published size the GPU takes {factor(gpu[PUBLISHED])} times as long as one thread of this "
        "CPU. The published CPU and GPU were others, and only the place from which on the GPU is faster is compared."
    )
    return Claim(what, published, ours, agrees, why)


def _times(products: Products) -> Table:
    """A row for each first matrix, a column for each second."""
    columns = ["m", *(f"{k} × {n}" for k, n in products.grid.seconds)]
    table = Table("Microseconds of a product on the CPU, one thread", columns)
    for m in products.grid.rows:
        cells = [1e6 * products.one_thread.get((m, k, n), math.nan) for k, n in products.grid.seconds]
        shown = [f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 100 else f"{us:,.0f}" for us in cells]
        table.rows.append(
            [str(m), *(NOT_MEASURED if math.isnan(us) else one for us, one in zip(cells, shown, strict=True))]
        )
    return table


def _crossovers(grid: Grid, columns: Mapping[str, Times | None]) -> Table:
    """By the first matrix's rows; each column is who overtakes whom, with its ratios, or None if not measured."""

    def cell(ratio: Times | None, m: int) -> str:
        if ratio is None:
            return NOT_MEASURED
        found = overtakes(grid, ratio, m)
        if found is None:
            return "none of these"
        return "all of these" if found == grid.seconds[0] else f"{found[0]} × {found[1]}"

    table = Table("The second matrix from which on it is faster, by the first one's rows", ["m", *columns])
    table.rows = [[str(m), *(cell(ratio, m) for ratio in columns.values())] for m in grid.rows]
    return table


def _speed_figure(grid: Grid, speeds: Times, name: str, device: str) -> Figure:
    most = max(speeds.values())
    shades = {size: value / most for size, value in speeds.items()}
    shown = {size: f"{value:.0f}" for size, value in speeds.items()}
    title, caption = f"GFLOP/s of a product, {device}", f"The darker, the faster. {_FRAMED}"
    return _heat_map(f"speed-{name}", title, caption, grid, shades, shown)


def _ratio_figure(grid: Grid, ratio: Times, name: str, title: str, who: str) -> Figure:
    """How many times as long it takes: below 1, `who` is faster."""
    shades = {size: math.log2(value) / _FULL_AT for size, value in ratio.items()}
    shown = {size: factor(value) for size, value in ratio.items()}
    caption = f"Blue, below 1: {who} is faster. Red, above 1: it is slower. {_FRAMED}"
    return _heat_map(f"ratio-{name}", title, caption, grid, shades, shown, diverging=True)


def _heat_map(
    name: str, title: str, caption: str, grid: Grid, shades: Times, shown: dict[Size, str], diverging: bool = False
) -> Figure:
    """Shades are from 0 or, diverging, from -1, to 1. What is not there stays empty."""
    places = {(m, k, n): (x, y) for y, m in enumerate(grid.rows) for x, (k, n) in enumerate(grid.seconds)}
    # The darkest shades are left out, so that the frame is seen.
    look = {"cmap": "RdBu_r", "vmin": -1.3, "vmax": 1.3} if diverging else {"cmap": "Blues", "vmin": 0.0, "vmax": 1.3}

    def draw(axes: Any, colours: Colours) -> None:
        values = [[shades.get((m, k, n), math.nan) for k, n in grid.seconds] for m in grid.rows]
        edges = (np.arange(len(each) + 1) - 0.5 for each in (grid.seconds, grid.rows))
        axes.grid(False)
        axes.pcolormesh(*edges, values, edgecolors=colours["surface"], linewidth=1.0, **look)
        for size, said in shown.items():
            dark = abs(shades[size]) > (0.75 if diverging else 0.7)
            colour = colours["surface" if dark else "ink"]
            axes.text(*places[size], said, ha="center", va="center", fontsize=7.5, color=colour)
        if PUBLISHED in places:
            x, y = places[PUBLISHED]
            around = ([x - 0.5, x + 0.5, x + 0.5, x - 0.5, x - 0.5], [y - 0.5, y - 0.5, y + 0.5, y + 0.5, y - 0.5])
            axes.plot(*around, color=colours["wait"], linewidth=1.8)
        axes.set_xticks(range(len(grid.seconds)), [f"{k}×{n}" for k, n in grid.seconds], rotation=30, ha="right")
        axes.set_yticks(range(len(grid.rows)), [str(m) for m in grid.rows])
        axes.tick_params(length=0)

    size = {"width_inches": 1.6 + 0.66 * len(grid.seconds), "height_inches": 1.2 + 0.36 * len(grid.rows)}
    return Figure(name, title, caption, "second matrix, k × n", "rows of the first, m", draw, **size)
