"""Which figures a report has, what each shows, and how it is drawn. Nothing here needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import draw_curves as curves
import draw_rows as rows
from summary import PYTORCH, Comparison, did_not_end

CONDITION_TITLES = {
    "even": "even workers",
    "straggler": "a constant straggler",
    "transient": "transient delays",
}
_WIDTH_INCHES = 4.7  # On a phone this shrinks by a quarter and stays readable.


@dataclass
class Figure:
    """A figure; `draw` is called with axes (a list of them where there are several panels) and colours."""

    section: str
    name: str
    title: str
    caption: str
    x_label: str
    y_label: str
    draw: Callable[[Any, dict[str, str]], None]
    height_inches: float = 3.6
    legend_columns: int = 3
    panels: int = 1
    many_panels: bool = False
    width_inches: float = _WIDTH_INCHES


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
_CURVES = (
    ("Accuracy over time", "accuracy_over_time", curves.time_s, curves.accuracy),
    ("Accuracy over samples", "accuracy_over_samples", curves.samples, curves.accuracy),
    ("Loss over time", "loss_over_time", curves.time_s, curves.loss),
    ("Loss over samples", "loss_over_samples", curves.samples, curves.loss),
    ("Accuracy over bytes", "accuracy_over_bytes", curves.megabytes, curves.accuracy),
)
_X_LABELS = {
    curves.time_s: "seconds since the first version",
    curves.samples: "samples applied, thousands",
    curves.megabytes: "pushed by all workers, MB",
}
_Y_LABELS = {curves.accuracy: "test accuracy, %", curves.loss: "test loss"}
_NOT_COMPARABLE = " (CPU-bound, not comparable)"


def figures_of(comparison: Comparison) -> list[Figure]:
    """Those that the runs have data for, by section and condition."""
    found = []
    for condition in comparison.conditions:
        found += _of_condition(comparison, condition)
    found += _of_staleness(comparison) + _of_references(comparison)
    order = [*SECTIONS, "Price of staleness", "References"]
    return sorted(found, key=lambda figure: order.index(figure.section))


def _of_condition(comparison: Comparison, condition: str) -> list[Figure]:
    groups = comparison.under(condition)
    title = CONDITION_TITLES.get(condition, condition)
    bound = _NOT_COMPARABLE if any(group.cpu_bound for group in groups) else ""
    lost = _lost_note(comparison, condition)
    tall = 0.9 + 0.42 * len(groups)

    def figure(section: str, name: str, x_label: str, y_label: str, draw: Any, **more: Any) -> Figure:
        caption = f"{SECTIONS[section]}{lost}"
        return Figure(section, f"{name}-{condition}", f"{section}: {title}", caption, x_label, y_label, draw, **more)

    found = []
    for section, name, x, y in _CURVES:
        if not any(curves.points(run, x, y) for group in groups for run in group.runs):
            continue
        x_label = _X_LABELS[x] + (bound if x is curves.time_s else "")
        found.append(figure(section, name, x_label, _Y_LABELS[y], curves.curves_of(comparison, condition, x, y)))
    if any(run.samples_per_s for group in groups for run in group.runs):
        draw = rows.throughput(comparison, condition)
        options = {"height_inches": tall + 0.3, "legend_columns": 2}
        found.append(figure("Throughput", "throughput", f"samples applied per second{bound}", "", draw, **options))
    if any(run.shares for group in groups for run in group.done):
        draw = rows.time_shares(comparison, condition)
        options = {"height_inches": tall + 0.5, "legend_columns": 3}
        found.append(figure("Share of time", "time_shares", f"% of the workers' time{bound}", "", draw, **options))
    if lines := rows.time_line_groups(comparison, condition):
        workers = max(group.done[0].workers for group in lines)
        options = {"height_inches": 1 + len(lines) * (0.36 + 0.15 * workers), "panels": len(lines), "many_panels": True}
        draw = rows.time_line(comparison, condition)
        found.append(figure("Who waits for whom", "time_line", f"milliseconds{bound}", "rank", draw, **options))
    for section, name, values, unit in (
        ("Staleness", "staleness", lambda run: run.push_staleness, "versions"),
        ("Clock gap", "clock_gap", lambda run: run.clock_gaps, "steps"),
    ):
        if any(group.pooled(values) for group in groups):
            draw = rows.histograms(comparison, condition, values)
            label = f"{section.lower()}, {unit}; share of the {'pushes' if name == 'staleness' else 'steps'}"
            found.append(figure(section, name, label, "", draw, height_inches=0.8 + 0.55 * len(groups)))
    return found


def _lost_note(comparison: Comparison, condition: str) -> str:
    """What the crosses are, if there are any."""
    lost = [(group, run) for group in comparison.under(condition) for run in group.lost]
    if not lost:
        return ""
    names = ", ".join(f"{group.mode} seed {run.seed} ({run.status})" for group, run in lost)
    return f" A cross is a run that did not end as it should, which no mean contains: {names}."


def _of_staleness(comparison: Comparison) -> list[Figure]:
    if not any(run.final_accuracy is not None for group in comparison.staleness for run in group.runs):
        return []
    lost = [run for group in comparison.staleness for run in group.lost]
    note = f" Red crosses: {did_not_end(len(lost))}." if lost else ""
    caption = (
        "One worker whose every gradient is applied exactly so many versions after the weights that it was computed "
        f"on: final test accuracy, a small dot for each seed, the mean with its 95 % interval.{note}"
    )
    title = "Accuracy against enforced staleness"
    draw = curves.enforced_staleness(comparison)
    labels = ("enforced staleness, versions", "final test accuracy, %")
    return [Figure("Price of staleness", "enforced_staleness", title, caption, *labels, draw)]


def _of_references(comparison: Comparison) -> list[Figure]:
    if not any(run.marks for group in comparison.references for run in group.runs):
        return []
    caption = "One worker with batch B (1xB) and with batch N·B (NxB); bsp with N workers must lie on the latter."
    if comparison.reference(PYTORCH) is not None:
        caption += " So must plain PyTorch (dashed), which trains with batch N·B from equal weights in equal order."
    found = []
    for name, y in (("accuracy", curves.accuracy), ("loss", curves.loss)):
        title = f"Reference curves: {name} over samples"
        draw = curves.references(comparison, curves.samples, y)
        labels = (_X_LABELS[curves.samples], _Y_LABELS[y])
        found.append(Figure("References", f"references_{name}", title, caption, *labels, draw))
    return found
