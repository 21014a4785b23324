"""Tables and plots of the experiment with data that no machine has whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from figures import Figure
from spread import interval, paired_difference

from .own_data_cuts import RANKS
from .own_data_runs import MODES, SHUFFLED, WHOLE, Data, Outcome, steps_of_epoch
from .page import SERIES, Table, figure

PARTS = "What each worker has: samples, and their classes"
ACCURACY = "Test accuracy, %"
_RANK_COLOURS = ("compute", "idle", "pull", "wait")


def parts(data: Data) -> Table:
    """A row for each cut."""
    table = Table(PARTS, ["cut", *(f"rank {rank}" for rank in range(RANKS)), "steps of an epoch"])
    for cut, indices in data.parts.items():
        cells = [f"{len(own):,}: {_classes(data.train.labels, own)}" for own in indices]
        table.rows.append([cut, *cells, str(steps_of_epoch(data, cut))])
    return table


def _classes(labels: bytes, indices: Sequence[int]) -> str:
    there = sorted({labels[index] for index in indices})
    whole = there == list(range(there[0], there[-1] + 1)) and len(there) > 2
    return f"{there[0]} to {there[-1]}" if whole else " and ".join(map(str, there))


def accuracy(outcomes: Sequence[Outcome]) -> Table:
    """A row for each cut, and for each mode its mean, and the difference from the whole, seed by seed."""
    columns = [column for mode in MODES for column in (mode, f"{mode}, points from the whole")]
    table = Table(ACCURACY, ["data", *columns])
    for cut in SHUFFLED:
        row = [cut]
        for mode in MODES:
            one = of(outcomes, cut, mode)
            row += [_percent(one), "—" if cut == WHOLE else _points(one, of(outcomes, WHOLE, mode))]
        table.rows.append(row)
    return table


def of(outcomes: Sequence[Outcome], cut: str, mode: str) -> Outcome:
    """The one of this cut and mode."""
    return next(one for one in outcomes if (one.cut, one.mode) == (cut, mode))


def _percent(one: Outcome) -> str:
    found = interval([100 * value for value in one.accuracy.values()])
    assert found is not None  # Each has a seed.
    return f"{found.mean:.1f}" + ("" if found.half is None else f" ± {found.half:.1f}")


def _points(one: Outcome, whole: Outcome) -> str:
    found = paired_difference(one.accuracy, whole.accuracy)
    assert found is not None  # Both have the same seeds.
    return points(100 * found.mean) + ("" if found.half is None else f" ± {100 * found.half:.1f}")


def points(value: float) -> str:
    """With its sign, which what is rounded to nothing does not have."""
    return f"{value:+.1f}".replace("-0.0", "0.0").replace("+0.0", "0.0").replace("-", "−")


def accuracy_figure(outcomes: Sequence[Outcome]) -> Figure:
    """A dot for each seed, a stroke for the mean."""

    def draw(axes: Any, colours: dict[str, str]) -> None:
        shift = 0.8 / len(SHUFFLED)
        for number, cut in enumerate(SHUFFLED):
            colour = colours[("bsp", *SERIES)[number]]
            for place, mode in enumerate(MODES):
                values = [100 * value for value in of(outcomes, cut, mode).accuracy.values()]
                x = place + shift * (number - (len(SHUFFLED) - 1) / 2)
                label = cut if place == 0 else None
                axes.plot([x] * len(values), values, "o", color=colour, markersize=4, alpha=0.6, label=label)
                middle = sum(values) / len(values)
                axes.plot([x - shift / 3, x + shift / 3], [middle, middle], color=colour, linewidth=2.2)
        axes.set_xticks(range(len(MODES)), list(MODES))
        axes.grid(False, axis="x")

    caption = "A dot is a seed, a stroke the mean. All workers together have the same samples in each cut."
    return figure("accuracy", "Accuracy by cut and mode", caption, "", "test accuracy, %", draw, legend_columns=4)


def contributions_figure(steps: list[list[int]], each: int) -> Figure:
    """The samples in each step, by rank, of all epochs."""

    def draw(axes: Any, colours: dict[str, str]) -> None:
        bottom = [0] * len(steps)
        edges = [place - 0.5 for place in range(1, len(steps) + 2)]
        for rank, colour in enumerate(_RANK_COLOURS):
            top = [low + step[rank] for low, step in zip(bottom, steps, strict=True)]
            axes.stairs(top, edges, baseline=bottom, fill=True, color=colours[colour], label=f"rank {rank}")
            bottom = top
        for end in range(each, len(steps), each):
            axes.axvline(end + 0.5, color=colours["ink"], linewidth=0.8, linestyle=(0, (4, 3)))
        axes.set_xlim(0.5, len(steps) + 0.5)

    caption = (
        "What each update of the uneven cut is made of, in bsp, by rank. The dashed line ends an epoch. A rank that "
        "has used its samples contributes empty steps until the others have used theirs."
    )
    title = "A worker that runs out of samples"
    return figure("contributions", title, caption, "updates", "samples", draw, height_inches=2.8, legend_columns=4)
