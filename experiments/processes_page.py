"""Times of the processes experiment: compared with the published ones, as tables and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from figures import Figure
from spread import mean

from .page import SERIES, Claim, Table, figure, spread_text
from .processes_runs import WORK, Measured, Setup, cores

PUBLISHED_S = {1: 1403, 2: 1748, 4: 3003, 8: 4801}  # By processes.
COMPARED = ("as many threads each as cores", "one thread each")  # Of kinds().
GRID = "Seconds, and times as long as the fastest"
BESIDE_PUBLISHED = "Times as long as one process of the same kind"
DETAILS = "What it costs"


class Results:
    """All setups."""

    def __init__(self, found: Sequence[Measured]) -> None:
        self.found = list(found)
        self._by_setup = {one.setup: one for one in found}
        self.processes = sorted({one.setup.processes for one in found})
        self.threads = sorted({one.setup.threads for one in found})
        self.fastest = min((one for one in found if one.setup.plain), key=seconds)  # Of the grid.

    def of(self, setup: Setup) -> Measured:
        """Which there must be."""
        return self._by_setup[setup]

    def longer(self, setup: Setup, than: Setup) -> float:
        """How many times as long it takes."""
        return seconds(self.of(setup)) / seconds(self.of(than))


def seconds(one: Measured) -> float:
    """For the whole work, the mean of the rounds."""
    return mean(one.seconds) or 0.0


def kinds() -> dict[str, list[Setup]]:
    """Setups by the number of processes that are compared with the published ones: name → that of each number."""
    every = cores()
    return {
        "as many threads each as cores": [Setup(count, every) for count in PUBLISHED_S],
        "the same, asleep when they wait": [Setup(count, every, passive=True) for count in PUBLISHED_S],
        "one thread each": [Setup(count, 1) for count in PUBLISHED_S],
        "one thread each, TCP": [Setup(count, 1, shared_memory=False) for count in PUBLISHED_S],
    }


def claims(results: Results) -> list[Claim]:
    """By criteria that each states."""
    found = [_seconds(results)]
    for name in COMPARED:
        line = [setup for setup in kinds()[name] if setup.processes in results.processes]
        found.append(_order(name, line, results))
    return found


def _seconds(results: Results) -> Claim:
    ours = seconds(results.of(Setup(1, cores())))
    why = (
        "Other hardware, another program and another amount of work, which was not published with the times: seconds "
        "cannot agree. What several processes cost depends on the number of cores, too, which was not published: only "
        "the order is compared, and ratios are in a table."
    )
    return Claim("seconds of one process", f"{PUBLISHED_S[1]} s", f"{ours:.1f} s", None, why)


def _order(name: str, line: Sequence[Setup], results: Results) -> Claim:
    """Agrees if every larger number of processes takes longer than one."""
    times = [seconds(results.of(setup)) for setup in line]
    agrees = min(times[1:]) > times[0]
    fastest = min(line, key=lambda setup: seconds(results.of(setup)))
    start = "One process is" if agrees else f"{fastest.processes} processes are"
    ours = ", ".join(f"{time:.1f}" for time in times) + " s"
    published = ", ".join(str(PUBLISHED_S[setup.processes]) for setup in line) + " s"
    why = f"{start} the fastest of these: {_cost(line, results)}."
    return Claim(f"several processes take longer than one; {name}; {_numbers(line)}", published, ours, agrees, why)


def published_longer(processes: int) -> float:
    """Times as long as one process."""
    return PUBLISHED_S[processes] / PUBLISHED_S[1]


def _cost(line: Sequence[Setup], results: Results) -> str:
    few, many = results.of(line[0]), results.of(line[-1])
    return (
        f"a batch takes {_ms(few.cpu_s)} ms of processor time with one process and {_ms(many.cpu_s)} ms with "
        f"{many.setup.processes}, and {mean(few.busy) or 0:.0%} and {mean(many.busy) or 0:.0%} of the cores are busy"
    )


def _numbers(line: Sequence[Setup]) -> str:
    return ", ".join(str(setup.processes) for setup in line)


def _ms(values: Sequence[float]) -> str:
    value = 1000 * (mean(values) or 0)
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def grid(results: Results) -> Table:
    """Processes times threads, through shared memory."""
    columns = ["processes", *(f"{each} thread{'s' * (each > 1)} each" for each in results.threads)]
    table = Table(GRID, columns)
    for count in results.processes:
        cells = [_cell(results, Setup(count, each)) for each in results.threads]
        table.rows.append([str(count), *cells])
    return table


def _cell(results: Results, setup: Setup) -> str:
    return f"{seconds(results.of(setup)):.2f} ({results.longer(setup, results.fastest.setup):.2f})"


def beside_published(results: Results) -> Table:
    """A row for each number of processes."""
    table = Table(BESIDE_PUBLISHED, ["processes", "published seconds", "published", *kinds()])
    for count in results.processes:
        row = [str(count), str(PUBLISHED_S[count]), f"{published_longer(count):.2f}"]
        for line in kinds().values():
            setup = next(one for one in line if one.processes == count)
            row.append(f"{results.longer(setup, line[0]):.2f}")
        table.rows.append(row)
    return table


def details(results: Results) -> Table:
    """A row for each setup."""
    columns = ["processes", "samples/s", "seconds", "batches in a round"]
    columns += ["processor time of a batch, ms", "cores busy", "handovers a batch"]
    table = Table(DETAILS, columns)
    for one in results.found:
        setup = one.setup
        way = "" if setup.shared_memory else ", TCP"
        way += ", asleep when they wait" if setup.passive else ""
        table.rows.append(
            [
                f"{setup.processes} of {setup.threads} thread{'s' * (setup.threads > 1)}{way}",
                f"{mean(one.samples_per_s) or 0:,.0f}",
                spread_text(one.seconds),
                f"{one.batches:,}",
                _ms(one.cpu_s),
                f"{mean(one.busy) or 0:.0%}",
                f"{mean(one.handovers) or 0:.2f}",
            ]
        )
    return table


def times_figure(results: Results) -> Figure:
    """Processes against threads, and both."""
    counts, every = results.processes, cores()
    alone = seconds(results.of(Setup(1, every)))
    lines = (
        ("N processes of 1 thread", "-", [Setup(count, 1) for count in counts]),
        ("the same over TCP", (0, (5, 2)), [Setup(count, 1, shared_memory=False) for count in counts]),
        ("1 process of N threads", "-", [Setup(1, count) for count in counts]),
        (f"N processes of {every} threads", "-", [Setup(count, every) for count in counts]),
        ("the same, asleep when waiting", (0, (5, 2)), [Setup(count, every, passive=True) for count in counts]),
    )

    def draw(axes: Any, colours: dict[str, str]) -> None:
        published = [alone * published_longer(count) for count in counts]
        axes.plot(counts, published, color=colours["bsp"], linewidth=2.4, marker="s", label="published, scaled")
        for (label, dash, setups), series in zip(lines, SERIES, strict=False):
            times = [seconds(results.of(setup)) for setup in setups]
            axes.plot(counts, times, color=colours[series], linestyle=dash, marker="o", markersize=4, label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(counts, [str(count) for count in counts])

    caption = (
        f"Seconds for {WORK:,} batches; both axes are logarithmic. The published times of N processes are scaled so "
        f"that one process takes as long as ours with {every} threads."
    )
    more = {"height_inches": 4.2, "legend_columns": 2}
    return figure("times", "Time for the same work", caption, "N", "seconds", draw, **more)
