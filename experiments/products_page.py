"""Heat maps and tables of matrix products."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from figures import Figure

from .page import NOT_MEASURED, Table, figure
from .products_runs import PUBLISHED, Grid, Measured, Products, Size, flops, overtakes

TIMES = "Microseconds of a product on the CPU, one thread"
CROSSOVERS = "The second matrix from which on it is faster, by the first one's rows"
_X_LABEL, _Y_LABEL = "second matrix, k × n", "rows of the first, m"
_RATIO_SHOWN = 4.0  # Colours are full from so many doublings of the ratio on.
_FRAMED = f"The frame is the published {PUBLISHED[0]} × {PUBLISHED[1]} by {PUBLISHED[1]} × {PUBLISHED[2]}."


def times(products: Products) -> Table:
    """A row for each first matrix, a column for each second."""
    table = Table(TIMES, ["m", *(f"{k} × {n}" for k, n in products.grid.seconds)])
    for m in products.grid.rows:
        cells = [products.one_thread.product_s.get((m, k, n)) for k, n in products.grid.seconds]
        table.rows.append([str(m), *(_microseconds(cell) for cell in cells)])
    return table


def factor(value: float) -> str:
    """Two digits, or all that are before the point."""
    return f"{value:.2g}" if value < 99.5 else f"{value:,.0f}"


def _microseconds(seconds: float | None) -> str:
    if seconds is None:
        return NOT_MEASURED
    value = 1e6 * seconds
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def crossovers(products: Products, columns: Mapping[str, dict[Size, float] | None]) -> Table:
    """By the first matrix's rows; each column is who overtakes whom, with its ratios, or None if not measured."""
    table = Table(CROSSOVERS, ["m", *columns])
    for m in products.grid.rows:
        cells = [NOT_MEASURED if ratio is None else _from(products.grid, ratio, m) for ratio in columns.values()]
        table.rows.append([str(m), *cells])
    return table


def _from(grid: Grid, ratio: dict[Size, float], m: int) -> str:
    found = overtakes(grid, ratio, m)
    if found is None:
        return "none of these"
    return "all of these" if found == grid.seconds[0] else f"{found[0]} × {found[1]}"


def speed_figure(products: Products, measured: Measured, name: str, device: str) -> Figure:
    """GFLOP/s, without copies."""
    values = {size: flops(size) / seconds / 1e9 for size, seconds in measured.product_s.items()}
    most = max(values.values())

    def draw(axes: Any, colours: dict[str, str]) -> None:
        shades = {size: value / most for size, value in values.items()}
        _heat_map(axes, products.grid, shades, {size: f"{value:.0f}" for size, value in values.items()}, colours)

    return figure(
        f"speed-{name}",
        f"GFLOP/s of a product, {device}",
        f"The darker, the faster. {_FRAMED}",
        *(_X_LABEL, _Y_LABEL, draw),
        **_size(products.grid),
    )


def ratio_figure(products: Products, ratio: dict[Size, float], name: str, title: str, who: str) -> Figure:
    """How many times as long it takes: below 1, `who` is faster."""

    def draw(axes: Any, colours: dict[str, str]) -> None:
        shades = {size: math.log2(value) / _RATIO_SHOWN for size, value in ratio.items()}
        shown = {size: factor(value) for size, value in ratio.items()}
        _heat_map(axes, products.grid, shades, shown, colours, diverging=True)

    caption = f"Blue, below 1: {who} is faster. Red, above 1: it is slower. {_FRAMED}"
    return figure(f"ratio-{name}", title, caption, _X_LABEL, _Y_LABEL, draw, **_size(products.grid))


def _size(grid: Grid) -> dict[str, float]:
    return {"width_inches": 1.6 + 0.66 * len(grid.seconds), "height_inches": 1.2 + 0.36 * len(grid.rows)}


def _heat_map(
    axes: Any,
    grid: Grid,
    shades: dict[Size, float],
    shown: dict[Size, str],
    colours: dict[str, str],
    diverging: bool = False,
) -> None:
    """Shades are from 0 or, diverging, from -1, to 1. What is not there stays empty."""
    places = {(m, k, n): (x, y) for y, m in enumerate(grid.rows) for x, (k, n) in enumerate(grid.seconds)}
    values = [[shades.get((m, k, n), math.nan) for k, n in grid.seconds] for m in grid.rows]
    # The darkest shades are left out, so that the frame is seen.
    look = {"cmap": "RdBu_r", "vmin": -1.3, "vmax": 1.3} if diverging else {"cmap": "Blues", "vmin": 0.0, "vmax": 1.3}
    edges_x = [x - 0.5 for x in range(len(grid.seconds) + 1)]
    edges_y = [y - 0.5 for y in range(len(grid.rows) + 1)]
    axes.grid(False)
    axes.pcolormesh(edges_x, edges_y, values, edgecolors=colours["surface"], linewidth=1.0, **look)
    for size, text in shown.items():
        x, y = places[size]
        dark = abs(shades[size]) > (0.75 if diverging else 0.7)
        axes.text(x, y, text, ha="center", va="center", fontsize=7.5, color=colours["surface" if dark else "ink"])
    if PUBLISHED in places:
        x, y = places[PUBLISHED]
        corners = [(x - 0.5, y - 0.5), (x + 0.5, y - 0.5), (x + 0.5, y + 0.5), (x - 0.5, y + 0.5), (x - 0.5, y - 0.5)]
        axes.plot(*zip(*corners, strict=True), color=colours["wait"], linewidth=1.8)
    axes.set_xticks(range(len(grid.seconds)), [f"{k}×{n}" for k, n in grid.seconds], rotation=30, ha="right")
    axes.set_yticks(range(len(grid.rows)), [str(m) for m in grid.rows])
    axes.tick_params(length=0)
