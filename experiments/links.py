"""Links: the same training over slow and fast links, with parameter servers and with MPI."""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from experiments.hosts import MPI_PROGRAM, RING, Hosts, burst_bytes, run_ranks, stream_bytes_per_s, why_no_mpi
from experiments.lab import ExperimentFailed, JobSpec, Lab, run_job
from experiments.page import NOT_MEASURED, Claim, Page
from experiments.shared.charts import SERIES, Colours, Figure
from experiments.shared.machine import cores
from experiments.shared.pages import NONE, Table

WORKERS = 4
LOCAL_STEPS = 8
BATCH = 64  # A worker's batch has so many samples.
LEARNING_RATE = 0.04
RATES = (10, 100, 1_000)  # Mbit/s.
FREE = None  # Links without a rate, as fast as the processors.
ALIKE_BATCHES = 4  # So many are compared between all systems: the slowest makes no more in its shortest run.
_SLICE_ELEMENTS = 262_144  # The most that one server has in a piece.
_QUICK_AT_10 = ("bsp-4", "local-sgd-4", "mpi-ring")  # Mbit/s, in the quick form.
_EXCHANGES_MIN = 10
_WARM_UP = 2  # Exchanges that are left out: of connections that begin, and of memory that is touched first.
# Headers are 5 %; the first and the last weights, and what servers tell the chief, are the rest.
_BYTES_TOLERANCE = 0.15
_RATIO_TOLERANCE = 0.2
# With their colours.
_SHOWN_OVER_TIME = {"bsp-1": "quiet", "bsp-4": "bsp", "asp-1": "asp", "local-sgd-4": "local_sgd", "mpi-ring": "ssp"}


# ---- What is compared: who sums gradients, where servers are, and what a step must move


@dataclass(frozen=True)
class Network:
    """A fully connected one, on the central pixels of Fashion-MNIST's images."""

    crop: int
    widths: tuple[int, ...]

    @property
    def model(self) -> str:
        return "mlp:" + ",".join(map(str, self.widths))

    @property
    def flags(self) -> list[str]:
        return [f"--model={self.model}", "--dataset=fashion-mnist", f"--crop={self.crop}", f"--batch_size={BATCH}"]

    @property
    def _tensors(self) -> list[int]:
        return [size for inputs, outputs in pairwise(self.widths) for size in (inputs * outputs, outputs)]

    @property
    def model_bytes(self) -> int:
        """The weights are float32, and the gradients are as many."""
        return 4 * sum(self._tensors)

    def fullest_share(self, servers: int) -> float:
        """The part of the server that has most: slices go to the server with least so far, the largest first."""
        most = _SLICE_ELEMENTS
        slices = [min(most, size - begin) for size in self._tensors for begin in range(0, size, most)]
        load = [0] * servers
        for size in sorted(slices, reverse=True):
            load[load.index(min(load))] += size
        return max(load) / sum(load)


def network(lab: Lab) -> Network:
    """Four equal layers and a small one, so that four servers have equally much."""
    return lab.pick(Network(16, (256, 256, 256, 256, 256, 10)), Network(8, (64, 64, 64, 64, 64, 10)))


@dataclass(frozen=True)
class System:
    name: str  # Folders are named so.
    title: str
    mode: tuple[str, ...] = ()  # ps_server's flags; MPI has none.
    servers: int = 0
    colocated: bool = False  # Server k runs on the host of worker k.
    options: tuple[str, ...] = ()  # mpirun's.
    overlap: bool = True
    batches_per_exchange: int = 1

    @property
    def is_mpi(self) -> bool:
        return self.servers == 0

    @property
    def steps_alike(self) -> bool:
        """Whether each step is that of one large batch of all workers: the weights are those of all other such."""
        return self.is_mpi or "--mode=bsp" in self.mode

    def theory(self, of: Network) -> tuple[float, float] | None:
        """In models, what the fullest link carries one way for a batch of each worker, and as much the other way, which
        is the time of a step, too, if both ways are used at once; and its time if weights are sent when the gradients
        that they are made of have arrived. None where nothing says which algorithm is used.
        """
        if self.is_mpi:
            ring = 2 * (WORKERS - 1) / WORKERS
            return (ring, ring) if self.name == "mpi-ring" else None
        share = of.fullest_share(self.servers)
        if self.colocated:
            # As a worker it sends what others serve, and then as a server its part to all others; and receives as much.
            both = (1 - 1 / WORKERS) + (WORKERS - 1) * share
            return both, both
        busiest = max(1.0, WORKERS * share)  # A worker's link, or a server's.
        if "--mode=asp" in self.mode:
            # A worker sends, and then receives; others may do the opposite meanwhile.
            return busiest, max(2.0, busiest)
        return busiest / self.batches_per_exchange, 2 * busiest / self.batches_per_exchange


_MOMENTUM = ("--optimizer=momentum", "--momentum=0.9")
_BSP = ("--mode=bsp", *_MOMENTUM, f"--learning_rate={LEARNING_RATE}")
# Every push is a step, of which there are four times as many.
_ASP = ("--mode=asp", *_MOMENTUM, f"--learning_rate={LEARNING_RATE / WORKERS:g}")
_LOCAL = ("--mode=local_sgd", f"--local_steps={LOCAL_STEPS}", *_MOMENTUM, f"--learning_rate={LEARNING_RATE}")
SYSTEMS = {
    system.name: system
    for system in (
        System("bsp-1", "bsp, 1 server", _BSP, 1),
        System("asp-1", "asp, 1 server", _ASP, 1),
        System("bsp-4", "bsp, 4 servers", _BSP, 4),
        System("bsp-4-colocated", "bsp, 4 servers on the workers' hosts", _BSP, 4, colocated=True),
        System("local-sgd-4", f"local_sgd:{LOCAL_STEPS}, 4 servers", _LOCAL, 4, batches_per_exchange=LOCAL_STEPS),
        System("mpi-own", "MPI, its own choice", overlap=False),
        System("mpi-ring", "MPI, ring", options=RING, overlap=False),
        System("mpi-overlapped", "MPI, a sum for each tensor"),
    )
}


# ---- What is run


@dataclass
class Outcome:
    """A system over links of one rate."""

    losses: list[float]  # Each batch has one, the mean over workers.
    ends_s: list[float]  # When it was done, the mean over workers, since the first worker's first was.
    periods_s: list[float]  # The exchanges of all workers, each from one to the next, over its batches.
    fullest_bytes: int  # One way, over the link that carried most.
    accuracy: float | None = None  # The last weights have it on the test split. MPI's program does not evaluate.
    weights_hash: str = ""

    @property
    def batch_s(self) -> float:
        """From one batch of a worker to its next, on the average of an exchange; the median of exchanges."""
        return statistics.median(self.periods_s)

    @property
    def batches(self) -> int:
        return len(self.losses)


def rates(lab: Lab) -> tuple[int | None, ...]:
    return lab.pick((*RATES, FREE), (10, 1_000))


def systems(lab: Lab, rate: int | None) -> list[System]:
    found = [system for system in SYSTEMS.values() if not (system.is_mpi and why_no_mpi(lab))]
    return [system for system in found if not lab.quick or rate == 1_000 or system.name in _QUICK_AT_10]


def batches(lab: Lab, system: System, rate: int | None) -> int:
    """Each worker has as many as the rate has time for; at the highest one, an epoch's whole ones."""
    if rate is FREE:
        return 80
    if rate == 1_000:
        return lab.pick(232, 40)
    exchanges = {10: lab.pick(8, 4), 100: lab.pick(24, 4)}[rate]
    if system.servers == 1:
        exchanges = max(_EXCHANGES_MIN, exchanges // 2)  # Which takes several times as long.
    return exchanges * system.batches_per_exchange


def _measure(lab: Lab, hosts: Hosts, system: System) -> Outcome:
    rate = hosts.mbit_per_s
    name, steps = f"{system.name}-{'free' if rate is FREE else rate}", batches(lab, system, rate)
    return (_run_mpi if system.is_mpi else _run_job)(
        lab, hosts, system, name, [*network(lab).flags, f"--steps={steps}"]
    )


def _run_job(lab: Lab, hosts: Hosts, system: System, name: str, flags: list[str]) -> Outcome:
    first = 0 if system.colocated else WORKERS  # Host of server 0.
    spec = JobSpec(
        name,
        WORKERS,
        list(system.mode),
        flags,
        servers=system.servers,
        server_on=lambda shard: hosts.on(first + shard),
        worker_on=hosts.on,
        listen=lambda shard: hosts.listen(first + shard),
        hosts=hosts.description(),
    )
    path = lab.folder / name / "carried.json"
    if not path.exists():
        (lab.folder / name / "job.json").unlink(missing_ok=True)  # Stopped between the two: it runs again.
    before = hosts.carried()
    job = run_job(lab, spec)
    if not path.exists():  # It has run, in an empty folder.
        path.write_text((hosts.carried() - before).to_json(orient="records") + "\n")
    # An exchange ends with the last batch that goes into it.
    ends = job.steps.groupby(["rank", "step"])["unix_s"].max().groupby("rank")
    if ends.size().min() < _WARM_UP + 2:
        raise ExperimentFailed(f"{name}: too few exchanges in its metrics")
    periods = pd.concat([own.iloc[_WARM_UP:].diff().dropna() for _, own in ends]) / system.batches_per_exchange
    by_batch = job.steps.groupby(job.steps.groupby("rank").cumcount())
    zero_s = by_batch["unix_s"].min().iloc[0]
    return Outcome(
        by_batch["loss"].mean().tolist(),
        (by_batch["unix_s"].mean() - zero_s).tolist(),
        periods.tolist(),
        _fullest(json.loads(path.read_text())),
        job.last()["accuracy"],
        job.weights_hash(),
    )


def _fullest(carried: list[dict[str, int]]) -> int:
    """What went one way over the link that carried most."""
    return int(pd.DataFrame(carried).to_numpy().max())


def _run_mpi(lab: Lab, hosts: Hosts, system: System, name: str, flags: list[str]) -> Outcome:
    folder = lab.folder / name
    arguments = ["worker", str(LEARNING_RATE), *flags, f"--overlap={'true' if system.overlap else 'false'}"]
    identity = {"program": lab.file_hash(MPI_PROGRAM), "arguments": arguments, "options": system.options}
    identity["hosts"] = hosts.description()

    def make() -> dict[str, Any]:
        shutil.rmtree(folder, ignore_errors=True)
        before = hosts.carried()
        lines = run_ranks(lab, hosts, WORKERS, folder, arguments, system.options).splitlines()
        steps = [[float(field) for field in line.split()] for line in lines]
        return {"steps": steps, "carried": (hosts.carried() - before).to_dict("records")}

    kept = lab.once(name, folder / "mpi.json", identity, make)
    losses, ends_s = zip(*kept["steps"], strict=True)
    periods = [after - before for before, after in pairwise(ends_s[_WARM_UP:])]
    return Outcome(list(losses), [end_s - ends_s[0] for end_s in ends_s], periods, _fullest(kept["carried"]))


@dataclass
class Results:
    """Outcomes by rate and system."""

    of: Network
    outcomes: dict[int | None, dict[str, Outcome]]
    streams: dict[int, float]  # By rate, bytes per second of a plain TCP connection.
    no_mpi: str  # Why there are no ranks; empty if there are.
    cores: int = field(default_factory=lambda: len(cores()))

    @property
    def rates(self) -> list[int]:
        """That links have, ascending."""
        return sorted(rate for rate in self.outcomes if rate is not FREE)

    @property
    def slowest(self) -> int:
        """Where links matter most."""
        return self.rates[0]

    @property
    def longest(self) -> int:
        """The rate of the runs with most batches, in which beginning and end weigh least."""
        return self.rates[-1]

    @property
    def systems(self) -> list[System]:
        return [one for one in SYSTEMS.values() if self.no_mpi or one.name in self.outcomes[self.longest]]

    def get(self, rate: int | None, name: str) -> Outcome | None:
        """None if it was not measured."""
        return self.outcomes.get(rate, {}).get(name)

    def in_models(self, rate: int, name: str) -> float:
        """A batch's time, in that which the model takes over a link: payload alone."""
        return self.outcomes[rate][name].batch_s / (self.of.model_bytes * 8 / (rate * 1e6))

    def carried(self, name: str) -> float | None:
        """Models over the fullest link, one way, for each batch of a worker."""
        outcome = self.get(self.longest, name)
        return None if outcome is None else outcome.fullest_bytes / outcome.batches / self.of.model_bytes

    def gain(self) -> float:
        """By local steps over bsp on the slowest links."""
        at = self.outcomes[self.slowest]
        return at["bsp-4"].batch_s / at["local-sgd-4"].batch_s

    def deviation(self, name: str) -> float | None:
        """The largest relative one of its first batches' losses from those of bsp with one server."""
        ours, theirs = self.get(self.longest, "bsp-1"), self.get(self.longest, name)
        if ours is None or theirs is None:
            return None
        one, other = (np.array(outcome.losses[:ALIKE_BATCHES]) for outcome in (ours, theirs))
        return float((np.abs(one - other) / one).max())


def run(lab: Lab) -> Page:
    """Skipped where there are no network namespaces. MPI is left out where it is not."""
    outcomes, streams = {}, {}
    for rate in rates(lab):
        with Hosts(2 * WORKERS, rate) as hosts:
            outcomes[rate] = {system.name: _measure(lab, hosts, system) for system in systems(lab, rate)}
    for rate in rates(lab):
        if rate is not FREE:
            with Hosts(2, rate) as hosts:
                streams[rate] = stream_bytes_per_s(lab, hosts, lab.pick(3.0, 0.5))
    results = Results(network(lab), outcomes, streams, why_no_mpi(lab))
    alike = {outcomes[results.longest][name].weights_hash for name in ("bsp-1", "bsp-4", "bsp-4-colocated")}
    return Page(
        "Links: the same training over 10, 100 and 1,000 Mbit/s, beside MPI",
        _finding(results),
        "links.md.j2",
        expected=[
            *(_of_bytes(results, name, what) for name, what in _BYTES.items()),
            _of_local_steps(results),
            *(_of_ring(results, rate) for rate in results.rates if rate <= 100),
        ],
        expected_column="by the formula named",
        tables={
            "bytes": _bytes(results),
            "times": _times(results),
            "spread": _spread(results),
            "modes": _modes(results),
            "alike": _alike(results),
        },
        figures=[_times_figure(results), _losses_figure(results)],
        values={
            "of": results.of,
            "results": results,
            "burst": burst_bytes(results.slowest),
            "slow_ms": results.of.model_bytes * 8 / results.slowest / 1e3,
            "free": FREE in outcomes,
            "share": results.of.fullest_share(4),
            "streams": [(rate, one * 8 / (rate * 1e6)) for rate, one in sorted(streams.items())],
            "batches": outcomes[results.longest]["bsp-4"].batches,
            "equal": len(alike) == 1,
        },
    )


# ---- What formulas say, beside what was measured

_BYTES = {
    "bsp-1": f"models over the one server's link, each way, for a step of {WORKERS} workers (Li et al., 2014)",
    "bsp-4": "over the fullest link, with as many server hosts as workers (Jiang et al., 2020: 1 if all parts are "
    "equal)",
    "bsp-4-colocated": "the same, with the servers on the workers' hosts",
    "mpi-ring": "the same, of a ring allreduce (Patarasuk and Yuan, 2009: 2·(n - 1)/n)",
}


def _finding(results: Results) -> str:
    rate = 100 if 100 in results.rates else results.longest
    said = [
        f"{results.in_models(rate, f'bsp-{count}'):.1f} with {word}" for count, word in ((1, "one server"), (4, "four"))
    ]
    if ranks := [results.in_models(rate, name) for name in results.outcomes[rate] if SYSTEMS[name].is_mpi]:
        said.append(f"{min(ranks):.1f} with MPI's best")
    return (
        f"A step over {rate:,} Mbit/s takes, in times that the model takes over a link, {', '.join(said)}; over "
        f"{results.slowest} Mbit/s local_sgd:{LOCAL_STEPS} passes {results.gain():.1f} times as many batches as bsp."
    )


def _of_bytes(results: Results, name: str, what: str) -> Claim:
    moved, ours = SYSTEMS[name].theory(results.of), results.carried(name)
    assert moved is not None, name
    if ours is None:
        return Claim(what, f"{moved[0]:.2f}", NOT_MEASURED, None, f"MPI is {results.no_mpi}.")
    more = ours / moved[0] - 1
    agrees = -0.02 <= more <= _BYTES_TOLERANCE
    why = (
        f"Counted at the links, with {100 * more:.0f} % more than the weights and gradients alone: headers, and what "
        "begins and ends a training; up to 15 % are allowed."
        if agrees
        else f"It is {100 * more:+.0f} % off; 15 % more are allowed for headers and for what "
        "begins and ends a training."
    )
    return Claim(what, f"{moved[0]:.2f}", f"{ours:.2f}", agrees, why)


def _of_local_steps(results: Results) -> Claim:
    gain = results.gain()
    saved = results.carried("bsp-4") / results.carried("local-sgd-4")
    alone_ms = 1e3 * results.outcomes[results.longest]["local-sgd-4"].batch_s
    why = (
        f"At {results.slowest} Mbit/s; a fifth more or less is allowed. The links carried {saved:.1f} times less for "
        f"each batch, and at {results.longest:,} Mbit/s, where they matter little, a batch took {alone_ms:.1f} ms, "
        "computing included."
    )
    what = f"averaging after {LOCAL_STEPS} local steps (Stich, 2019): batches in the time of one, where the link sets"
    agrees = abs(gain / LOCAL_STEPS - 1) <= _RATIO_TOLERANCE
    return Claim(f"{what} the pace", f"{LOCAL_STEPS}", f"{gain:.1f}", agrees, why)


def _of_ring(results: Results, rate: int) -> Claim:
    what = f"{WORKERS} server hosts against a ring, over links of {rate:,} Mbit/s"
    published = "1.5 times as fast, by the bytes"
    ring, ours = results.get(rate, "mpi-ring"), results.get(rate, "bsp-4")
    if ring is None or ours is None:
        return Claim(what, published, NOT_MEASURED, None, f"MPI is {results.no_mpi}.")
    ratio = ring.batch_s / ours.batch_s
    agrees = ratio >= 1.5 * (1 - _RATIO_TOLERANCE)
    models = (
        f"A step took the time of {results.in_models(rate, 'bsp-4'):.2f} models over a link, the ring's of "
        f"{results.in_models(rate, 'mpi-ring'):.2f}"
    )
    why = (
        f"{models}; at least 1.2 times as fast counts as agreement. Each link carries the model once each way, and the "
        "ring's one and a half times."
        if agrees
        else f"{models}; at least 1.2 times as fast would count as agreement. For that, weights must be sent while "
        "gradients still arrive. Here a server sends weights when the step is complete, so that each link is used one "
        "way at a time, which is two models; the ring uses both ways from its beginning to its end."
    )
    return Claim(what, published, f"{ratio:.2f} times as fast", agrees, why)


# ---- Tables and figures


def _rate_name(rate: int | None) -> str:
    return "no limit" if rate is FREE else f"{rate:,} Mbit/s"


def _missing(results: Results, system: System) -> str:
    return f"MPI: {results.no_mpi}" if results.no_mpi and system.is_mpi else NOT_MEASURED


def _bytes(results: Results) -> Table:
    columns = ["system", "theory", "counted", "least time, both ways at once", "least time, one way after the other"]
    table = Table("Models over the fullest link, one way, for a batch of each worker", columns)
    for system in results.systems:
        moved, carried = system.theory(results.of), results.carried(system.name)
        one_way, in_turn = (NONE, NONE) if moved is None else (f"{each:.2f}" for each in moved)
        counted = _missing(results, system) if carried is None else f"{carried:.2f}"
        table.rows.append([system.title, one_way, counted, one_way, in_turn])
    return table


def _by_rate(caption: str, results: Results, cell: Callable[[int | None, System, Outcome], str]) -> Table:
    """A row for each system, a column for each rate."""
    table = Table(caption, ["system", *map(_rate_name, results.outcomes)])
    for system in results.systems:
        found = [(rate, results.get(rate, system.name)) for rate in results.outcomes]
        cells = [_missing(results, system) if one is None else cell(rate, system, one) for rate, one in found]
        table.rows.append([system.title, *cells])
    return table


def _times(results: Results) -> Table:
    def cell(rate: int | None, system: System, outcome: Outcome) -> str:
        models = "" if rate is FREE else f" ({results.in_models(rate, system.name):.2f})"
        return f"{_ms(outcome.batch_s)}{models}"

    caption = "Milliseconds of a batch, medians; in brackets, in times that the model takes over a link"
    return _by_rate(caption, results, cell)


def _spread(results: Results) -> Table:
    def cell(rate: int | None, system: System, outcome: Outcome) -> str:
        return f"{len(outcome.periods_s)}: {_ms(min(outcome.periods_s))} to {_ms(max(outcome.periods_s))}"

    caption = (
        "The exchanges of all workers that were timed (MPI: of rank 0): how many; shortest to longest, ms of a batch"
    )
    return _by_rate(caption, results, cell)


def _ms(seconds: float) -> str:
    value = 1e3 * seconds
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _modes(results: Results) -> Table:
    columns = ["system", "test accuracy", *(f"s at {_rate_name(rate)}" for rate in results.rates)]
    table = Table("What exchanging less strictly and less often gains and costs", columns)
    for name in ("bsp-1", "asp-1", "bsp-4", "local-sgd-4"):
        outcome = results.outcomes[results.longest][name]
        found = [results.get(rate, name) for rate in results.rates]
        seconds = [_seconds(outcome.batches * one.batch_s) if one else NOT_MEASURED for one in found]
        table.rows.append([SYSTEMS[name].title, f"{100 * outcome.accuracy:.1f} %", *seconds])
    return table


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _alike(results: Results) -> Table:
    table = Table("Losses and weights", ["system", "samples", "deviation", "weights hash"])
    for system in (one for one in results.systems if one.steps_alike):
        deviation, outcome = results.deviation(system.name), results.get(results.longest, system.name)
        row = [_missing(results, system), _missing(results, system), NONE]
        if deviation is not None and outcome is not None:
            samples = f"{outcome.batches * WORKERS * BATCH:,}"
            row = [samples, f"{deviation:.1e}", outcome.weights_hash[:8] or NONE]
        table.rows.append([system.title, *row])
    return table


def _times_figure(results: Results) -> Figure:
    shown = [system for system in results.systems if results.get(results.longest, system.name)][::-1]

    def draw(axes: Any, colours: Colours) -> None:
        for (rate, at), colour in zip(results.outcomes.items(), SERIES, strict=False):
            dots = [(1e3 * at[one.name].batch_s, place) for place, one in enumerate(shown) if one.name in at]
            look = {"color": colours[colour], "markersize": 6, "label": _rate_name(rate)}
            axes.plot(*zip(*dots, strict=True), "o", **look)
        axes.set_yticks(range(len(shown)), labels=[system.title for system in shown])
        axes.set_xscale("log")
        axes.grid(visible=True, axis="x", which="both")

    caption = (
        "Medians. The scale is logarithmic: where only links set the pace, dots of one row are a factor of ten apart."
    )
    more = {"height_inches": 1.2 + 0.3 * len(shown), "legend_columns": 4, "width_inches": 6.4}
    return Figure("times", "What a batch takes", caption, "milliseconds", "", draw, **more)


def _losses_figure(results: Results) -> Figure:
    rate = results.slowest

    def draw(axes: Any, colours: Colours) -> None:
        for name, system in SYSTEMS.items():
            if name in _SHOWN_OVER_TIME and (outcome := results.get(rate, name)):
                look = {"color": colours[_SHOWN_OVER_TIME[name]], "linewidth": 1.4, "marker": "."}
                axes.plot(outcome.ends_s, outcome.losses, **look, label=system.title)

    caption = (
        f"A dot is a batch, the mean over workers. In local_sgd:{LOCAL_STEPS} each worker's is of its own weights, and "
        "the long lines are the exchanges."
    )
    title, more = f"Training loss over time, {rate} Mbit/s", {"legend_columns": 2, "width_inches": 6.4}
    return Figure("losses", title, caption, "seconds since the first batch", "loss", draw, **more)
