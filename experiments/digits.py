"""Digits: the 400-25-10 sigmoid network on 5,000 MNIST digits, full batch, beside NumPy and beside a link's rate."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pandas as pd

from experiments import REPOSITORY
from experiments.hosts import Hosts, burst_bytes, stream_bytes_per_s
from experiments.lab import JobSpec, Lab, Skipped, run_job
from experiments.page import NOT_MEASURED, Claim, Page
from experiments.shared.charts import SERIES, Colours, Figure
from experiments.shared.data import IdxError, mnist_files
from experiments.shared.intervals import percentile
from experiments.shared.machine import cores
from experiments.shared.pages import Table, plural, sentence

WIDTHS = (400, 25, 10)
SAMPLES = 5_000
REFERENCE_RATE = 2.0
TIMED_RATE = 0.1
LINK_MBIT_PER_S = 1_000
TIMED_WORKERS = (1, 2, 4)
# In the full and the quick form: steps of the reference's training, and of one whose iterations are timed. The first,
# which is longer than others, is left out.
REFERENCE_STEPS = 1_000, 60
TIMED_STEPS = 61, 16
PARTS = {"forward": "compute", "backward": "idle", "exchange": "push"}  # With their colours.
MEMORY, LOOPBACK, LINK = "one host, shared memory", "one host, TCP", "hosts of their own, 1 Gbit/s"
LINK_MODEL = (2048, 2038, 10)  # 16 MiB, by which the link is filled.
# An iteration makes two for each weight and sample forward, as many for the weights' gradients, and, but for the first
# layer, as many for the gradients that are handed on.
OPERATIONS = 2 * SAMPLES * (2 * WIDTHS[0] * WIDTHS[1] + 3 * WIDTHS[1] * WIDTHS[2])
AGREEMENT = 1e-3  # Costs differ by so much at most, relatively.
_ONE_SAMPLE = 1 / SAMPLES
_PROCESSES_OF_TWO = 3  # Two workers, and the server on the first one's machine.
_PUBLISHED_ITERATIONS = 1_000
_PUBLISHED_CPU_S = (0.55, 0.38)  # An iteration on one machine, and on two.
_PUBLISHED_RATIO = _PUBLISHED_CPU_S[0] / _PUBLISHED_CPU_S[1]
_PUBLISHED_GPU_S = (1.75, 1.00)
_PUBLISHED_LINK_MB_PER_S = 118.0
_RATIO_TOLERANCE = 0.2
_LINK_TOLERANCE = 0.1
_REFERENCE = REPOSITORY / "tests/data/reference"


# ---- What is run


@dataclass(frozen=True)
class Digits:
    """Which images are trained on, and the flags for them."""

    name: str
    flags: list[str]

    @property
    def is_mnist(self) -> bool:
        """Whether they are the reference's."""
        return self.name == "MNIST"


def find_digits(lab: Lab) -> Digits:
    """MNIST, or, where it is not there, Fashion-MNIST. Skipped if neither is.

    The test split is the training split, so that the accuracy is that on the training samples, as published.
    """
    for name, dataset, data_dir in (("MNIST", "mnist", lab.data_dir), ("Fashion-MNIST", "fashion-mnist", "")):
        try:
            images, labels = mnist_files(dataset, data_dir)["train"]
        except IdxError:
            continue
        return Digits(name, [f"--dataset=idx:{images},{labels}", "--crop=20", f"--samples_per_class={SAMPLES // 10}"])
    raise Skipped(
        "neither MNIST (its four IDX files in a folder mnist, whose parent --data_dir or PS_DATA_DIR names) nor "
        "Fashion-MNIST (Debian's package dataset-fashion-mnist) is here"
    )


def model_bytes(widths: tuple[int, ...]) -> int:
    """What a fully connected network's weights and biases weigh."""
    return 4 * sum(inputs * outputs + outputs for inputs, outputs in pairwise(widths))


def model_flag(widths: tuple[int, ...]) -> str:
    return "mlp:" + ",".join(map(str, widths))


@dataclass
class Curve:
    """A training with the reference's settings, step by step; of NumPy, with no workers."""

    workers: int
    cost: pd.Series  # Before each step, over all workers' samples.
    accuracy: pd.Series  # After so many steps.


@dataclass
class Results:
    """What was measured; a part that this machine could not run is empty."""

    digits: Digits
    numpy: Curve
    curves: list[Curve] = field(default_factory=list)
    # By place and number of workers: the iterations of all rounds and workers, without each worker's first.
    timings: dict[tuple[str, int], pd.DataFrame] = field(default_factory=dict)
    filled: tuple[float, float] | None = None  # Bytes/s of an exchange over the link, and of a plain TCP connection.
    no_link: str = ""  # Why nothing was measured over links.
    cores: int = field(default_factory=lambda: len(cores()))

    def median_ms(self, place: str, workers: int) -> pd.Series:
        """An iteration's parts, its total, and `computing`."""
        found = 1e3 * self.timings[place, workers][["forward", "backward", "exchange", "total"]].median()
        return pd.concat([found, pd.Series({"computing": found["forward"] + found["backward"]})])

    @property
    def speed_up(self) -> float | None:
        """One worker's iteration on one host over that of two on hosts of their own; None if it was not measured."""
        if (LINK, 2) not in self.timings:
            return None
        return self.median_ms(MEMORY, 1)["total"] / self.median_ms(LINK, 2)["total"]

    @property
    def is_lower_bound(self) -> bool:
        """Whether the processes of two machines share cores, which on two machines they would not."""
        return self.cores < _PROCESSES_OF_TWO

    def deviation(self, curve: Curve) -> float:
        """The largest relative one of the curve's costs from NumPy's."""
        return float((curve.cost / self.numpy.cost - 1).abs().max())

    def accuracies(self, curve: Curve) -> pd.DataFrame:
        """By steps: `ours` and NumPy's, at each number of steps that both have."""
        return pd.DataFrame({"ours": curve.accuracy, "theirs": self.numpy.accuracy}).dropna()


def _numpy() -> Curve:
    """The trace that the tests have. Its key n is the accuracy before step n, counted from 1."""
    trace = json.loads((_REFERENCE / "dt42_trace.json").read_text())
    accuracy = {int(key) - 1: value for key, value in trace["accuracy_before_step"].items()}
    return Curve(0, pd.Series(trace["cost_before_step"]), pd.Series(accuracy))


def _training(digits: Digits, steps: int) -> list[str]:
    network = [f"--model={model_flag(WIDTHS)}", "--activation=sigmoid", "--loss=sigmoid_cross_entropy"]
    initial = f"--init_weights={_REFERENCE / 'dt42_init.safetensors'}"
    return [*digits.flags, *network, initial, "--batch_size=full", "--shuffle=false", f"--steps={steps}"]


def _follow(lab: Lab, digits: Digits, workers: int) -> Curve:
    flags = [*_training(digits, lab.pick(*REFERENCE_STEPS)), "--eval_every=1"]
    rate = f"--learning_rate={REFERENCE_RATE}"
    job = run_job(lab, JobSpec(f"reference-{workers}", workers, [rate], flags, shared_memory=True))
    # A step's cost is over the samples of all workers.
    steps = job.steps.assign(sum=job.steps["loss"] * job.steps["samples"]).groupby("step")[["sum", "samples"]].sum()
    accuracy = {event["step"]: event["accuracy"] for event in job.evaluations()}
    return Curve(workers, steps["sum"] / steps["samples"], pd.Series(accuracy))


def _time(
    lab: Lab, digits: Digits, places: Sequence[str], hosts: Hosts | None = None
) -> dict[tuple[str, int], pd.DataFrame]:
    """All setups by turns. Over links each worker is on a host of its own; the server is on the first one's, or, of one
    worker, on another.
    """
    server = [f"--learning_rate={TIMED_RATE}"]
    worker = [*_training(digits, lab.pick(*TIMED_STEPS)), "--overlap=false"]
    found = {(place, workers): [] for place in places for workers in TIMED_WORKERS}
    for number in range(lab.pick(5, 1)):
        for (place, workers), rounds in found.items():
            name = f"{ {MEMORY: 'memory', LOOPBACK: 'loopback', LINK: 'link'}[place] }-{workers}-r{number}"
            on = {} if hosts is None else _on(hosts, shift=1 if workers == 1 else 0)
            spec = JobSpec(name, workers, server, worker, shared_memory=place == MEMORY, **on)
            rounds.append(run_job(lab, spec).iterations.assign(round=number))
    return {setup: pd.concat(rounds) for setup, rounds in found.items()}


def _on(hosts: Hosts, shift: int) -> dict[str, Any]:
    """Where a job's processes run: the server on host 0."""
    return {
        "server_on": lambda shard: hosts.on(0),
        "worker_on": lambda rank: hosts.on(rank + shift),
        "listen": lambda shard: hosts.listen(0),
        "hosts": hosts.description(),
    }


def _fill_link(lab: Lab, hosts: Hosts) -> tuple[float, float]:
    """Exchanges a large model between a worker and a server on two hosts: there and back, over the median time."""
    data = f"--dataset=synthetic:samples=100,features={LINK_MODEL[0]},classes={LINK_MODEL[-1]},test=10"
    length = [f"--model={model_flag(LINK_MODEL)}", "--batch_size=1", f"--steps={lab.pick(40, 4)}", "--overlap=false"]
    spec = JobSpec("filled", 1, ["--learning_rate=0.001"], [data, *length], **_on(hosts, shift=1))
    exchange_s = float(run_job(lab, spec).iterations["exchange"].median())
    return 2 * model_bytes(LINK_MODEL) / exchange_s, stream_bytes_per_s(lab, hosts, lab.pick(5.0, 0.5))


def run(lab: Lab) -> Page:
    """Skipped where neither MNIST nor Fashion-MNIST is."""
    digits = find_digits(lab)
    results = Results(digits, _numpy())
    if digits.is_mnist:
        results.curves = [_follow(lab, digits, workers) for workers in lab.pick(TIMED_WORKERS, (1, 4))]
    results.timings = _time(lab, digits, [MEMORY, LOOPBACK])
    try:
        with Hosts(max(TIMED_WORKERS), LINK_MBIT_PER_S) as hosts:
            results.timings |= _time(lab, digits, [LINK], hosts)
            results.filled = _fill_link(lab, hosts)
    except Skipped as skipped:
        results.no_link = str(skipped)
        lab.say(f"without links: {skipped}")
    return Page(
        "Digits: 1,000 iterations beside NumPy, and where an iteration's time goes",
        _finding(results),
        "digits.md.j2",
        [*_of_other_digits(results), _of_cpus(results), _of_gpus(), _of_link(results)],
        _beside_numpy(results),
        "by NumPy, on the same digits",
        {"curves": _curves(results), "times": _times(results), "link": _payload(results)},
        [*([_cost_figure(results)] if results.curves else []), _parts_figure(results), _iterations_figure(results)],
        {
            "results": results,
            "burst": burst_bytes(LINK_MBIT_PER_S),
            "accuracy_steps": [number for one in results.curves[:1] for number in results.accuracies(one).index],
            "computing_ms": results.median_ms(MEMORY, 1)["computing"],
            "wire_ms": 1e3 * model_bytes(WIDTHS) / (LINK_MBIT_PER_S * 1e6 / 8),
        },
    )


# ---- What is said of it


def _finding(results: Results) -> str:
    said = []
    if results.curves:
        within = _rounded_up(max(map(results.deviation, results.curves)))
        said.append(f"the cost is within {within} of NumPy's at each of {len(results.curves[0].cost):,} iterations")
    if results.speed_up is not None:
        ours = f"{results.speed_up:.2f} times as fast as one (published: {_PUBLISHED_RATIO:.2f})"
        where = f"two hosts on one machine of {plural(results.cores, 'core')}"
        said.append(f"{where if results.is_lower_bound else 'two machines'} are {ours}")
    if results.filled is not None:
        said.append(f"an exchange moves {results.filled[0] / 1e6:.0f} MB/s over 1 Gbit/s")
    return sentence("; ".join(said) or "the times of an iteration's parts on one host")


def _rounded_up(value: float) -> str:
    """To two digits, so that "within" holds."""
    if value <= 0:
        return "0"
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return f"{math.ceil(value / unit - 1e-6) * unit:.1e}"


def _beside_numpy(results: Results) -> list[Claim]:
    """What NumPy found on the same digits."""
    if not results.curves:
        missing = (NOT_MEASURED, None, "MNIST is not on this machine.")
        last = (("cost of the last iteration", "0.2065"), ("accuracy of the last iteration", "98.4 %"))
        return [Claim(what, theirs, *missing) for what, theirs in last]
    curve = results.curves[0]
    last = len(curve.cost) - 1
    worst = max(map(results.deviation, results.curves))
    close = worst <= AGREEMENT
    why = (
        f"All costs, with each number of workers, are within {_rounded_up(worst)} of NumPy's; {AGREEMENT:g} is "
        "allowed. The samples and the initial weights are the same; the arithmetic differs in rounding, since NumPy's "
        "trace is in float64, and this is in float32."
        if close
        else f"A cost is {worst:.1e} away from NumPy's; {AGREEMENT:g} is allowed. Nothing but rounding should differ."
    )
    cost = (f"{results.numpy.cost[last]:.4f}", f"{curve.cost[last]:.4f}")
    last_ones = [results.accuracies(one).iloc[-1] for one in results.curves]
    steps, theirs, ours = last_ones[0].name, last_ones[0]["theirs"], [one["ours"] for one in last_ones]
    same = all(abs(each - theirs) <= _ONE_SAMPLE * 1.01 for each in ours)
    said = "to within one sample with each number of workers." if same else "it differs by more than one sample."
    accuracy = (f"{100 * theirs:.2f} %", f"{100 * ours[0]:.2f} %")
    return [
        Claim(f"cost before iteration {last + 1:,}", *cost, close, why),
        Claim(f"accuracy before iteration {steps + 1:,}", *accuracy, same, f"On the 5,000 training samples, {said}"),
    ]


def _of_other_digits(results: Results) -> list[Claim]:
    """For the whole training alone."""
    if not results.curves or len(results.curves[0].cost) < _PUBLISHED_ITERATIONS:
        return []
    curve = results.curves[0]
    cost, accuracy = curve.cost[_PUBLISHED_ITERATIONS - 1], results.accuracies(curve)["ours"].iloc[-1]
    why = "These were other digits: a reference, no target. Ours is that before the last iteration."
    after = f"after {_PUBLISHED_ITERATIONS:,} iterations"
    return [
        Claim(f"cost of the training samples, their mean cross-entropy, {after}", "0.25", f"{cost:.4f}", None, why),
        Claim(f"accuracy on the training samples {after}", "97 %", f"{100 * accuracy:.1f} %", None, why),
    ]


def _of_cpus(results: Results) -> Claim:
    what = "an iteration on one machine and on two, CPUs"
    one_s, two_s = _PUBLISHED_CPU_S
    published = f"{one_s} → {two_s:.2f} s ({_PUBLISHED_RATIO:.2f} times as fast)"
    speed_up = results.speed_up
    if speed_up is None:
        return Claim(what, published, NOT_MEASURED, None, sentence(results.no_link))
    one, two = results.median_ms(MEMORY, 1), results.median_ms(LINK, 2)
    agrees: bool | None = abs(speed_up / _PUBLISHED_RATIO - 1) <= _RATIO_TOLERANCE
    least = results.is_lower_bound
    if least and speed_up < _PUBLISHED_RATIO:
        agrees = None
    why = (
        "Compared are the ratios, which may differ by a fifth: the processors are others, so seconds cannot agree. "
        f"Computing, which each machine does on its share of the samples, went from {one['computing']:.2f} to "
        f"{two['computing']:.2f} ms; the exchange of {model_bytes(WIDTHS) / 1e3:.0f} KB each way, which one machine "
        f"has in its own memory, from {one['exchange']:.2f} to {two['exchange']:.2f} ms. The "
        f"published iteration took {1e3 * one_s / one['total']:.0f} times as long as ours, so that as long an exchange "
        "weighed that much less in it. Half the computing, with the same exchange, would be "
        f"{one['total'] / (one['total'] - one['computing'] / 2):.2f} times as fast."
    )
    if least:
        why += (
            f" These are two hosts on one machine of {plural(results.cores, 'core')}, which two workers and the server "
            "share, so that this is the least that two machines have."
        )
    times = f"{'at least ' * least}{speed_up:.2f} times as fast"
    return Claim(what, published, f"{one['total']:.2f} → {two['total']:.2f} ms ({times})", agrees, why)


def _of_gpus() -> Claim:
    one_s, two_s = _PUBLISHED_GPU_S
    published = f"{one_s} → {two_s:.2f} s ({one_s / two_s:.2f} times as fast)"
    why = "No GPU of this project's has run it."
    return Claim("an iteration on one machine and on two, GPUs", published, NOT_MEASURED, None, why)


def _of_link(results: Results) -> Claim:
    what, published = "what an exchange takes of a link of 1 Gbit/s", f"{_PUBLISHED_LINK_MB_PER_S:.0f} MB/s"
    if results.filled is None:
        return Claim(what, published, NOT_MEASURED, None, sentence(results.no_link))
    ours, stream = (rate / 1e6 for rate in results.filled)
    agrees = abs(ours / _PUBLISHED_LINK_MB_PER_S - 1) <= _LINK_TOLERANCE
    why = (
        "One worker's exchanges of 16 MiB each way: its iterations without forward and backward; it may differ by a "
        f"tenth. A plain TCP connection carried {stream:.0f} MB/s over this link, which counts IP's and TCP's headers "
        "and not all of Ethernet's: 118 MB/s are what TCP has left of 1 Gbit/s in packets of 1,500 bytes."
    )
    if not agrees:
        why += " The rest of an exchange's time is the server's update, and what is not sent while that goes on."
    return Claim(what, published, f"{ours:.0f} MB/s", agrees, why)


# ---- Tables and figures


def _curves(results: Results) -> Table:
    columns = ["workers", "last cost", "NumPy's", "largest deviation", "accuracies, % (NumPy's)"]
    table = Table("Costs and accuracies beside NumPy's", columns)
    for curve in results.curves:
        last = len(curve.cost) - 1
        costs = [f"{each.cost[last]:.6f}" for each in (curve, results.numpy)]
        percent = 100 * results.accuracies(curve)
        both = [f"{one.ours:.2f} ({one.theirs:.2f})" for one in percent.itertuples()]
        table.rows.append([str(curve.workers), *costs, f"{results.deviation(curve):.1e}", "; ".join(both)])
    return table


def _times(results: Results) -> Table:
    columns = ["where", "workers", *PARTS, "total", "times as fast as one"]
    table = Table("Milliseconds of an iteration, medians", columns)
    alone = results.median_ms(MEMORY, 1)
    for place, workers in results.timings:
        ms = results.median_ms(place, workers)
        parts = ms[[*PARTS, "total"]].map("{:.2f}".format)
        table.rows.append([place, str(workers), *parts, f"{alone['total'] / ms['total']:.2f}"])
    if results.no_link:
        table.rows += [[LINK, str(number), *[NOT_MEASURED] * (len(PARTS) + 2)] for number in TIMED_WORKERS]
    return table


def _payload(results: Results) -> Table:
    table, rate = Table("Payload over a link of 1 Gbit/s", ["what", "MB/s", "of 1 Gbit/s"]), LINK_MBIT_PER_S * 1e6 / 8
    names = ("an exchange, there and then back", "a plain TCP connection, one way")
    for name, one in reversed(list(zip(names, results.filled or (), strict=False))):
        table.rows.append([name, f"{one / 1e6:.1f}", f"{100 * one / rate:.0f} %"])
    return table


def _cost_figure(results: Results) -> Figure:
    def draw(axes: Any, colours: Colours) -> None:
        ours = results.curves[0].cost
        axes.plot(ours, color=colours[SERIES[0]], linewidth=3.2, alpha=0.5, label="ours, 1 worker")
        axes.plot(results.numpy.cost[: len(ours)], color=colours[SERIES[1]], linewidth=1, label="NumPy")
        axes.set_yscale("log")
        axes.set_yticks([0.2, 0.5, 1, 2, 5], labels=["0.2", "0.5", "1", "2", "5"])
        axes.minorticks_off()

    caption = "The cost of one worker's training, and NumPy's drawn over it, which hides it where both are the same."
    return Figure("cost", "Cost over iterations", caption, "iterations", "cost (logarithmic)", draw)


def _parts_figure(results: Results) -> Figure:
    shown = list(results.timings)[::-1]

    def draw(axes: Any, colours: Colours) -> None:
        labels = [f"{place}: {workers}" for place, workers in shown]
        widths = pd.DataFrame([results.median_ms(*setup) for setup in shown])[list(PARTS)]
        left = widths.cumsum(axis=1) - widths
        for part, colour in PARTS.items():
            axes.barh(labels, widths[part], left=left[part], color=colours[colour], label=part)
        axes.grid(visible=False, axis="y")

    caption = "Medians of each part; behind the place, the number of workers."
    size = {"height_inches": 1.0 + 0.3 * len(shown), "width_inches": 6.4}
    return Figure("parts", "The parts of an iteration", caption, "milliseconds", "", draw, **size)


def _iterations_figure(results: Results) -> Figure:
    shown = LINK if results.filled else MEMORY

    def draw(all_axes: list[Any], colours: Colours) -> None:
        for axes, workers in zip(all_axes, TIMED_WORKERS, strict=True):
            found = results.timings[shown, workers]
            first = found[(found["round"] == 0) & (found["rank"] == 0)]
            parts, shades = [1e3 * first[part] for part in PARTS], [colours[colour] for colour in PARTS.values()]
            numbers = range(2, len(first) + 2)
            axes.stackplot(numbers, parts, labels=list(PARTS), colors=shades, step="mid", linewidth=0)
            axes.set_title(plural(workers, "worker"), loc="left")
            axes.set_ylim(0, 1.2e3 * (percentile(first["total"].tolist(), 0.95) or 0))

    caption = (
        "The iterations of rank 0 in the first round, without the very first. Where a bar leaves the panel, something "
        "else had the processor."
    )
    title, more = f"Each iteration, {shown}", {"height_inches": 5.2, "panels": len(TIMED_WORKERS)}
    return Figure("iterations", title, caption, "iteration", "ms", draw, **more)
