"""Draws the figures with matplotlib, which only this file imports: SVG and PNG, light and dark."""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures import Figure
from palette import DARK, LIGHT
from parallel import in_parallel

_FONT_SIZE = 9
_PNG_DPI = 160
_LEGEND_LINE_INCHES = 0.2
_WHY_CHARACTERS = 200


@dataclass
class Drawn:
    """A figure as the page embeds it: its colours are variables, its size is the page's."""

    figure: Figure
    svg: str


def why_none() -> str:
    """Why nothing can be drawn; empty if it can."""
    try:
        # What a broken numpy says at length comes before its exception.
        with contextlib.redirect_stderr(io.StringIO()):
            import matplotlib.backends.backend_agg
            import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError as error:
        return f"{error.name} is missing"
    except Exception as error:  # An installation can be broken in any way.
        said = " ".join(f"{type(error).__name__}: {error}".split())
        return f"matplotlib cannot be imported ({said[:_WHY_CHARACTERS]})"
    return ""


def available() -> bool:
    """Whether figures can be drawn."""
    return not why_none()


def draw_all(figures: list[Figure], folder: Path) -> list[Drawn]:
    """Writes NAME.svg, NAME-dark.svg, NAME.png and NAME-dark.png of each figure. Needs matplotlib."""
    folder.mkdir(parents=True, exist_ok=True)
    import matplotlib.backends.backend_svg  # noqa: F401  # Once, not in each of the processes.

    svgs = in_parallel(lambda figure: _draw(figure, folder), figures)
    return [Drawn(figure, svg) for figure, svg in zip(figures, svgs, strict=True)]


def svg(figure: Figure) -> str:
    """The figure in light colours, as a file. Needs matplotlib."""
    return _render(figure, LIGHT, ("svg",))[0].decode()


def _draw(figure: Figure, folder: Path) -> str:
    """The SVG for the page."""
    svg, png = _render(figure, LIGHT, ("svg", "png"))
    light = svg.decode()
    (folder / f"{figure.name}.svg").write_text(light, encoding="utf-8")
    (folder / f"{figure.name}-dark.svg").write_text(_recoloured(light, DARK), encoding="utf-8")
    (folder / f"{figure.name}.png").write_bytes(png)
    (folder / f"{figure.name}-dark.png").write_bytes(*_render(figure, DARK, ("png",)))
    return _embedded(light, figure)


def _render(figure: Figure, colours: dict[str, str], kinds: tuple[str, ...]) -> list[bytes]:
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    style = {
        **{"font.family": "sans-serif", "font.size": _FONT_SIZE, "svg.fonttype": "none", "svg.hashsalt": figure.name},
        **{"axes.edgecolor": colours["quiet"], "axes.labelcolor": colours["ink"], "text.color": colours["ink"]},
        **{"xtick.color": colours["quiet"], "ytick.color": colours["quiet"], "axes.facecolor": colours["surface"]},
        **{"xtick.labelcolor": colours["ink"], "ytick.labelcolor": colours["ink"], "grid.color": colours["grid"]},
        **{"axes.grid": True, "axes.axisbelow": True, "grid.linewidth": 0.7, "axes.linewidth": 0.8},
        **{"axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": _FONT_SIZE, "legend.frameon": False},
        **{"axes.unicode_minus": True, "figure.facecolor": colours["surface"], "savefig.facecolor": colours["surface"]},
    }
    with mpl.rc_context(style):
        canvas = Canvas(figsize=(figure.width_inches, figure.height_inches), layout="constrained")
        FigureCanvasAgg(canvas)
        _fill(canvas, figure, colours)
        files = []
        for kind in kinds:
            buffer = io.BytesIO()
            metadata = {"Date": None} if kind == "svg" else {}
            canvas.savefig(buffer, format=kind, dpi=_PNG_DPI, metadata=metadata)
            canvas.set_layout_engine("none")  # All is in its place.
            files.append(buffer.getvalue())
    return files


def _fill(canvas: Any, figure: Figure, colours: dict[str, str]) -> None:
    canvas.suptitle(figure.title, x=0.01, ha="left", fontsize=_FONT_SIZE + 1, fontweight="bold")
    grid = canvas.subplots(figure.panels, 1, sharex=True, squeeze=False)
    all_axes = [row[0] for row in grid]
    for axes in all_axes:
        axes.set_ylabel(figure.y_label)
    all_axes[-1].set_xlabel(figure.x_label)
    figure.draw(all_axes if figure.many_panels else all_axes[0], colours)
    for line in (line for axes in all_axes for line in axes.lines if not line.get_clip_on()):
        line.set_in_layout(False)  # A cross at an edge: no room is made for it.
    handles, labels = all_axes[-1].get_legend_handles_labels()
    if handles:
        lines = -(-len(handles) // figure.legend_columns)
        share = (0.06 + lines * _LEGEND_LINE_INCHES) / figure.height_inches
        canvas.get_layout_engine().set(rect=(0, share, 1, 1 - share))  # "outside" came with a later matplotlib.
        canvas.legend(handles, labels, loc="lower center", ncols=figure.legend_columns, handlelength=1.6, borderpad=0.1)


def _recoloured(svg: str, colours: dict[str, str]) -> str:
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
