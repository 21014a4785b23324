"""Figures with an accuracy or a loss on one axis: every seed a thin line, the mean a thick one, a lost run a cross."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any

from palette import dash, family
from records import Mark, Run
from spread import interval
from summary import PYTORCH, Comparison, Group, accuracy_percent, reference_name

X = Callable[[Run, Mark], float | None]
Colours = dict[str, str]
_POINTS = 160  # Of a mean curve.
_CROSS_STEP = 0.07  # Between the crosses of an enforced staleness.


def time_s(run: Run, mark: Mark) -> float:
    """Seconds since the first version."""
    return mark.time_s


def samples(run: Run, mark: Mark) -> float:
    """Thousands of samples applied."""
    return mark.samples / 1000


def megabytes(run: Run, mark: Mark) -> float | None:
    """Megabytes pushed by all workers."""
    pushed = run.bytes_pushed(mark.pushes)
    return None if pushed is None else pushed / 1e6


def accuracy(mark: Mark) -> float | None:
    """In percent."""
    return None if mark.accuracy is None else 100 * mark.accuracy


def loss(mark: Mark) -> float | None:
    """Of the test split."""
    return mark.loss


def points(run: Run, x: X, y: Callable[[Mark], float | None]) -> list[tuple[float, float]]:
    """A run's curve."""
    found = [(x(run, mark), y(mark)) for mark in run.marks]
    return [(a, b) for a, b in found if a is not None and b is not None]


def mean_curve(curves: list[list[tuple[float, float]]], log_x: bool = False) -> list[tuple[float, float]]:
    """The mean of at least two curves, where all of them have values; straight lines between a curve's points."""
    if len(curves) < 2 or any(len(curve) < 2 for curve in curves):
        return []
    low, high = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
    if low >= high or (log_x and low <= 0):
        return []
    steps = [place / (_POINTS - 1) for place in range(_POINTS)]
    grid = [low * (high / low) ** step if log_x else low + (high - low) * step for step in steps]
    return [(x, sum(_at(curve, x) for curve in curves) / len(curves)) for x in grid]


def _at(curve: list[tuple[float, float]], x: float) -> float:
    right = min(max(bisect_right(curve, (x, float("inf"))), 1), len(curve) - 1)
    (x0, y0), (x1, y1) = curve[right - 1], curve[right]
    return y1 if x1 == x0 else y0 + (y1 - y0) * min(max((x - x0) / (x1 - x0), 0), 1)


def draw_group(axes: Any, group: Group, x: X, y: Callable[[Mark], float | None], look: dict[str, Any]) -> None:
    """All seeds of a group and their mean; `look` has colour, dashes and label."""
    curves = [points(run, x, y) for run in group.done]
    mean = mean_curve([curve for curve in curves if curve], axes.get_xscale() == "log")
    single = not mean
    for curve in curves:
        axes.plot(
            *zip(*curve, strict=True) if curve else ([], []),
            color=look["color"],
            linestyle=look["linestyle"],
            linewidth=1.8 if single else 0.6,
            alpha=0.9 if single else 0.55,
        )
    if mean:
        axes.plot(*zip(*mean, strict=True), color=look["color"], linestyle=look["linestyle"], linewidth=2.2)
    axes.plot([], [], **look, linewidth=2.2)
    for run in group.lost:
        _cross(axes, points(run, x, y), look["color"])


def _cross(axes: Any, curve: list[tuple[float, float]], color: str) -> None:
    """A run that was lost: its line as far as it came, and a cross there; without an evaluation, one at the corner."""
    if not curve:
        axes.plot([0.03], [0.05], "X", color=color, markersize=9, transform=axes.transAxes, clip_on=False, zorder=5)
        return
    axes.plot(*zip(*curve, strict=True), color=color, linewidth=0.8, alpha=0.7)
    axes.plot(*curve[-1], "X", color=color, markersize=9, zorder=5, gid="cross")


def curves_of(comparison: Comparison, condition: str, x: X, y: Callable[[Mark], float | None]) -> Callable[..., None]:
    """Draws all modes of a condition."""

    def draw(axes: Any, colours: Colours) -> None:
        if x is megabytes:
            axes.set_xscale("log")
        for group in comparison.under(condition):
            color = colours[family(group.mode)]
            look = {"color": color, "linestyle": dash(group.mode, comparison.modes), "label": label_of(group)}
            draw_group(axes, group, x, y, look)
        _limit(axes, comparison.under(condition), x, y)

    return draw


def label_of(group: Group) -> str:
    """The mode, and how many of its runs the mean is without."""
    return group.mode if not group.lost else f"{group.mode} ({len(group.done)} of {len(group.runs)} runs)"


def _limit(axes: Any, groups: list[Group], x: X, y: Callable[[Mark], float | None]) -> None:
    """Shows the y axis from where curves end to a little of their steep begin; crosses are moved into what is shown."""
    values = sorted(value for group in groups for run in group.runs for _, value in points(run, x, y))
    ends = [curve[-1][1] for group in groups for run in group.done if (curve := points(run, x, y))]
    if not values:
        return
    falling = axes.get_ylabel().startswith("test loss")
    cut = len(values) // 8
    low, high = (values[0], values[-1 - cut]) if falling else (values[cut], values[-1])
    low, high = min([low, *ends]), max([high, *ends])
    margin = max(0.06 * (high - low), 1e-3)
    axes.set_ylim(low - margin, high + margin)
    for line in axes.lines:
        if line.get_gid() == "cross":
            line.set_ydata([min(max(line.get_ydata()[0], low), high)])
            line.set_clip_on(False)


def enforced_staleness(comparison: Comparison) -> Callable[..., None]:
    """Accuracy over the enforced staleness, each with its interval."""

    def draw(axes: Any, colours: Colours) -> None:
        places, means = [], []
        for place, group in enumerate(comparison.staleness):
            values = group.values(accuracy_percent)
            axes.plot([place] * len(values), values, "o", color=colours["asp"], markersize=3.5, alpha=0.55)
            found = interval(values)
            if found is not None:
                places.append(place)
                means.append(found.mean)
                if found.half is not None:
                    axes.errorbar(place, found.mean, yerr=found.half, color=colours["asp"], capsize=4, linewidth=1.4)
        axes.plot(places, means, "-o", color=colours["asp"], linewidth=2.2, markersize=6)
        low, high = _around([value for group in comparison.staleness for value in group.values(accuracy_percent)])
        for place, group in enumerate(comparison.staleness):
            beside = [place + _CROSS_STEP * number for number in range(len(group.lost))]
            axes.plot(beside, [low] * len(beside), "X", color=colours["wait"], markersize=7, clip_on=False, zorder=5)
        axes.set_ylim(low, high)
        axes.set_xticks(range(len(comparison.staleness)))
        axes.set_xticklabels([str(group.runs[0].staleness) for group in comparison.staleness])

    return draw


def _around(values: list[float]) -> tuple[float, float]:
    """A view of all accuracies; intervals of few seeds may run out of it."""
    if not values:
        return 0.0, 100.0
    margin = max(1.0, 0.4 * (max(values) - min(values)))
    return max(0.0, min(values) - margin), min(100.0, max(values) + margin)


def references(comparison: Comparison, x: X, y: Callable[[Mark], float | None]) -> Callable[..., None]:
    """The reference curves, and bsp among even workers, which must lie on that of the batch N·B."""
    names = ["ssp", "asp", "backup", "local_sgd", "easgd", "other"]

    def draw(axes: Any, colours: Colours) -> None:
        curves = {reference_name(group.runs[0]): group for group in comparison.references}
        pytorch = curves.pop(PYTORCH, None)
        if (bsp := comparison.group("bsp", "even")) is not None:
            curves[f"bsp, {bsp.runs[0].workers} workers"] = bsp
        for (label, group), name in zip(curves.items(), names, strict=False):
            colour = "bsp" if group is bsp else name
            draw_group(axes, group, x, y, {"color": colours[colour], "linestyle": "-", "label": label})
        if pytorch is not None:  # Last, so that what is under it shows between its dashes.
            curves[PYTORCH] = pytorch
            look = {"color": colours["other"], "linestyle": (0, (3, 2)), "label": PYTORCH}
            draw_group(axes, pytorch, x, y, look)
        _limit(axes, list(curves.values()), x, y)

    return draw
