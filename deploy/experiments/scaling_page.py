"""Speed-ups of the scaling experiment: compared with the published ones, as tables and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from figures import Figure
from spread import Ratio, mean, paired_ratio

from .page import NOT_MEASURED, SERIES, Claim, Table, figure, spread_text
from .scaling_runs import Measured, Setup

PUBLISHED_S = {1: 934, 2: 489, 4: 249, 8: 139}  # By GPUs.
PUBLISHED_SPEED_UP = {1: 1.0, 2: 1.91, 4: 3.75, 8: 6.74}  # As it is printed.
TOLERANCE = 0.10
OVERVIEW = "Speed-ups over one worker"


@dataclass(frozen=True)
class Point:
    """A setup and how much faster it is than one worker."""

    measured: Measured
    speed_up: Ratio

    @property
    def workers(self) -> int:
        """For short."""
        return self.measured.setup.workers

    @property
    def longer(self) -> float:
        """How many times as long as with one worker a step takes."""
        return self.workers / self.speed_up.mean


class Results:
    """All setups."""

    def __init__(self, found: Sequence[Measured]) -> None:
        by_setup = {one.setup: one for one in found}
        self._points = [Point(one, _ratio(by_setup[one.setup.of_one], one)) for one in found]

    def line(self, like: Setup) -> list[Point]:
        """The setups that differ from it by the number of workers only."""
        return [point for point in self._points if point.measured.setup.of_one == like.of_one]

    @property
    def lines(self) -> list[Setup]:
        """The setups of one worker."""
        return list(dict.fromkeys(point.measured.setup.of_one for point in self._points))


def _ratio(one: Measured, many: Measured) -> Ratio:
    ratio = paired_ratio(dict(enumerate(one.seconds)), dict(enumerate(many.seconds)))
    assert ratio is not None  # Both have all rounds, and none takes no time.
    return ratio


def name(line: Setup) -> str:
    """Of a line, in tables and plots."""
    if line.idle:
        return f"idle-time form, batch {line.batch:,}, {line.transport}"
    place = "server on a core of its own" if line.server_alone else "server on the workers' cores"
    return f"real cores, {place}, {line.transport}"


def claim(line: Setup, points: Sequence[Point]) -> Claim:
    """Agrees if every speed-up is within TOLERANCE of the published one; a lower bound below that says nothing."""
    several = [point for point in points if point.workers > 1]
    compared = [point for point in several if not (point.measured.lower_bound and _off(point) < -TOLERANCE)]
    far = [point for point in compared if abs(_off(point)) > TOLERANCE]
    published = [f"{PUBLISHED_SPEED_UP[point.workers]:.2f} with {point.workers}" for point in several]
    return Claim(
        f"speed-up: {name(line)}",
        "; ".join(published) or f"{PUBLISHED_SPEED_UP[2]:.2f} with 2",
        "; ".join(f"{_speed_up(point)} with {point.workers}" for point in several) or "no core for a second worker",
        not far if compared else None,
        _why(points, compared, far),
    )


def _off(point: Point) -> float:
    return point.speed_up.mean / PUBLISHED_SPEED_UP[point.workers] - 1


def _speed_up(point: Point) -> str:
    return ("at least " if point.measured.lower_bound else "") + f"{point.speed_up.mean:.2f}"


def _why(points: Sequence[Point], compared: Sequence[Point], far: Sequence[Point]) -> str:
    several = [point for point in points if point.workers > 1]
    if not several:
        return "A speed-up needs two workers, and this form has a core for one."
    last, one = several[-1], points[0]
    published = last.workers / PUBLISHED_SPEED_UP[last.workers]
    said = [
        f"From 1 to {last.workers} workers a step gets {last.longer:.2f} times as long (published: {published:.2f}), "
        f"from {_ms(one.measured.step_s)} to {_ms(last.measured.step_s)} ms, of which a worker computes for "
        f"{_ms(last.measured.computing_s)} ms; the rest is {_rest(last.measured.setup)}."
    ]
    below = [point for point in far if _off(point) < 0]
    above = [point for point in far if _off(point) > 0]
    unknown = [point for point in several if point not in compared]
    within = [point for point in compared if point not in far]
    for those, text in (
        (within, f"it is within {TOLERANCE:.0%} of the published speed-up"),
        (below, f"it is more than {TOLERANCE:.0%} below, since a step gets longer by more than there"),
        (above, f"it is more than {TOLERANCE:.0%} above, since a step gets longer by less than there"),
        (unknown, "it is below, but only a lower bound, since the workers share cores for the exchange"),
    ):
        if those:
            said.append(f"With {_numbers(those)} {text}.")
    return " ".join(said)


def _rest(setup: Setup) -> str:
    if setup.idle:
        return "the exchange"
    return "the exchange that is not hidden behind computing, the server's work and waiting for the slowest"


def _numbers(points: Sequence[Point]) -> str:
    *first, last = [str(point.workers) for point in points]
    return f"{', '.join(first)} and {last}" if first else last


def _ms(seconds: Sequence[float]) -> str:
    return f"{1000 * (mean(seconds) or 0):.2f}"


def overview(results: Results, numbers: Sequence[int]) -> Table:
    """A row for each line, a column for each number of workers."""
    table = Table(OVERVIEW, ["form", *(f"{number} worker{'s' * (number > 1)}" for number in numbers)])
    table.rows.append(["published: GPUs", *(f"{PUBLISHED_SPEED_UP[number]:.2f}" for number in numbers)])
    table.rows.append(["published: GPUs, seconds", *(str(PUBLISHED_S[number]) for number in numbers)])
    table.rows.append(["GPUs, here", *(NOT_MEASURED for _ in numbers)])
    for line in results.lines:
        by_number = {point.workers: _speed_up(point) for point in results.line(line)}
        table.rows.append([name(line), *(by_number.get(number, "no cores") for number in numbers)])
    return table


def details(line: Setup, points: Sequence[Point]) -> Table:
    """What the speed-ups of a line come from."""
    columns = ["workers", "seconds", "speed-up", "efficiency", "step, ms", "of it computing, ms"]
    columns += ["cores busy", "in the rest of a step", "speed-up is"]
    rows = []
    for point in points:
        one = point.measured
        rows.append(
            [
                str(point.workers),
                spread_text(one.seconds),
                _interval(point.speed_up) if point.workers > 1 else "1.00",
                f"{1 / point.longer:.0%}",
                _ms(one.step_s),
                _ms(one.computing_s),
                f"{mean(one.busy) or 0:.0%}",
                f"{mean(one.exchange_busy) or 0:.0%}",
                "a lower bound" if one.lower_bound else "measured",
            ]
        )
    return Table(f"{name(line)[0].upper()}{name(line)[1:]}", columns, rows)


def _interval(ratio: Ratio) -> str:
    known = ratio.low is not None and ratio.high is not None
    return f"{ratio.mean:.2f}" + (f" ({ratio.low:.2f} to {ratio.high:.2f})" if known else "")


def speed_up_figure(results: Results, numbers: Sequence[int]) -> Figure:
    """All lines beside what is ideal and what is published."""

    def draw(axes: Any, colours: dict[str, str]) -> None:
        axes.plot(numbers, numbers, color=colours["quiet"], linestyle=(0, (2, 2)), label="ideal")
        published = [PUBLISHED_SPEED_UP[number] for number in numbers]
        axes.plot(numbers, published, color=colours["bsp"], linewidth=2.4, marker="s", label="published, GPUs")
        drawn = [line for line in results.lines if len(results.line(line)) > 1]
        for line, series in zip(sorted(drawn, key=lambda line: not line.idle), SERIES * 2, strict=False):
            points = results.line(line)
            x, y = [point.workers for point in points], [point.speed_up.mean for point in points]
            dash = "-" if line.shared_memory else (0, (5, 2))
            axes.plot(x, y, color=colours[series], linestyle=dash, label=_short(line))
            for point in points:
                face = colours["surface"] if point.measured.lower_bound else colours[series]
                marker = "o" if line.idle else "^"
                mark = {"markerfacecolor": face, "markersize": 5, "marker": marker}
                axes.plot([point.workers], [point.speed_up.mean], color=colours[series], **mark)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(numbers, [str(number) for number in numbers])
        axes.set_yticks(numbers, [str(number) for number in numbers])

    caption = (
        "Both axes are logarithmic. A circle is a number of workers in the idle-time form, a hollow one a lower "
        "bound; a triangle is one with real cores."
    )
    more = {"height_inches": 4.4, "legend_columns": 2}
    return figure("speed-up", "Speed-up by the number of workers", caption, "workers", "speed-up", draw, **more)


def _short(line: Setup) -> str:
    via = "memory" if line.shared_memory else "TCP"
    if line.idle:
        return f"idle-time, {line.batch:,}, {via}"
    return f"cores, {'server apart' if line.server_alone else 'with server'}, {via}"
