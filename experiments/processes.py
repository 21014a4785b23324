"""The same work by processes, by threads and by both on the same cores: what too many of them cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from experiments.function_training import BATCH, DESCRIPTION, FLAGS, SERVER_FLAGS
from experiments.lab import JobResult, JobSpec, Lab, run_job
from experiments.page import Claim, Page
from experiments.shared import machine
from experiments.shared.charts import DASHED, SERIES, Colours, Figure
from experiments.shared.intervals import mean, spread_text
from experiments.shared.pages import Table, plural

PUBLISHED_S = {1: 1403, 2: 1748, 4: 3003, 8: 4801}  # By processes.
# Batches, of all processes together. A slow setup runs fewer than a fast one, and all are scaled to the same work.
WORK = 8_000
_BATCHES_MAX = 2_400
_PIECE_S = 3.0


@dataclass(frozen=True)
class Setup:
    """Processes of one job on all cores, which the system divides among them."""

    processes: int
    threads: int
    shared_memory: bool = True
    passive: bool = False  # Threads of a process that wait for one another sleep at once.

    @property
    def name(self) -> str:
        return f"p{self.processes}-t{self.threads}{'' if self.shared_memory else '-tcp'}{'-passive' * self.passive}"

    def __str__(self) -> str:
        way = ("" if self.shared_memory else ", TCP") + ", asleep when they wait" * self.passive
        return f"{self.processes} of {plural(self.threads, 'thread')}{way}"


@dataclass
class Measured:
    """A setup's rounds. A value of each, but for `first_hash`."""

    setup: Setup
    batches: int  # All processes together make so many in a round.
    first_hash: str  # The weights have it after the first short run, which is as long in every setup.
    samples_per_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)  # A batch takes so much.
    busy: list[float] = field(default_factory=list)  # Share of all cores.
    handovers: list[float] = field(default_factory=list)  # A batch has so many.

    @property
    def seconds(self) -> list[float]:
        """For WORK."""
        return [WORK * BATCH / rate for rate in self.samples_per_s]

    def add(self, job: JobResult) -> None:
        rate, training_s = job.samples_per_s, job.training_s
        self.samples_per_s.append(rate)
        self.cpu_s.append(job.training_cpu_s / (rate * training_s / BATCH))
        self.busy.append(job.training_cpu_s / (training_s * cores()))
        self.handovers.append(sum(used["handovers"] for used in job.used.values()) / self.batches)


def cores() -> int:
    return len(machine.cores())


def setups(lab: Lab) -> list[Setup]:
    """All products; one thread each over TCP; and all cores' threads each that do not look again and again."""
    processes = lab.pick((1, 2, 4, 8), (1, 2, 8))
    return [
        *(Setup(count, each) for count in processes for each in sorted({*processes, cores()})),
        *(Setup(count, 1, shared_memory=False) for count in processes),
        *(Setup(count, cores(), passive=True) for count in processes),
    ]


def rounds(lab: Lab) -> int:
    """How often each setup runs, by turns."""
    return lab.pick(4, 1)


def first_batches(lab: Lab) -> int:
    """A first short run has so many, and decides how many the rounds have."""
    return lab.pick(80, 24)


def measure(lab: Lab) -> list[Measured]:
    """A first short run of every setup, then every setup once in each round."""
    found, least = [], first_batches(lab)
    for setup in setups(lab):
        first = run_job(lab, _spec(setup, "first", least))
        enough = max(1, min(int(first.samples_per_s * _PIECE_S / BATCH), _BATCHES_MAX) // least) * least
        found.append(Measured(setup, lab.pick(enough, least), first.weights_hash()))
    for number in range(1, rounds(lab) + 1):
        for one in found:
            # A first run of as many batches is a round.
            part = "first" if number == 1 and one.batches == least else f"r{number}"
            one.add(run_job(lab, _spec(one.setup, part, one.batches)))
    return found


def _spec(setup: Setup, part: str, batches: int) -> JobSpec:
    length = [f"--batch_size={BATCH}", f"--steps={batches // setup.processes}", f"--threads={setup.threads}"]
    return JobSpec(
        f"{setup.name}-{part}",
        setup.processes,
        list(SERVER_FLAGS),
        [*FLAGS, *length],
        worker_on=lambda rank: ["env", "OMP_WAIT_POLICY=PASSIVE"] if setup.passive else [],
        shared_memory=setup.shared_memory,
    )


class Results:
    """All setups."""

    def __init__(self, found: Sequence[Measured]) -> None:
        self.by_setup = {one.setup: one for one in found}
        self.processes = sorted({one.setup.processes for one in found})
        self.threads = sorted({one.setup.threads for one in found})
        grid = [setup for setup in self.by_setup if setup.shared_memory and not setup.passive]
        self.fastest = min(grid, key=self.seconds)

    def seconds(self, setup: Setup) -> float:
        """For the whole work, the mean of the rounds."""
        return mean(self.by_setup[setup].seconds) or 0.0

    def longer(self, setup: Setup, than: Setup) -> float:
        """How many times as long it takes."""
        return self.seconds(setup) / self.seconds(than)

    def same_weights(self) -> bool:
        """Whether as many processes with as many threads had the same ones, over TCP and however threads waited."""
        hashes = {(each.processes, each.threads, one.first_hash) for each, one in self.by_setup.items()}
        return len(hashes) == len({(each.processes, each.threads) for each in self.by_setup})


def kinds() -> dict[str, list[Setup]]:
    """Setups by the number of processes that are compared with the published ones: name → that of each number."""
    every = cores()
    return {
        "as many threads each as cores": [Setup(count, every) for count in PUBLISHED_S],
        "the same, asleep when they wait": [Setup(count, every, passive=True) for count in PUBLISHED_S],
        "one thread each": [Setup(count, 1) for count in PUBLISHED_S],
        "one thread each, TCP": [Setup(count, 1, shared_memory=False) for count in PUBLISHED_S],
    }


def run(lab: Lab) -> Page:
    """Measures all products of processes and threads, and two variants."""
    results = Results(measure(lab))
    most, every = results.processes[-1], cores()
    times = results.longer(Setup(most, every), Setup(most, every, passive=True))
    return Page(
        "Processes and threads",
        _finding(results),
        "processes.md.j2",
        [_seconds(results), *(_order(name, results) for name in ("as many threads each as cores", "one thread each"))],
        tables={"grid": _grid(results), "published": _beside_published(results), "details": _details(results)},
        figures=[_times_figure(results)],
        values={
            "description": DESCRIPTION,
            "published": [f"{PUBLISHED_S[count]} s with {count}" for count in sorted(PUBLISHED_S, reverse=True)],
            "most": most,
            "times": f"{times:.1f} times as long as" if times >= 1 else f"{1 / times:.1f} times as fast as",
            "same": results.same_weights(),
        },
    )


def _published_longer(processes: int) -> float:
    """Times as long as one process."""
    return PUBLISHED_S[processes] / PUBLISHED_S[1]


def _finding(results: Results) -> str:
    best, most, every = results.fastest, results.processes[-1], cores()
    return (
        f"On {every} cores the fastest is {best.processes} process{'es' * (best.processes > 1)} of "
        f"{plural(best.threads, 'thread')}; {most} processes of {every} threads take "
        f"{results.longer(Setup(most, every), Setup(1, every)):.1f} times as long as one (published: "
        f"{_published_longer(most):.1f}), {most} of one thread {results.longer(Setup(most, 1), Setup(1, 1)):.2f} times."
    )


def _seconds(results: Results) -> Claim:
    ours = results.seconds(Setup(1, cores()))
    why = (
        "Other hardware, another program and another amount of work, which was not published with the times: seconds "
        "cannot agree. What several processes cost depends on the number of cores, too, which was not published: only "
        "the order is compared, and ratios are in a table."
    )
    return Claim("seconds of one process", f"{PUBLISHED_S[1]} s", f"{ours:.1f} s", None, why)


def _order(name: str, results: Results) -> Claim:
    """Agrees if every larger number of processes takes longer than one."""
    line = [setup for setup in kinds()[name] if setup.processes in results.processes]
    times = list(map(results.seconds, line))
    agrees = min(times[1:]) > times[0]
    start = "One process is" if agrees else f"{min(line, key=results.seconds).processes} processes are"
    few, many = results.by_setup[line[0]], results.by_setup[line[-1]]
    why = (
        f"{start} the fastest of these: a batch takes {_ms(few.cpu_s)} ms of processor time with one process and "
        f"{_ms(many.cpu_s)} ms with {many.setup.processes}, and {mean(few.busy) or 0:.0%} and "
        f"{mean(many.busy) or 0:.0%} of the cores are busy."
    )
    what = f"several processes take longer than one; {name}; {', '.join(str(setup.processes) for setup in line)}"
    published = ", ".join(str(PUBLISHED_S[setup.processes]) for setup in line) + " s"
    return Claim(what, published, ", ".join(f"{time:.1f}" for time in times) + " s", agrees, why)


def _ms(values: Sequence[float]) -> str:
    value = 1000 * (mean(values) or 0)
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def _grid(results: Results) -> Table:
    """Processes times threads, through shared memory."""
    columns = ["processes", *(f"{plural(each, 'thread')} each" for each in results.threads)]
    table = Table("Seconds, and times as long as the fastest", columns)
    for count in results.processes:
        line = [Setup(count, each) for each in results.threads]
        cells = [f"{results.seconds(setup):.2f} ({results.longer(setup, results.fastest):.2f})" for setup in line]
        table.rows.append([str(count), *cells])
    return table


def _beside_published(results: Results) -> Table:
    columns = ["processes", "published seconds", "published", *kinds()]
    table = Table("Times as long as one process of the same kind", columns)
    for count in results.processes:
        lines = [(next(one for one in line if one.processes == count), line[0]) for line in kinds().values()]
        ours = [f"{results.longer(*pair):.2f}" for pair in lines]
        table.rows.append([str(count), str(PUBLISHED_S[count]), f"{_published_longer(count):.2f}", *ours])
    return table


def _details(results: Results) -> Table:
    columns = ["processes", "samples/s", "seconds", "batches in a round"]
    table = Table("What it costs", [*columns, "processor time of a batch, ms", "cores busy", "handovers a batch"])
    for one in results.by_setup.values():
        row = [str(one.setup), f"{mean(one.samples_per_s) or 0:,.0f}", spread_text(one.seconds), f"{one.batches:,}"]
        row += [_ms(one.cpu_s), f"{mean(one.busy) or 0:.0%}", f"{mean(one.handovers) or 0:.2f}"]
        table.rows.append(row)
    return table


def _times_figure(results: Results) -> Figure:
    """Processes against threads, and both."""
    counts, every = results.processes, cores()
    alone = results.seconds(Setup(1, every))
    lines = (
        ("N processes of 1 thread", "-", [Setup(count, 1) for count in counts]),
        ("the same over TCP", DASHED, [Setup(count, 1, shared_memory=False) for count in counts]),
        ("1 process of N threads", "-", [Setup(1, count) for count in counts]),
        (f"N processes of {every} threads", "-", [Setup(count, every) for count in counts]),
        ("the same, asleep when waiting", DASHED, [Setup(count, every, passive=True) for count in counts]),
    )

    def draw(axes: Any, colours: Colours) -> None:
        published = [alone * _published_longer(count) for count in counts]
        axes.plot(counts, published, color=colours["bsp"], linewidth=2.4, marker="s", label="published, scaled")
        for (label, dash, setups), series in zip(lines, SERIES, strict=False):
            look = {"color": colours[series], "linestyle": dash, "marker": "o", "markersize": 4}
            axes.plot(counts, list(map(results.seconds, setups)), **look, label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(counts, [str(count) for count in counts])

    caption = (
        f"Seconds for {WORK:,} batches; both axes are logarithmic. The published times of N processes are scaled so "
        f"that one process takes as long as ours with {every} threads."
    )
    more = {"height_inches": 4.2, "legend_columns": 2}
    return Figure("times", "Time for the same work", caption, "N", "seconds", draw, **more)
