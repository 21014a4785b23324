"""Fixed work with 1, 2, 4 and 8 workers: on cores of their own as far as there are any, and in idle-time form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from experiments.function_training import BATCH, DESCRIPTION, FLAGS, SAMPLES, SERVER_FLAGS
from experiments.lab import JobResult, JobSpec, Lab, by_turns, run_job
from experiments.page import NOT_MEASURED, Claim, Page
from experiments.shared.charts import DASHED, SERIES, Colours, Figure
from experiments.shared.intervals import paired_ratio, spread_text
from experiments.shared.machine import cores
from experiments.shared.pages import Table, plural

PUBLISHED_S = {1: 934, 2: 489, 4: 249, 8: 139}  # By GPUs.
PUBLISHED_SPEED_UP = {1: 1.0, 2: 1.91, 4: 3.75, 8: 6.74}  # As it is printed.
TOLERANCE = 0.10
# In the full and the quick form: how many workers there are, setup by setup; the fixed work, which is passes over the
# data by all workers together; and how often each setup runs.
WORKERS = (1, 2, 4, 8), (1, 2, 8)
PASSES = 64, 2
ROUNDS = 4, 1
PLAYED_BATCHES = (BATCH, 10 * BATCH)
STAND_IN = 10  # Samples of a batch whose worker idles for the rest of a played batch's time.
BUSY_SHARE = 0.70  # As comparing the modes has it: beyond this share of all cores they may set the pace.


@dataclass(frozen=True)
class Setup:
    """What is the same in all rounds."""

    workers: int
    batch: int  # Each worker's; in the idle-time form the one that is played.
    shared_memory: bool
    server_alone: bool = False  # In the form on real cores: the server has a core to itself.
    idle: bool = False

    def __str__(self) -> str:
        """In tables and plots, but for the number of workers."""
        way = "shared memory" if self.shared_memory else "TCP"
        if self.idle:
            return f"idle-time form, batch {self.batch:,}, {way}"
        place = "a core of its own" if self.server_alone else "the workers' cores"
        return f"real cores, server on {place}, {way}"


class Measured:
    """A setup beside the same one with one worker."""

    def __init__(self, setup: Setup, rounds: pd.DataFrame, of_one: pd.DataFrame) -> None:
        self.setup, self.workers, self.rounds = setup, setup.workers, rounds
        self.speed_up = paired_ratio(of_one["seconds"], rounds["seconds"])  # No round takes no time.
        self.longer = self.workers / self.speed_up.mean  # A step takes so many times as long as with one worker.
        # Whether as many machines, with one more for the server, might be faster. In the idle-time form the exchange
        # may have waited for cores; else the server runs on the workers' cores, if it has none to itself.
        crowded = rounds["exchange_busy"].max() > BUSY_SHARE if setup.idle else not setup.server_alone
        self.at_least = bool(self.workers > 1 and crowded)

    def mean(self, column: str) -> float:
        return float(self.rounds[column].mean())

    def ms(self, column: str) -> str:
        return f"{1000 * self.mean(column):.2f}"

    @property
    def speed_up_text(self) -> str:
        return f"{'at least ' * self.at_least}{self.speed_up.mean:.2f}"


def _computing_s(job: JobResult) -> float:
    """The median of a step, with idling, without each worker's first."""
    steps = job.steps[job.steps.groupby("rank").cumcount() > 0]
    return float(steps.reindex(columns=["forward_s", "backward_s", "idle_s"]).sum(axis=1).median())


def measure_compute(lab: Lab, batch: int) -> float:
    """How long a worker computes a batch for: the median of forward and backward of one that runs alone.

    It has a core to itself where there are two, and sends nothing while it computes.
    """
    steps = f"--steps={lab.pick(3000, 60) * BATCH // batch + 10}"
    spec = JobSpec(
        f"compute-{batch}",
        1,
        list(SERVER_FLAGS),
        [*FLAGS, f"--batch_size={batch}", steps, "--overlap=false"],
        server_on=lambda shard: _pinned(cores()[:1]),
        worker_on=lambda rank: _pinned(cores()[-1:]),
        shared_memory=True,
    )
    return _computing_s(run_job(lab, spec))


def setups(lab: Lab) -> list[Setup]:
    """On real cores as many workers as there are cores for: on two, two among which the server runs, or one beside it.
    In the idle-time form all numbers, whatever cores there are.
    """
    real = [
        Setup(number, BATCH, shared_memory, server_alone)
        for shared_memory in (True, False)
        for server_alone in (True, False)
        for number in lab.pick(*WORKERS)
        if number <= len(cores()) - server_alone
    ]
    return real + [
        Setup(number, batch, shared_memory, idle=True)
        for batch in PLAYED_BATCHES
        for shared_memory in (True, False)
        for number in lab.pick(*WORKERS)
    ]


def measure(lab: Lab, compute_s: dict[int, float]) -> list[Measured]:
    """Every setup once in each round. `compute_s` is of a batch, by its samples."""

    def one_round(setup: Setup, number: int) -> dict[str, Any]:
        steps = lab.pick(*PASSES) * SAMPLES // (setup.batch * setup.workers)
        job = run_job(lab, _spec(setup, steps, compute_s, number))
        step_s = job.training_s / (job.steps.groupby("rank").size()[0] - 1)
        computing_s, busy = _computing_s(job), job.training_cpu_s / (job.training_s * len(cores()))
        return {
            "seconds": step_s * steps,  # For the fixed work.
            "step_s": step_s,
            "computing_s": computing_s,  # A step's, with idling.
            "busy": busy,  # Share of all cores; and the same, as if nobody needed a core while computing.
            "exchange_busy": min(1.0, busy * step_s / max(step_s - computing_s, 1e-9)),
            "hash": job.weights_hash(),
        }

    found = by_turns(lab.pick(*ROUNDS), setups(lab), one_round)
    return [Measured(setup, rounds, found[replace(setup, workers=1)]) for setup, rounds in found.items()]


def step_time(seconds: float) -> str:
    """In whole microseconds, as a flag has it."""
    return f"{round(seconds * 1e6)}us"


def _spec(setup: Setup, steps: int, compute_s: dict[int, float], number: int) -> JobSpec:
    on: dict[str, Any] = {}
    if setup.idle:
        size = [f"--batch_size={STAND_IN}", f"--experiment_step_time={step_time(compute_s[setup.batch])}"]
        name = f"idle-{setup.batch}"
    else:
        size = [f"--batch_size={setup.batch}"]
        name = "beside-a-server" if setup.server_alone else "with-the-server"
        server = cores()[: 1 if setup.server_alone else setup.workers]
        on["server_on"] = lambda shard: _pinned(server)
        on["worker_on"] = lambda rank: _pinned([cores()[setup.server_alone + rank]])
    return JobSpec(
        f"{name}-{'shm' if setup.shared_memory else 'tcp'}-{setup.workers}-r{number}",
        setup.workers,
        list(SERVER_FLAGS),
        [*FLAGS, *size, f"--steps={steps}"],
        shared_memory=setup.shared_memory,
        **on,
    )


def _pinned(to: list[int]) -> list[str]:
    return ["taskset", "--cpu-list", ",".join(map(str, to))]


def run(lab: Lab) -> Page:
    """Measures what a batch takes to compute, then all setups by turns."""
    compute_s = {batch: measure_compute(lab, batch) for batch in PLAYED_BATCHES}
    found, numbers = measure(lab, compute_s), lab.pick(*WORKERS)
    lines: dict[str, list[Measured]] = {}
    for one in found:
        lines.setdefault(str(one.setup), []).append(one)
    real, idle = ([own for own in lines.values() if own[0].setup.idle == form] for form in (False, True))
    details = {f"line{number}": _details(own) for number, own in enumerate([*idle, *real])}
    hashes: dict[int, set[str]] = {}  # The last weights' on real cores, by workers: each number must have one.
    for one in (own for line in real for own in line):
        hashes.setdefault(one.workers, set()).update(one.rounds["hash"])
    return Page(
        "Scaling",
        _finding([own for own in [*idle, *real] if not own[0].setup.shared_memory]),
        "scaling.md.j2",
        [_gpus(), _seconds(found), *(claim for own in [*idle, *real] for claim in _claims(own))],
        tables={"overview": _overview(list(lines.values()), numbers), **details},
        figures=[_speed_up_figure(list(lines.values()), numbers)],
        values={
            "description": DESCRIPTION,
            "played": [(batch, 1000 * compute_s[batch], step_time(compute_s[batch])) for batch in PLAYED_BATCHES],
            "idle_tables": list(details)[: len(idle)],
            "real_tables": list(details)[len(idle) :],
            "hashes": {number: sorted(own) for number, own in sorted(hashes.items())},
        },
    )


def _finding(lines: list[list[Measured]]) -> str:
    found = []
    for *_, last in lines:
        if last.workers > 1:
            played = "played by idling" if last.setup.idle else "on real cores"
            found.append(f"{last.speed_up_text} with {last.workers} {played}, batch {last.setup.batch:,}")
    return f"Speed-ups over TCP: {'; '.join(found)} (published: 6.74 with 8 GPUs, 1.91 with 2)."


def _gpus() -> Claim:
    published = "; ".join(f"{seconds} s on {number}" for number, seconds in PUBLISHED_S.items())
    why = "The machine's GPUs, if it has any, were not used; workers that share one card would not be several GPUs."
    return Claim("the same on 1, 2, 4 and 8 GPUs", published, NOT_MEASURED, None, why)


def _seconds(found: list[Measured]) -> Claim:
    one = next(each for each in found if not each.setup.idle or each.setup.batch == BATCH)
    why = (
        "Other hardware, another program, and a number of passes that was not published with the times: seconds "
        "cannot agree, so ratios are compared. The published 6.74 is not 934 over 139, which is 6.72."
    )
    ours = f"{one.mean('seconds'):.1f} s (one core)"
    return Claim("seconds of one worker", f"{PUBLISHED_S[1]} s (one GPU)", ours, None, why)


def _claims(line: list[Measured]) -> list[Claim]:
    """One for each number of workers but one: it agrees if it is within TOLERANCE of the published one; a lower bound
    below that says nothing.
    """
    if len(line) == 1:
        why = "A speed-up needs two workers, and this form has a core for one."
        what, published = f"speed-up: {line[0].setup}, 2 workers", f"{PUBLISHED_SPEED_UP[2]:.2f}"
        return [Claim(what, published, "no core for a second worker", None, why)]
    found = []
    for many in line[1:]:
        published = PUBLISHED_SPEED_UP[many.workers]
        off = many.speed_up.mean / published - 1
        agrees = None if many.at_least and off < 0 else abs(off) <= TOLERANCE
        what, ours = f"speed-up: {many.setup}, {many.workers} workers", f"{'at least ' * many.at_least}{many.speed_up}"
        found.append(Claim(what, f"{published:.2f}", ours, agrees, _why(line[0], many, agrees, off)))
    return found


def _why(one: Measured, many: Measured, agrees: bool | None, off: float) -> str:
    idle, published = many.setup.idle, many.workers / PUBLISHED_SPEED_UP[many.workers]
    hidden = "the exchange that is not hidden behind computing, the server's work and waiting for the slowest"
    said = (
        f"A step gets {many.longer:.2f} times as long as with one worker (published: {published:.2f}), from "
        f"{one.ms('step_s')} to {many.ms('step_s')} ms, of which a worker computes for {many.ms('computing_s')} ms; "
        f"the rest is {'the exchange' if idle else hidden}."
    )
    if agrees is None:
        shared = "the workers share them for the exchange" if idle else "the server runs on them too"
        these = f"{many.workers} hosts on one machine of {plural(len(cores()), 'core')}"
        return f"{said} It is below the published one, but the least that there is: these are {these}, and {shared}."
    if agrees:
        return f"{said} It is within {TOLERANCE:.0%} of the published speed-up."
    side = "below, since a step gets longer by more" if off < 0 else "above, since a step gets longer by less"
    return f"{said} It is more than {TOLERANCE:.0%} {side} than there."


def _overview(lines: list[list[Measured]], numbers: Sequence[int]) -> Table:
    table = Table("Speed-ups over one worker", ["form", *(plural(number, "worker") for number in numbers)])
    table.rows.append(["published: GPUs", *(f"{PUBLISHED_SPEED_UP[number]:.2f}" for number in numbers)])
    table.rows.append(["published: GPUs, seconds", *(str(PUBLISHED_S[number]) for number in numbers)])
    table.rows.append(["GPUs, here", *(NOT_MEASURED for _ in numbers)])
    for line in lines:
        by_number = {one.workers: one.speed_up_text for one in line}
        table.rows.append([str(line[0].setup), *(by_number.get(number, "no cores") for number in numbers)])
    return table


def _details(line: list[Measured]) -> Table:
    name = str(line[0].setup)
    columns = ["workers", "seconds", "speed-up", "efficiency", "step, ms", "of it computing, ms"]
    columns += ["cores busy", "in the rest of a step", "speed-up is"]
    table = Table(name[0].upper() + name[1:], columns)
    for one in line:
        speed_up = str(one.speed_up) if one.workers > 1 else "1.00"
        row = [str(one.workers), spread_text(one.rounds["seconds"]), speed_up, f"{1 / one.longer:.0%}"]
        row += [one.ms("step_s"), one.ms("computing_s"), f"{one.mean('busy'):.0%}", f"{one.mean('exchange_busy'):.0%}"]
        table.rows.append([*row, "a lower bound" if one.at_least else "measured"])
    return table


def _speed_up_figure(lines: list[list[Measured]], numbers: Sequence[int]) -> Figure:
    drawn = sorted((line for line in lines if len(line) > 1), key=lambda line: not line[0].setup.idle)

    def draw(axes: Any, colours: Colours) -> None:
        axes.plot(numbers, numbers, color=colours["quiet"], linestyle=(0, (2, 2)), label="ideal")
        published = [PUBLISHED_SPEED_UP[number] for number in numbers]
        axes.plot(numbers, published, color=colours["bsp"], linewidth=2.4, marker="s", label="published, GPUs")
        for line, series in zip(drawn, SERIES * 2, strict=False):
            setup, colour = line[0].setup, colours[series]
            via = "memory" if setup.shared_memory else "TCP"
            place = f"cores, {'server apart' if setup.server_alone else 'with server'}"
            label = f"{f'idle-time, {setup.batch:,}' if setup.idle else place}, {via}"
            dash = "-" if setup.shared_memory else DASHED
            x, y = [one.workers for one in line], [one.speed_up.mean for one in line]
            axes.plot(x, y, color=colour, linestyle=dash, label=label)
            for one in line:
                face = colours["surface"] if one.at_least else colour
                mark = {"markerfacecolor": face, "markersize": 5, "marker": "o" if setup.idle else "^"}
                axes.plot([one.workers], [one.speed_up.mean], color=colour, **mark)
        for scale, ticks in ((axes.set_xscale, axes.set_xticks), (axes.set_yscale, axes.set_yticks)):
            scale("log", base=2)
            ticks(numbers, [str(number) for number in numbers])

    caption = (
        "Both axes are logarithmic. A circle is a number of workers in the idle-time form, a triangle one with real "
        "cores; a hollow mark is a lower bound."
    )
    more = {"height_inches": 4.4, "legend_columns": 2}
    return Figure("speed-up", "Speed-up by the number of workers", caption, "workers", "speed-up", draw, **more)
