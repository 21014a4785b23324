"""The same work by processes, by threads and by both on the same cores: what too many of them cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

from experiments.function_training import BATCH, DESCRIPTION, FLAGS, SERVER_FLAGS
from experiments.lab import JobSpec, Lab, by_turns, run_job
from experiments.page import Claim, Page
from experiments.shared import machine
from experiments.shared.charts import DASHED, SERIES, Colours, Figure
from experiments.shared.intervals import spread_text
from experiments.shared.pages import Table, plural

PUBLISHED_S = {1: 1403, 2: 1748, 4: 3003, 8: 4801}  # By processes.
# Batches, of all processes together. A slow setup runs fewer than a fast one, and all are scaled to the same work.
WORK = 8_000
FIRST_BATCHES = 80, 24  # A first short run's (full, quick form); its time decides how many the rounds have.
ROUNDS = 4, 1
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


def cores() -> int:
    return len(machine.cores())


class Results:
    """Every setup's rounds."""

    def __init__(self, lab: Lab) -> None:
        """A first short run of every setup, then every setup once in each round."""
        counts = lab.pick((1, 2, 4, 8), (1, 2, 8))
        setups = [Setup(count, each) for count in counts for each in sorted({*counts, cores()})]
        setups += [Setup(count, 1, shared_memory=False) for count in counts]
        setups += [Setup(count, cores(), passive=True) for count in counts]
        least = lab.pick(*FIRST_BATCHES)
        self.batches: dict[Setup, int] = {}
        self.first_hashes: dict[Setup, str] = {}  # The weights' after the first run, which is as long in every setup.
        for setup in setups:
            first = run_job(lab, _spec(setup, "first", least))
            enough = max(1, min(int(first.samples_per_s * _PIECE_S / BATCH), _BATCHES_MAX) // least) * least
            self.batches[setup], self.first_hashes[setup] = lab.pick(enough, least), first.weights_hash()

        def one_round(setup: Setup, number: int) -> dict[str, float]:
            batches = self.batches[setup]
            part = "first" if number == 1 and batches == least else f"r{number}"  # A first run as long is a round.
            job = run_job(lab, _spec(setup, part, batches))
            rate, training_s = job.samples_per_s, job.training_s
            return {
                "samples_per_s": rate,
                "seconds": WORK * BATCH / rate,
                "batch_cpu_ms": 1000 * job.training_cpu_s / (rate * training_s / BATCH),
                "busy": job.training_cpu_s / (training_s * cores()),
                "handovers": sum(used["handovers"] for used in job.used.values()) / batches,
            }

        self.rounds = by_turns(lab.pick(*ROUNDS), setups, one_round)
        self.means = {setup: rounds.mean() for setup, rounds in self.rounds.items()}
        self.processes = list(counts)
        self.threads = sorted({*counts, cores()})
        self.fastest = min((Setup(count, each) for count in counts for each in self.threads), key=self.seconds)

    def seconds(self, setup: Setup) -> float:
        """For the whole work, the mean of the rounds."""
        return float(self.means[setup]["seconds"])

    def longer(self, setup: Setup, than: Setup) -> float:
        """How many times as long it takes."""
        return self.seconds(setup) / self.seconds(than)

    def same_weights(self) -> bool:
        """Whether as many processes with as many threads had the same ones, over TCP and however threads waited."""
        keys = pd.DataFrame([(each.processes, each.threads, one) for each, one in self.first_hashes.items()])
        return bool((keys.groupby([0, 1])[2].nunique() == 1).all())

    def kinds(self) -> dict[str, list[Setup]]:
        """Setups that are compared with the published ones, one for each number of processes."""
        every = cores()
        return {
            "as many threads each as cores": [Setup(count, every) for count in self.processes],
            "the same, asleep when they wait": [Setup(count, every, passive=True) for count in self.processes],
            "one thread each": [Setup(count, 1) for count in self.processes],
            "one thread each, TCP": [Setup(count, 1, shared_memory=False) for count in self.processes],
        }


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


def run(lab: Lab) -> Page:
    results = Results(lab)
    best, most, every = results.fastest, results.processes[-1], cores()
    times = results.longer(Setup(most, every), Setup(most, every, passive=True))
    finding = (
        f"On {every} cores the fastest is {best.processes} process{'es' * (best.processes > 1)} of "
        f"{plural(best.threads, 'thread')}; {most} processes of {every} threads take "
        f"{results.longer(Setup(most, every), Setup(1, every)):.1f} times as long as one (published: "
        f"{_published_longer(most):.1f}), {most} of one thread {results.longer(Setup(most, 1), Setup(1, 1)):.2f} times."
    )
    why = (
        "Other hardware, another program and another amount of work, which was not published with the times: seconds "
        "cannot agree. What several processes cost depends on the number of cores, too, which was not published: only "
        "the order is compared, and ratios are in a table."
    )
    ours = f"{results.seconds(Setup(1, every)):.1f} s"
    return Page(
        "Processes and threads",
        finding,
        "processes.md.j2",
        [
            Claim("seconds of one process", f"{PUBLISHED_S[1]} s", ours, None, why),
            *(_order(name, results) for name in ("as many threads each as cores", "one thread each")),
        ],
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


def _order(name: str, results: Results) -> Claim:
    """Agrees if every larger number of processes takes longer than one."""
    line = results.kinds()[name]
    times = list(map(results.seconds, line))
    agrees = min(times[1:]) > times[0]
    start = "One process is" if agrees else f"{min(line, key=results.seconds).processes} processes are"
    few, many = results.means[line[0]], results.means[line[-1]]
    why = (
        f"{start} the fastest of these: a batch takes {_ms(few['batch_cpu_ms'])} ms of processor time with one process "
        f"and {_ms(many['batch_cpu_ms'])} ms with {line[-1].processes}, and {few['busy']:.0%} and {many['busy']:.0%} "
        "of the cores are busy."
    )
    what = f"several processes take longer than one; {name}; {', '.join(str(setup.processes) for setup in line)}"
    published = ", ".join(str(PUBLISHED_S[setup.processes]) for setup in line) + " s"
    return Claim(what, published, ", ".join(f"{time:.1f}" for time in times) + " s", agrees, why)


def _ms(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def _grid(results: Results) -> Table:
    columns = ["processes", *(f"{plural(each, 'thread')} each" for each in results.threads)]
    table = Table("Seconds, and times as long as the fastest", columns)
    for count in results.processes:
        line = [Setup(count, each) for each in results.threads]
        cells = [f"{results.seconds(setup):.2f} ({results.longer(setup, results.fastest):.2f})" for setup in line]
        table.rows.append([str(count), *cells])
    return table


def _beside_published(results: Results) -> Table:
    columns = ["processes", "published seconds", "published", *results.kinds()]
    table = Table("Times as long as one process of the same kind", columns)
    for place, count in enumerate(results.processes):
        ours = [f"{results.longer(line[place], line[0]):.2f}" for line in results.kinds().values()]
        table.rows.append([str(count), str(PUBLISHED_S[count]), f"{_published_longer(count):.2f}", *ours])
    return table


def _details(results: Results) -> Table:
    columns = ["processes", "samples/s", "seconds", "batches in a round"]
    table = Table("What it costs", [*columns, "processor time of a batch, ms", "cores busy", "handovers a batch"])
    for setup, mean in results.means.items():
        seconds = spread_text(results.rounds[setup]["seconds"])
        row = [str(setup), f"{mean['samples_per_s']:,.0f}", seconds, f"{results.batches[setup]:,}"]
        table.rows.append([*row, _ms(mean["batch_cpu_ms"]), f"{mean['busy']:.0%}", f"{mean['handovers']:.2f}"])
    return table


def _times_figure(results: Results) -> Figure:
    counts, every, kinds = results.processes, cores(), results.kinds()
    lines = (
        ("N processes of 1 thread", "-", kinds["one thread each"]),
        ("the same over TCP", DASHED, kinds["one thread each, TCP"]),
        ("1 process of N threads", "-", [Setup(1, count) for count in counts]),
        (f"N processes of {every} threads", "-", kinds["as many threads each as cores"]),
        ("the same, asleep when waiting", DASHED, kinds["the same, asleep when they wait"]),
    )

    def draw(axes: Any, colours: Colours) -> None:
        published = [results.seconds(Setup(1, every)) * _published_longer(count) for count in counts]
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
