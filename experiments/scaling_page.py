"""Speed-ups of the scaling experiment: compared with the published ones, as tables and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from figures import Figure
from spread import Ratio, mean, paired_ratio

from .page import NOT_MEASURED, SERIES, Claim, Table, figure, spread_text
from .scaling_runs import Measured, Setup, cores

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
    def at_least(self) -> bool:
        """Whether as many machines, with one more for the server, might be faster: cores are shared here."""
        return self.measured.lower_bound or (self.workers > 1 and self.measured.setup.crowded)

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


def claims(line: Setup, points: Sequence[Point]) -> list[Claim]:
    """One for each number of workers but one."""
    several = [point for point in points if point.workers > 1]
    if not several:
        why = "A speed-up needs two workers, and this form has a core for one."
        what, published = f"speed-up: {name(line)}, 2 workers", f"{PUBLISHED_SPEED_UP[2]:.2f}"
        return [Claim(what, published, "no core for a second worker", None, why)]
    return [_claim(line, points[0], point) for point in several]


def _claim(line: Setup, one: Point, many: Point) -> Claim:
    """Agrees if it is within TOLERANCE of the published one; a lower bound below that says nothing."""
    off = _off(many)
    agrees = None if many.at_least and off < 0 else abs(off) <= TOLERANCE
    ours = ("at least " if many.at_least else "") + _interval(many.speed_up)
    published = PUBLISHED_SPEED_UP[many.workers]
    what = f"speed-up: {name(line)}, {many.workers} workers"
    return Claim(what, f"{published:.2f}", ours, agrees, _why(one, many, agrees))


def _off(point: Point) -> float:
    return point.speed_up.mean / PUBLISHED_SPEED_UP[point.workers] - 1


def _speed_up(point: Point) -> str:
    return ("at least " if point.at_least else "") + f"{point.speed_up.mean:.2f}"


def _why(one: Point, many: Point, agrees: bool | None) -> str:
    published = many.workers / PUBLISHED_SPEED_UP[many.workers]
    said = (
        f"A step gets {many.longer:.2f} times as long as with one worker (published: {published:.2f}), from "
        f"{_ms(one.measured.step_s)} to {_ms(many.measured.step_s)} ms, of which a worker computes for "
        f"{_ms(many.measured.computing_s)} ms; the rest is {_rest(many.measured.setup)}."
    )
    if agrees is None:
        shared = (
            "the workers share them for the exchange" if many.measured.setup.idle else "the server runs on them too"
        )
        machine = f"{many.workers} hosts on one machine of {len(cores())} core{'s' * (len(cores()) > 1)}"
        return f"{said} It is below the published one, but the least that there is: these are {machine}, and {shared}."
    if agrees:
        return f"{said} It is within {TOLERANCE:.0%} of the published speed-up."
    side = "below, since a step gets longer by more" if _off(many) < 0 else "above, since a step gets longer by less"
    return f"{said} It is more than {TOLERANCE:.0%} {side} than there."


def _rest(setup: Setup) -> str:
    if setup.idle:
        return "the exchange"
    return "the exchange that is not hidden behind computing, the server's work and waiting for the slowest"


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
                "a lower bound" if point.at_least else "measured",
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
                face = colours["surface"] if point.at_least else colours[series]
                marker = "o" if line.idle else "^"
                mark = {"markerfacecolor": face, "markersize": 5, "marker": marker}
                axes.plot([point.workers], [point.speed_up.mean], color=colours[series], **mark)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(numbers, [str(number) for number in numbers])
        axes.set_yticks(numbers, [str(number) for number in numbers])

    caption = (
        "Both axes are logarithmic. A circle is a number of workers in the idle-time form, a triangle one with real "
        "cores; a hollow mark is a lower bound."
    )
    more = {"height_inches": 4.4, "legend_columns": 2}
    return figure("speed-up", "Speed-up by the number of workers", caption, "workers", "speed-up", draw, **more)


def _short(line: Setup) -> str:
    via = "memory" if line.shared_memory else "TCP"
    if line.idle:
        return f"idle-time, {line.batch:,}, {via}"
    return f"cores, {'server apart' if line.server_alone else 'with server'}, {via}"
