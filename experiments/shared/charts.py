"""Figures: what they show, and their drawing with Matplotlib as SVG and PNG, light and dark."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.backends.backend_svg  # Once, not in each of the processes that draw.
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas

from experiments.shared.processes import in_parallel

_FONT_SIZE = 9
_PNG_DPI = 160
_LEGEND_LINE_INCHES = 0.2
# Light and dark. A figure is drawn in light; a page replaces its colours by variables of these names, so that every
# light colour is there once.
_COLOURS = {
    "surface": ("#fdfdfe", "#14171c"),
    "ink": ("#1d2129", "#e9ecf1"),
    "quiet": ("#667080", "#9aa5b4"),
    "grid": ("#e2e6eb", "#2c323b"),
    "bsp": ("#39424e", "#cfd6e0"),
    "ssp": ("#0a6ebd", "#5db4f5"),
    "asp": ("#d4570a", "#ff8c42"),
    "backup": ("#0b8a5f", "#3ccb97"),
    "local_sgd": ("#7a4fd6", "#b69aff"),
    "easgd": ("#b07d04", "#f2c749"),
    "diloco": ("#0f8f94", "#4fd0d6"),
    "diloco_async": ("#7d6a3a", "#cdb778"),
    "other": ("#b03a86", "#f08ac8"),
    "compute": ("#8fb3d4", "#4d7ba6"),
    "idle": ("#c4d7e8", "#2f4d69"),
    "push": ("#2f9e8f", "#2fb3a2"),
    "wait": ("#e0243a", "#ff4d5e"),
    "pull": ("#e3b341", "#d9a92f"),
}
LIGHT, DARK = ({name: pair[place] for name, pair in _COLOURS.items()} for place in (0, 1))
# Names of colours for lines that are no modes, in the order in which they are to be used.
SERIES = ("ssp", "asp", "backup", "local_sgd", "easgd", "other", "bsp")
DASHED = (0, (5, 2))

Colours = dict[str, str]


@dataclass
class Figure:
    """`draw` is called with axes, or with a list of them where there are panels, and the colours by name."""

    name: str
    title: str
    caption: str
    x_label: str
    y_label: str
    draw: Callable[[Any, Colours], None]
    height_inches: float = 3.6
    legend_columns: int = 3
    panels: int | None = None  # One above the other; None: one, and no list.
    width_inches: float = 4.7  # On a phone this shrinks by a quarter and stays readable.
    section: str = ""  # A page may show it under this heading.


def draw_all(figures: list[Figure], folder: Path) -> dict[str, str]:
    """Writes NAME.svg, NAME-dark.svg, NAME.png and NAME-dark.png of each figure; the SVGs for a page, by name."""
    folder.mkdir(parents=True, exist_ok=True)
    svgs = in_parallel(lambda figure: _draw(figure, folder), figures)
    return {figure.name: svg for figure, svg in zip(figures, svgs, strict=True)}


def svg(figure: Figure) -> str:
    """The figure in light colours, as a file."""
    return _render(figure, LIGHT, ("svg",))[0].decode()


def _draw(figure: Figure, folder: Path) -> str:
    svg, png = _render(figure, LIGHT, ("svg", "png"))
    light = svg.decode()
    (folder / f"{figure.name}.svg").write_text(light, encoding="utf-8")
    (folder / f"{figure.name}-dark.svg").write_text(_recoloured(light, DARK), encoding="utf-8")
    (folder / f"{figure.name}.png").write_bytes(png)
    (folder / f"{figure.name}-dark.png").write_bytes(*_render(figure, DARK, ("png",)))
    return _embedded(light, figure)


def _render(figure: Figure, colours: Colours, kinds: tuple[str, ...]) -> list[bytes]:
    surface, ink, quiet = (colours[name] for name in ("surface", "ink", "quiet"))
    style = {
        **{"font.family": "sans-serif", "font.size": _FONT_SIZE, "svg.fonttype": "none", "svg.hashsalt": figure.name},
        **{"axes.edgecolor": quiet, "xtick.color": quiet, "ytick.color": quiet, "grid.color": colours["grid"]},
        **dict.fromkeys(("axes.labelcolor", "text.color", "xtick.labelcolor", "ytick.labelcolor"), ink),
        **dict.fromkeys(("axes.facecolor", "figure.facecolor", "savefig.facecolor"), surface),
        **{"axes.grid": True, "axes.axisbelow": True, "grid.linewidth": 0.7, "axes.linewidth": 0.8},
        **{"axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": _FONT_SIZE, "legend.frameon": False},
    }
    with mpl.rc_context(style):
        canvas = Canvas(figsize=(figure.width_inches, figure.height_inches), layout="constrained")
        FigureCanvasAgg(canvas)
        _fill(canvas, figure, colours)
        files = []
        for kind in kinds:
            buffer = io.BytesIO()
            canvas.savefig(buffer, format=kind, dpi=_PNG_DPI, metadata={"Date": None} if kind == "svg" else {})
            canvas.set_layout_engine("none")  # All is in its place.
            files.append(buffer.getvalue())
    return files


def _fill(canvas: Canvas, figure: Figure, colours: Colours) -> None:
    canvas.suptitle(figure.title, x=0.01, ha="left", fontsize=_FONT_SIZE + 1, fontweight="bold")
    all_axes = [row[0] for row in canvas.subplots(figure.panels or 1, 1, sharex=True, squeeze=False)]
    for axes in all_axes:
        axes.set_ylabel(figure.y_label)
    all_axes[-1].set_xlabel(figure.x_label)
    figure.draw(all_axes[0] if figure.panels is None else all_axes, colours)
    for line in (line for axes in all_axes for line in axes.lines if not line.get_clip_on()):
        line.set_in_layout(False)  # A cross at an edge: no room is made for it.
    handles, labels = all_axes[-1].get_legend_handles_labels()
    if handles:
        lines = -(-len(handles) // figure.legend_columns)
        share = (0.06 + lines * _LEGEND_LINE_INCHES) / figure.height_inches
        canvas.get_layout_engine().set(rect=(0, share, 1, 1 - share))  # "outside" came with a later Matplotlib.
        canvas.legend(handles, labels, loc="lower center", ncols=figure.legend_columns, handlelength=1.6, borderpad=0.1)


def _recoloured(svg: str, colours: Colours) -> str:
    names = {value: name for name, value in LIGHT.items()}
    return re.sub("#[0-9a-f]{6}", lambda match: colours[names[match[0]]] if match[0] in names else match[0], svg)


def _embedded(svg: str, figure: Figure) -> str:
    """Without what only a file needs, with variables for colours and names that no other figure on the page has."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"\d+\.\d{3,}", lambda match: f"{float(match[0]):.2f}", svg)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    referenced = set(re.findall(r"(?:url\(#|href=\"#)([^\")]+)", svg))
    svg = re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in referenced else "", svg)
    svg = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{figure.name}-", svg)
    svg = re.sub(r' (?:width|height)="[\d.]+pt"', "", svg, count=2)
    svg = _recoloured(svg, {name: f"var(--{name})" for name in LIGHT})
    return svg.replace("<svg", f'<svg role="img" aria-label="{figure.title}"', 1)
