"""Which figures a report has, what each shows, and how it is drawn."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from experiments.compare.groups import PYTORCH, Comparison, Group, did_not_end, reference_name
from experiments.compare.modes import family
from experiments.compare.runs import PARTS, Run
from experiments.shared.charts import LIGHT, SERIES, Colours, Figure
from experiments.shared.intervals import interval, mean

Draw = Callable[[Any, Colours], None]

CONDITION_TITLES = {"even": "even workers", "straggler": "a constant straggler", "transient": "transient delays"}
STALENESS, REFERENCES = "Price of staleness", "References"  # Sections of their own.
# Section → what its figures show, for captions.
SECTIONS = {
    "Who waits for whom": "The same stretch of time for each mode, in the middle of the run with the first seed; a row "
    "is a worker. Red is waiting for others.",
    "Throughput": "Samples applied per second, and what the measured step times predict when only the mode's rule "
    "makes workers wait.",
    "Accuracy over time": "Test accuracy at the chief's clock, from the first version on.",
    "Accuracy over samples": "Test accuracy over the samples that the servers had applied.",
    "Loss over time": "Test loss at the chief's clock, from the first version on.",
    "Loss over samples": "Test loss over the samples that the servers had applied.",
    "Share of time": "What all workers did with their time, without each worker's first batch.",
    "Staleness": "By how many versions the weights of a push were behind when the chief applied it.",
    "Clock gap": "By how many steps a worker was ahead of the slowest when it began a step.",
    "Accuracy over bytes": "Test accuracy over what all workers had pushed; about as much was pulled.",
}
_NOT_COMPARABLE = " (CPU-bound, not comparable)"
_PART_NAMES = {
    "compute": "computing",
    "idle": "computing (idle in its place)",
    "push": "pushing",
    "wait": "waiting",
    "pull": "pulling",
}
_DASHES = ("-", (0, (5, 2)), (0, (2, 1.5)), (0, (6, 2, 1.5, 2)))
_POINTS = 160  # A mean curve has so many.
_CROSS_STEP = 0.07  # Between the crosses of an enforced staleness.
_TIME_LINE_STEPS = 30  # The fastest worker of all modes shows so many.


def figures_of(comparison: Comparison) -> list[Figure]:
    """Those that the runs have data for, by section and condition."""
    found = [figure for condition in comparison.conditions for figure in _of_condition(comparison, condition)]
    found += _of_staleness(comparison) + _of_references(comparison)
    order = [*SECTIONS, STALENESS, REFERENCES]
    return sorted(found, key=lambda figure: order.index(figure.section))


def _of_condition(comparison: Comparison, condition: str) -> list[Figure]:
    groups = comparison.under(condition)
    runs = [run for group in groups for run in group.runs]
    title = CONDITION_TITLES.get(condition, condition)
    bound = _NOT_COMPARABLE if any(group.cpu_bound for group in groups) else ""
    lost = _lost_note(groups)
    tall = 0.9 + 0.42 * len(groups)
    found: list[Figure] = []

    def add(section: str, name: str, x_label: str, y_label: str, draw: Draw, height: float = 3.6, **more: Any) -> None:
        caption, of = f"{SECTIONS[section]}{lost}", f"{section}: {title}"
        more |= {"height_inches": height, "section": section}
        found.append(Figure(f"{name}-{condition}", of, caption, x_label, y_label, draw, **more))

    for section, name, x, x_label, y, y_label in _CURVES:
        if any(len(_points(run, x, y)) for run in runs):
            x_label += bound if x == "time_s" else ""
            add(section, name, x_label, y_label, _draw_curves(groups, comparison.modes, x, y))
    if any(run.samples_per_s for run in runs):
        label = f"samples applied per second{bound}"
        add("Throughput", "throughput", label, "", _draw_throughput(groups), tall + 0.3, legend_columns=2)
    if any(run.shares for run in runs if run.done):
        add("Share of time", "time_shares", f"% of the workers' time{bound}", "", _draw_shares(groups), tall + 0.5)
    lines = [group for group in groups if group.done and _has_time_line(group.done[0])]
    if lines:
        height = 1 + len(lines) * (0.36 + 0.15 * max(group.done[0].workers for group in lines))
        draw = _draw_time_lines(lines)
        add("Who waits for whom", "time_line", f"milliseconds{bound}", "rank", draw, height, panels=len(lines))
    for section, name, values, unit, of in (
        ("Staleness", "staleness", lambda run: run.push_staleness, "versions", "pushes"),
        ("Clock gap", "clock_gap", lambda run: run.clock_gaps, "steps", "steps"),
    ):
        if any(map(values, runs)):
            label = f"{section.lower()}, {unit}; share of the {of}"
            add(section, name, label, "", _draw_histograms(groups, values), 0.8 + 0.55 * len(groups))
    return found


def _lost_note(groups: list[Group]) -> str:
    lost = [f"{group.mode} seed {run.seed} ({run.status})" for group in groups for run in group.lost]
    if not lost:
        return ""
    return f" A cross is a run that did not end as it should, which no mean contains: {', '.join(lost)}."


def _of_staleness(comparison: Comparison) -> list[Figure]:
    runs = [run for group in comparison.staleness for run in group.runs]
    if not any(run.final_accuracy is not None for run in runs):
        return []
    lost = sum(not run.done for run in runs)
    caption = (
        "One worker whose every gradient is applied exactly so many versions after the weights that it was computed "
        "on: final test accuracy, a small dot for each seed, the mean with its 95 % interval."
        + (f" Red crosses: {did_not_end(lost)}." if lost else "")
    )
    title, labels = "Accuracy against enforced staleness", ("enforced staleness, versions", "final test accuracy, %")
    draw = _draw_staleness(comparison.staleness)
    return [Figure("enforced_staleness", title, caption, *labels, draw, section=STALENESS)]


def _of_references(comparison: Comparison) -> list[Figure]:
    if not any(len(run.marks) for group in comparison.references for run in group.runs):
        return []
    caption = "One worker with batch B (1xB) and with batch N·B (NxB); bsp with N workers must lie on the latter."
    if comparison.reference(PYTORCH) is not None:
        caption += " So must plain PyTorch (dashed), which trains with batch N·B from equal weights in equal order."
    found = []
    for section, _, x, x_label, y, y_label in _CURVES:
        if x == "samples":
            name = section.partition(" ")[0].lower()
            title, draw = f"Reference curves: {name} over samples", _draw_references(comparison, y)
            found.append(Figure(f"references_{name}", title, caption, x_label, y_label, draw, section=REFERENCES))
    return found


# ---- Curves: every seed a thin line, the mean a thick one, a lost run a cross


_SECONDS = ("time_s", "seconds since the first version")
_THOUSANDS = ("samples", "samples applied, thousands")
_MEGABYTES = ("pushes", "pushed by all workers, MB")
_ACCURACY = ("accuracy", "test accuracy, %")
_LOSS = ("loss", "test loss")
_CURVES = (
    ("Accuracy over time", "accuracy_over_time", *_SECONDS, *_ACCURACY),
    ("Accuracy over samples", "accuracy_over_samples", *_THOUSANDS, *_ACCURACY),
    ("Loss over time", "loss_over_time", *_SECONDS, *_LOSS),
    ("Loss over samples", "loss_over_samples", *_THOUSANDS, *_LOSS),
    ("Accuracy over bytes", "accuracy_over_bytes", *_MEGABYTES, *_ACCURACY),
)


def _points(run: Run, x: str, y: str) -> np.ndarray:
    """The evaluations that have both columns, in the units of the axes; none over bytes where these are not known."""
    units = {"samples": 1 / 1000, "accuracy": 100, "pushes": (run.bytes_pushed(1) or math.nan) / 1e6}
    return (run.marks[[x, y]] * [units.get(x, 1), units.get(y, 1)]).dropna().to_numpy()


def _mean_curve(curves: list[np.ndarray], log_x: bool = False) -> np.ndarray:
    """The mean of at least two curves, where all of them have values; straight lines between a curve's points."""
    nothing = np.empty((0, 2))
    if len(curves) < 2 or any(len(curve) < 2 for curve in curves):
        return nothing
    low, high = max(curve[0, 0] for curve in curves), min(curve[-1, 0] for curve in curves)
    if low >= high or (log_x and low <= 0):
        return nothing
    grid = (np.geomspace if log_x else np.linspace)(low, high, _POINTS)
    return np.column_stack([grid, np.mean([np.interp(grid, *curve.T) for curve in curves], axis=0)])


def _draw_group(axes: Any, group: Group, x: str, y: str, color: str, dash: Any, label: str) -> None:
    curves = [_points(run, x, y) for run in group.done]
    mean = _mean_curve([curve for curve in curves if len(curve)], axes.get_xscale() == "log")
    look = {"color": color, "linestyle": dash}
    for curve in curves:
        axes.plot(*curve.T, **look, linewidth=0.6 if len(mean) else 1.8, alpha=0.55 if len(mean) else 0.9)
    axes.plot(*mean.T, **look, linewidth=2.2, label=label)
    cross = {"color": color, "markersize": 9, "zorder": 5}
    for curve in (_points(run, x, y) for run in group.lost):
        # Its line as far as it came, and a cross there; without an evaluation, one at the corner.
        if len(curve):
            axes.plot(*curve.T, color=color, linewidth=0.8, alpha=0.7)
            axes.plot(*curve[-1], "X", **cross, gid="cross")
        else:
            axes.plot([0.03], [0.05], "X", **cross, transform=axes.transAxes, clip_on=False)


def _draw_curves(groups: list[Group], modes: list[str], x: str, y: str) -> Draw:
    """All modes of a condition. Modes of one kind share a colour; dashes tell ssp:2 from ssp:8."""

    def draw(axes: Any, colours: Colours) -> None:
        if x == "pushes":
            axes.set_xscale("log")
        for group in groups:
            same = [mode for mode in modes if family(mode) == family(group.mode)]
            dash = _DASHES[same.index(group.mode) % len(_DASHES)]
            # How many of its runs the mean is without is part of the label.
            label = group.mode + (f" ({len(group.done)} of {len(group.runs)} runs)" if group.lost else "")
            _draw_group(axes, group, x, y, colours[_colour(group.mode)], dash, label)
        _limit(axes, groups, x, y)

    return draw


def _colour(mode: str) -> str:
    return family(mode) if family(mode) in LIGHT else "other"


def _limit(axes: Any, groups: list[Group], x: str, y: str) -> None:
    """Shows the y axis from where curves end to a little of their steep begin; crosses are moved into what is shown."""
    values = sorted(value for group in groups for run in group.runs for value in _points(run, x, y)[:, 1])
    ends = [value for group in groups for run in group.done for value in _points(run, x, y)[-1:, 1]]
    if not values:
        return
    cut = len(values) // 8
    low, high = (values[0], values[-1 - cut]) if y == "loss" else (values[cut], values[-1])
    low, high = min([low, *ends]), max([high, *ends])
    margin = max(0.06 * (high - low), 1e-3)
    axes.set_ylim(low - margin, high + margin)
    for line in axes.lines:
        if line.get_gid() == "cross":
            line.set_ydata([min(max(line.get_ydata()[0], low), high)])
            line.set_clip_on(False)


def _draw_references(comparison: Comparison, y: str) -> Draw:
    """The reference curves, and bsp among even workers, which must lie on that of the batch N·B."""

    def draw(axes: Any, colours: Colours) -> None:
        curves = {reference_name(group.runs[0]): group for group in comparison.references}
        pytorch = curves.pop(PYTORCH, None)
        if (bsp := comparison.group("bsp", "even")) is not None:
            curves[f"bsp, {bsp.runs[0].workers} workers"] = bsp
        for (label, group), name in zip(curves.items(), SERIES, strict=False):
            _draw_group(axes, group, "samples", y, colours["bsp" if group is bsp else name], "-", label)
        if pytorch is not None:  # Last, so that what is under it shows between its dashes.
            curves[PYTORCH] = pytorch
            _draw_group(axes, pytorch, "samples", y, colours["other"], (0, (3, 2)), PYTORCH)
        _limit(axes, list(curves.values()), "samples", y)

    return draw


def _draw_staleness(groups: list[Group]) -> Draw:
    def draw(axes: Any, colours: Colours) -> None:
        by_group = [group.values("accuracy_percent") for group in groups]
        means = []
        for place, values in enumerate(by_group):
            axes.plot([place] * len(values), values, "o", color=colours["asp"], markersize=3.5, alpha=0.55)
            if (found := interval(values)) is not None:
                means.append((place, found.mean))
                if found.half is not None:
                    axes.errorbar(place, found.mean, yerr=found.half, color=colours["asp"], capsize=4, linewidth=1.4)
        axes.plot(*np.reshape(means, (-1, 2)).T, "-o", color=colours["asp"], linewidth=2.2, markersize=6)
        # A view of all accuracies; intervals of few seeds may run out of it.
        values = [value for own in by_group for value in own] or [0.0, 100.0]
        margin = max(1.0, 0.4 * (max(values) - min(values)))
        low, high = max(0.0, min(values) - margin), min(100.0, max(values) + margin)
        for place, group in enumerate(groups):
            beside = [place + _CROSS_STEP * number for number in range(len(group.lost))]
            axes.plot(beside, [low] * len(beside), "X", color=colours["wait"], markersize=7, clip_on=False, zorder=5)
        axes.set_ylim(low, high)
        axes.set_xticks(range(len(groups)), [str(group.runs[0].staleness) for group in groups])

    return draw


# ---- A row for each mode: throughput, shares of time, histograms; and the time line of the workers


def _rows(axes: Any, names: list[str], height: float = 0.5) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -height)
    axes.grid(False, axis="y")


def _draw_throughput(groups: list[Group]) -> Draw:
    def draw(axes: Any, colours: Colours) -> None:
        for row, group in enumerate(groups):
            color = colours[_colour(group.mode)]
            values = group.values("samples_per_s")
            axes.plot(values, [row] * len(values), "o", color=color, markersize=6, alpha=0.75)
            lost = [run.samples_per_s or 0.0 for run in group.lost]
            axes.plot(lost, [row] * len(lost), "X", color=color, markersize=9, clip_on=False)
            if (predicted := group.mean_predicted) is not None:
                axes.plot([predicted] * 2, [row - 0.32, row + 0.32], color=colours["ink"], linewidth=2)
        axes.plot([], [], "o", color=colours["quiet"], label="measured, one dot a seed")
        line = {"markersize": 12, "markeredgewidth": 2, "label": "predicted from step times"}
        axes.plot([], [], "|", color=colours["ink"], **line)
        _rows(axes, [group.mode for group in groups])
        axes.set_xlim(0, axes.get_xlim()[1] * 1.05)
        axes.locator_params(axis="x", nbins=6)

    return draw


def _draw_shares(groups: list[Group]) -> Draw:
    def draw(axes: Any, colours: Colours) -> None:
        left = np.zeros(len(groups))
        for part in ("wait", "push", "pull", "compute", "idle"):
            found = [mean([run.shares[part] for run in group.done if run.shares]) for group in groups]
            widths = np.array([100 * (share or 0.0) for share in found])
            axes.barh(range(len(groups)), widths, left=left, height=0.66, color=colours[part], label=_PART_NAMES[part])
            left += widths
            for row, share in enumerate(found):
                if part == "wait" and share is not None:
                    look = {"va": "center", "color": colours["wait"], "fontweight": "bold"}
                    axes.text(102, row, f"{100 * share:.0f} %", **look)
        _rows(axes, [group.mode for group in groups])
        axes.set_xlim(0, 100)

    return draw


def _doubling_bins(values: list[int]) -> dict[str, float]:
    """Shares of the values in the bins 0, 1, 2, 3 to 4, 5 to 8, 9 to 16, …"""
    bins = Counter(0 if value <= 0 else (value - 1).bit_length() + 1 for value in values)
    labels = ["0", "1", "2"]
    labels += [f"{2 ** (place - 2) + 1}\u2013{2 ** (place - 1)}" for place in range(3, max(bins, default=0) + 1)]
    return {label: bins[place] / max(len(values), 1) for place, label in enumerate(labels)}


def _draw_histograms(groups: list[Group], values: Callable[[Run], list[int]]) -> Draw:
    def draw(axes: Any, colours: Colours) -> None:
        labels: list[str] = []
        for row, group in enumerate(groups):
            shares = _doubling_bins(group.pooled(values))
            labels = max(labels, list(shares), key=len)
            heights = 0.82 * np.array(list(shares.values()))
            bottoms = row + 0.4 - heights
            axes.bar(range(len(heights)), heights, bottom=bottoms, width=0.86, color=colours[_colour(group.mode)])
            axes.axhline(row + 0.4, color=colours["grid"], linewidth=0.8)
            for place, (share, bottom) in enumerate(zip(shares.values(), bottoms, strict=True)):
                text = f"{100 * share:.0f} %"
                if share > 0.75:  # Above it is no room: beside it, where all others are low.
                    axes.text(place + 0.5, bottom, text, ha="left", va="top", fontsize=7)
                elif share >= 0.005:
                    axes.text(place, bottom - 0.03, text, ha="center", va="bottom", fontsize=7)
        _rows(axes, [group.mode for group in groups], 0.6)
        axes.grid(False)
        many = len(labels) > 8
        axes.set_xticks(range(len(labels)), labels, fontsize=6.5 if many else 9, rotation=40 if many else 0)

    return draw


def _has_time_line(run: Run) -> bool:
    return run.time_line is not None and not run.time_line.empty


def _draw_time_lines(groups: list[Group]) -> Draw:
    """The same seconds of each mode: a bar for each worker, red where it waits for others."""

    def draw(all_axes: list[Any], colours: Colours) -> None:
        lines = [group.done[0].time_line for group in groups]
        length_s = _time_line_length_s(lines)
        for axes, group, line in zip(all_axes, groups, lines, strict=True):
            begin_s = _begin_s(line)
            for row, (_, own) in enumerate(line.groupby("rank")):
                for part, spans in part_spans(own, begin_s, length_s).items():
                    spans_ms = [(1000 * at, 1000 * width) for at, width in spans]
                    axes.broken_barh(spans_ms, (row - 0.4, 0.8), color=colours[part])
            _rows(axes, [str(rank) for rank in sorted(set(line["rank"]))])
            axes.set_xlim(0, 1000 * length_s)
            axes.set_title(group.mode, loc="left", color=colours[_colour(group.mode)], fontweight="bold", pad=3)
        for part in PARTS:
            all_axes[-1].barh([0], [0], color=colours[part], label=_PART_NAMES[part])

    return draw


def _begin_s(line: pd.DataFrame) -> float:
    """The earliest time at which every worker is in the stretch."""
    return line.groupby("rank")["begin_s"].min().max()


def _time_line_length_s(lines: list[pd.DataFrame]) -> float:
    """As long as some dozen batches of the fastest worker of all runs, but no longer than what is known of each."""
    known_s = min(line["end_s"].max() - _begin_s(line) for line in lines)
    typical_s = [
        (own.max() - own.min()) / (len(own) - 1)
        for line in lines
        for _, own in line.groupby("rank")["end_s"]
        if len(own) > 1
    ]
    return min(known_s, _TIME_LINE_STEPS * min(typical_s, default=known_s))


def part_spans(batches: pd.DataFrame, begin_s: float, length_s: float) -> dict[str, list[tuple[float, float]]]:
    """By part, where it begins after `begin_s` and how long it lasts; a batch's parts lie back to back at its end."""
    spans: dict[str, list[tuple[float, float]]] = {part: [] for part in PARTS}
    before_s = float("-inf")
    for batch in batches.to_dict("records"):
        at_s = batch["begin_s"]
        for part in PARTS:
            low, high = max(at_s, before_s, begin_s) - begin_s, min(at_s + batch[part] - begin_s, length_s)
            if high > max(low, 0):
                spans[part].append((low, high - low))
            at_s += batch[part]
        before_s = batch["end_s"]
    return spans
