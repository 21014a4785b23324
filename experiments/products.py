"""Matrix products over both matrices' sizes: the CPU's speed, and from which sizes on a GPU is faster."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
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
ROUNDS = 5, 1  # In the full and the quick form.
_DOUBLINGS = 8, 4
_GPU_IS_MISSING = "--device=cuda: "
_FULL_AT = 4.0  # Colours are full from so many doublings of a ratio on.
_FRAMED = f"The frame is the published {PUBLISHED[0]} × {PUBLISHED[1]} by {PUBLISHED[1]} × {PUBLISHED[2]}."

# Seconds, or ratios of them: a row for each number of rows of the first matrix, m; a column for each second matrix,
# k × n, of the published proportion.
Times = pd.DataFrame


def _rows(lab: Lab, name: str, flags: list[str]) -> list[dict[str, Any]]:
    """What one run of ps_bench printed, or the same that was made before. The sizes are doublings around the published
    one, from a quarter of its rows and half of its second matrix on.
    """
    (m, k, n), steps = PUBLISHED, [2**step for step in range(lab.pick(*_DOUBLINGS))]
    seconds = ",".join(f"{k * step // 2}x{n * step // 2}" for step in steps)
    grid = f"--grid={','.join(str(m * step // 4) for step in steps)}:{seconds}"
    command = [str(lab.bin / "ps_bench"), "gemm", "--json", grid, *flags]
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


def measure(lab: Lab, no_gpu: str) -> dict[str, Times]:
    """Medians over the rounds, in which all devices take turns: "cpu", "threads" if there are several cores, "gpu" and
    "copies" if there is a GPU.
    """
    count, devices = len(cores()), "cpu" if no_gpu else "cpu,cuda"
    alone, together = [], []
    for number in range(1, lab.pick(*ROUNDS) + 1):
        alone += _rows(lab, f"one-thread-r{number}", [f"--device={devices}", "--threads=1"])
        if count > 1:
            together += _rows(lab, f"all-threads-r{number}", ["--device=cpu", f"--threads={count}"])

    def medians(rows: list[dict[str, Any]], device: str, field: str) -> Times:
        frame = pd.DataFrame(rows)
        own = frame[frame["device"] == device]
        return own.pivot_table(values=field, index="m", columns=["k", "n"], aggfunc="median")

    found = {"cpu": medians(alone, "cpu", "compute_s")}
    if together:
        found["threads"] = medians(together, "cpu", "compute_s")
    if not no_gpu:
        found |= {"gpu": medians(alone, "cuda", "compute_s"), "copies": medians(alone, "cuda", "with_copies_s")}
    return found


def _why_no_gpu(lab: Lab) -> str:
    """What ps_bench says that is missing; "" where it can compute on a GPU."""
    command = [str(lab.bin / "ps_bench"), "gemm", "--device=cuda", "--grid=1:1x1"]
    try:
        run_program(lab, "gpu", command, lab.folder)
    except ExperimentFailed as failed:
        return str(failed).partition(_GPU_IS_MISSING)[2] or str(failed)
    return ""


def text(m: int, k: int, n: int) -> str:
    return f"{m} × {k} by {k} × {n}"


def factor(value: float) -> str:
    """Two digits, or all that are before the point."""
    return f"{value:.2g}" if value < 99.5 else f"{value:,.0f}"


def overtakes(ratio: Times, m: int) -> tuple[int, int] | None:
    """The second matrix from which on, up to the largest, the second is faster for this number of rows.

    It may be slower by SLOWER at most in between, which two measurements of the same may be.
    """
    row = ratio.loc[m]
    slower = ~(row <= 1 + SLOWER)
    behind = row[slower[::-1].cumsum()[::-1] == 0]
    return next(iter(behind.index[behind < 1]), None)


def run(lab: Lab) -> Page:
    no_gpu = _why_no_gpu(lab)
    times = measure(lab, no_gpu)
    cpu, count = times["cpu"], len(cores())
    ratios = {name: other / cpu for name, other in times.items() if name != "cpu"}
    speeds = {name: _gflops(times[name]) for name in ("cpu", "gpu") if name in times}
    figures = [_speed_figure(speeds["cpu"], "cpu", "CPU, one thread")]
    if "threads" in ratios:
        title, who = f"Time with {count} threads, times that with one", f"the product with {count} threads"
        figures.append(_ratio_figure(ratios["threads"], "threads", title, who))
    if not no_gpu:
        figures.append(_speed_figure(speeds["gpu"], "gpu", "GPU"))
        for key, name, how in (("gpu", "gpu-alone", "without copies"), ("copies", "gpu-copies", "with copies")):
            title = f"Time on the GPU, {how}, times that of one CPU thread"
            figures.append(_ratio_figure(ratios[key], name, title, "the GPU"))
    said = f"At {text(*PUBLISHED)} a CPU thread takes {1e6 * _published(cpu):.1f} µs and "
    said += f"a GPU was {NOT_MEASURED}" if no_gpu else f"the GPU {factor(_published(ratios['gpu']))} times as long"
    most = speeds["cpu"].unstack()
    columns = {"GPU, without copies": "gpu", "GPU, with copies": "copies", "more threads": "threads"}
    return Page(
        "Matrix products on CPU and GPU",
        f"{said} (published: from there on the GPU is faster).",
        "products.md.j2",
        [_claim(cpu, times.get("gpu"), no_gpu, copies=False), _claim(cpu, times.get("copies"), no_gpu, copies=True)],
        tables={
            "times": _times(cpu),
            "crossovers": _crossovers(cpu, {name: ratios.get(key) for name, key in columns.items()}),
        },
        figures=figures,
        values={
            "cells": f"{cpu.size} sizes up to {text(cpu.index[-1], *cpu.columns[-1])}",
            "threads": sorted(ratios["threads"].to_numpy().ravel()) if "threads" in ratios else None,
            "no_gpu": no_gpu,
            "here": _published(speeds["cpu"]),
            "most": most.max(),
            "best": text(most.idxmax()[2], *most.idxmax()[:2]),
        },
    )


def _published(times: Times) -> float:
    """For the published size."""
    m, *second = PUBLISHED
    return float(times.loc[m, tuple(second)])


def _gflops(times: Times) -> Times:
    """GFLOP/s: a product has a multiplication and an addition for each of m·k·n."""
    return (1 / times).mul([k * n for k, n in times.columns], axis=1).mul(2e-9 * times.index.to_series(), axis=0)


def _claim(cpu: Times, gpu: Times | None, no_gpu: str, copies: bool) -> Claim:
    what = "product from which on the GPU is faster, " + ("with the copies" if copies else "without copies")
    m, published, cpu_us = PUBLISHED[0], text(*PUBLISHED), 1e6 * _published(cpu)
    if gpu is None:
        why = (
            f"No GPU: {no_gpu}. One thread of this CPU takes {cpu_us:.1f} µs for the published product; a GPU would "
            f"have to begin and end it{' and copy three matrices' if copies else ''} in less, to be faster there."
        )
        return Claim(what, published, NOT_MEASURED, None, why)
    found = overtakes(gpu / cpu, m)
    agrees: bool | None = found is not None and 1 / WITHIN <= found[0] / PUBLISHED[1] <= WITHIN
    crossover = f"from {text(m, *found)} on" if found else f"none up to {text(m, *cpu.columns[-1])}"
    place = f"Its crossover is {'' if agrees else 'not '}within a factor of {WITHIN:g} of the published sizes."
    if found is None:
        place = "It has no crossover here."
    elif found == cpu.columns[0]:
        agrees, place = None, "It is faster with all second matrices here, so that its crossover may be below them."
    why = (
        f"{place} At the published size the GPU takes {factor(_published(gpu / cpu))} times as long as one thread of "
        "this CPU. The published CPU and GPU were others, and only the place from which on the GPU is faster is "
        "compared."
    )
    return Claim(what, published, f"with {m} rows {crossover}", agrees, why)


def _times(cpu: Times) -> Table:
    """A row for each first matrix, a column for each second."""

    def cell(us: float) -> str:
        if math.isnan(us):
            return NOT_MEASURED
        return f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 100 else f"{us:,.0f}"

    table = Table("Microseconds of a product on the CPU, one thread", ["m", *(f"{k} × {n}" for k, n in cpu.columns)])
    table.rows = [[str(m), *(1e6 * row).map(cell)] for m, row in cpu.iterrows()]
    return table


def _crossovers(cpu: Times, columns: Mapping[str, Times | None]) -> Table:
    """By the first matrix's rows; each column is who overtakes whom, with its ratios, or None if not measured."""

    def cell(ratio: Times | None, m: int) -> str:
        if ratio is None:
            return NOT_MEASURED
        found = overtakes(ratio, m)
        if found is None:
            return "none of these"
        return "all of these" if found == cpu.columns[0] else f"{found[0]} × {found[1]}"

    table = Table("The second matrix from which on it is faster, by the first one's rows", ["m", *columns])
    table.rows = [[str(m), *(cell(ratio, m) for ratio in columns.values())] for m in cpu.index]
    return table


def _speed_figure(speeds: Times, name: str, device: str) -> Figure:
    title, caption = f"GFLOP/s of a product, {device}", f"The darker, the faster. {_FRAMED}"
    shades, look = speeds / speeds.to_numpy().max(), {"cmap": "Blues", "vmin": 0.0, "vmax": 1.3}
    return _heat_map(f"speed-{name}", title, caption, shades, speeds, "{:.0f}".format, 0.7, look)


def _ratio_figure(ratio: Times, name: str, title: str, who: str) -> Figure:
    """How many times as long it takes: below 1, `who` is faster."""
    caption = f"Blue, below 1: {who} is faster. Red, above 1: it is slower. {_FRAMED}"
    look = {"cmap": "RdBu_r", "vmin": -1.3, "vmax": 1.3}
    return _heat_map(f"ratio-{name}", title, caption, np.log2(ratio) / _FULL_AT, ratio, factor, 0.75, look)


def _heat_map(
    name: str,
    title: str,
    caption: str,
    shades: Times,
    values: Times,
    text_of: Callable[[float], str],
    dark_from: float,
    look: dict[str, Any],
) -> Figure:
    """Shades go to 1 (or from -1): the colour map's darkest are left out, so that the frame is seen. What is not there
    stays empty.
    """
    rows, seconds = shades.index, shades.columns

    def draw(axes: Any, colours: Colours) -> None:
        edges = (np.arange(len(each) + 1) - 0.5 for each in (seconds, rows))
        axes.grid(False)
        axes.pcolormesh(*edges, shades.to_numpy(), edgecolors=colours["surface"], linewidth=1.0, **look)
        for (y, x), shade in np.ndenumerate(shades.to_numpy()):
            if not math.isnan(shade):
                colour, said = colours["surface" if abs(shade) > dark_from else "ink"], text_of(values.iloc[y, x])
                axes.text(x, y, said, ha="center", va="center", fontsize=7.5, color=colour)
        x, y = seconds.get_loc(PUBLISHED[1:]), rows.get_loc(PUBLISHED[0])
        around = ([x - 0.5, x + 0.5, x + 0.5, x - 0.5, x - 0.5], [y - 0.5, y - 0.5, y + 0.5, y + 0.5, y - 0.5])
        axes.plot(*around, color=colours["wait"], linewidth=1.8)
        axes.set_xticks(range(len(seconds)), [f"{k}×{n}" for k, n in seconds], rotation=30, ha="right")
        axes.set_yticks(range(len(rows)), list(map(str, rows)))
        axes.tick_params(length=0)

    size = {"width_inches": 1.6 + 0.66 * len(seconds), "height_inches": 1.2 + 0.36 * len(rows)}
    return Figure(name, title, caption, "second matrix, k × n", "rows of the first, m", draw, **size)
