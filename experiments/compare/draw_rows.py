"""Figures with a row for each mode: throughput, shares of time, histograms, and the time line of the workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from palette import family
from records import PARTS, Batch, Run
from spread import mean
from summary import Comparison, Group

Colours = dict[str, str]
PART_NAMES = {
    "compute": "computing",
    "idle": "computing (idle in its place)",
    "push": "pushing",
    "wait": "waiting",
    "pull": "pulling",
}
_TIME_LINE_STEPS = 30  # Of the fastest worker of all modes.


def throughput(comparison: Comparison, condition: str) -> Callable[..., None]:
    """Measured dots, one a seed, and the line that the step times predict."""

    def draw(axes: Any, colours: Colours) -> None:
        groups = comparison.under(condition)
        for row, group in enumerate(groups):
            color = colours[family(group.mode)]
            values = group.values(lambda run: run.samples_per_s)
            axes.plot(values, [row] * len(values), "o", color=color, markersize=6, alpha=0.75)
            lost = [run.samples_per_s or 0.0 for run in group.lost]
            if lost:
                axes.plot(lost, [row] * len(lost), "X", color=color, markersize=9, clip_on=False)
            predicted = mean(list((group.predicted or {}).values()))
            if predicted is not None:
                axes.plot([predicted, predicted], [row - 0.32, row + 0.32], color=colours["ink"], linewidth=2)
        axes.plot([], [], "o", color=colours["quiet"], label="measured, one dot a seed")
        axes.plot(
            [], [], "|", color=colours["ink"], markersize=12, markeredgewidth=2, label="predicted from step times"
        )
        _rows(axes, groups)
        axes.set_xlim(0, axes.get_xlim()[1] * 1.05)
        axes.locator_params(axis="x", nbins=6)

    return draw


def time_shares(comparison: Comparison, condition: str) -> Callable[..., None]:
    """Where the workers' time went; waiting first, with its figure."""

    def draw(axes: Any, colours: Colours) -> None:
        groups = comparison.under(condition)
        order = ("wait", "push", "pull", "compute", "idle")
        for row, group in enumerate(groups):
            left = 0.0
            for part in order:
                share = mean([run.shares[part] for run in group.done if run.shares])
                if share is None:
                    continue
                axes.barh(row, 100 * share, left=left, height=0.66, color=colours[part])
                if part == "wait":
                    axes.text(102, row, f"{100 * share:.0f} %", va="center", color=colours["wait"], fontweight="bold")
                left += 100 * share
        for part in order:
            axes.barh([0], [0], color=colours[part], label=PART_NAMES[part])
        _rows(axes, groups)
        axes.set_xlim(0, 100)

    return draw


def _rows(axes: Any, groups: list[Group]) -> None:
    axes.set_yticks(range(len(groups)))
    axes.set_yticklabels([group.mode for group in groups])
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.grid(False, axis="y")


def doubling_bins(values: list[int]) -> dict[str, float]:
    """Shares of the values in the bins 0, 1, 2, 3 to 4, 5 to 8, 9 to 16, …"""
    bins = Counter(0 if value <= 0 else (value - 1).bit_length() + 1 for value in values)
    labels = ["0", "1", "2"]
    labels += [f"{2 ** (place - 2) + 1}\u2013{2 ** (place - 1)}" for place in range(3, max(bins, default=0) + 1)]
    return {label: bins[place] / max(len(values), 1) for place, label in enumerate(labels)}


def histograms(comparison: Comparison, condition: str, values: Callable[[Run], list[int]]) -> Callable[..., None]:
    """A row of bars for each mode, in bins that double."""

    def draw(axes: Any, colours: Colours) -> None:
        groups = comparison.under(condition)
        labels: list[str] = ["0", "1", "2"]
        for row, group in enumerate(groups):
            pooled = group.pooled(values)
            shares = doubling_bins(pooled)
            labels = max(labels, list(shares), key=len)
            heights = [0.82 * share for share in shares.values()]
            bottoms = [row + 0.4 - height for height in heights]
            axes.bar(range(len(heights)), heights, bottom=bottoms, width=0.86, color=colours[family(group.mode)])
            axes.axhline(row + 0.4, color=colours["grid"], linewidth=0.8)
            for place, (share, bottom) in enumerate(zip(shares.values(), bottoms, strict=True)):
                if share >= 0.005:
                    text = f"{100 * share:.0f} %"
                    if share > 0.75:  # Above it is no room: beside it, where all others are low.
                        axes.text(place + 0.5, bottom, text, ha="left", va="top", fontsize=7)
                    else:
                        axes.text(place, bottom - 0.03, text, ha="center", va="bottom", fontsize=7)
        _rows(axes, groups)
        axes.grid(False)
        axes.set_ylim(len(groups) - 0.5, -0.6)
        axes.set_xticks(range(len(labels)))
        axes.set_xticklabels(labels, fontsize=9 if len(labels) <= 8 else 6.5, rotation=0 if len(labels) <= 8 else 40)

    return draw


def time_line(comparison: Comparison, condition: str) -> Callable[..., None]:
    """The same seconds of each mode: a bar for each worker, red where it waits for others."""

    def draw(all_axes: list[Any], colours: Colours) -> None:
        groups = time_line_groups(comparison, condition)
        length_s = _time_line_length_s([group.done[0] for group in groups])
        for axes, group in zip(all_axes, groups, strict=True):
            _draw_time_line(axes, group.done[0], length_s, colours)
            axes.set_title(group.mode, loc="left", color=colours[family(group.mode)], fontweight="bold", pad=3)
        for part in PARTS:
            all_axes[-1].barh([0], [0], color=colours[part], label=PART_NAMES[part])

    return draw


def time_line_groups(comparison: Comparison, condition: str) -> list[Group]:
    """Those with a run whose time line is known."""
    return [group for group in comparison.under(condition) if group.done and group.done[0].time_line]


def _begin_s(run: Run) -> float:
    """The earliest time at which every worker is in the stretch."""
    ranks = {batch.rank for batch in run.time_line}
    return max(min(batch.begin_s for batch in run.time_line if batch.rank == rank) for rank in ranks)


def _time_line_length_s(runs: list[Run]) -> float:
    """As long as some dozen batches of the fastest worker of all runs, but no longer than what is known of each."""
    known_s = min(max(batch.end_s for batch in run.time_line) - _begin_s(run) for run in runs)
    typical_s = []
    for run in runs:
        for rank in {batch.rank for batch in run.time_line}:
            ends = sorted(batch.end_s for batch in run.time_line if batch.rank == rank)
            if len(ends) > 1:
                typical_s.append((ends[-1] - ends[0]) / (len(ends) - 1))
    return min(known_s, _TIME_LINE_STEPS * min(typical_s, default=known_s))


def _draw_time_line(axes: Any, run: Run, length_s: float, colours: Colours) -> None:
    begin_s = _begin_s(run)
    ranks = sorted({batch.rank for batch in run.time_line})
    for row, rank in enumerate(ranks):
        own = [batch for batch in run.time_line if batch.rank == rank]
        for part, spans in part_spans(own, begin_s, length_s).items():
            axes.broken_barh([(1000 * at, 1000 * width) for at, width in spans], (row - 0.4, 0.8), color=colours[part])
    axes.set_yticks(range(len(ranks)))
    axes.set_yticklabels([str(rank) for rank in ranks])
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_xlim(0, 1000 * length_s)
    axes.grid(False, axis="y")


def part_spans(batches: list[Batch], begin_s: float, length_s: float) -> dict[str, list[tuple[float, float]]]:
    """By part, where it begins after `begin_s` and how long it lasts; a batch's parts lie back to back at its end."""
    spans: dict[str, list[tuple[float, float]]] = {part: [] for part in PARTS}
    before_s = float("-inf")
    for batch in batches:
        at_s = batch.begin_s
        for part, part_s in zip(PARTS, batch.parts_s, strict=True):
            low, high = max(at_s, before_s, begin_s) - begin_s, min(at_s + part_s - begin_s, length_s)
            if high > max(low, 0):
                spans[part].append((low, high - low))
            at_s += part_s
        before_s = batch.end_s
    return spans
