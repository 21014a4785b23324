"""The jobs of the digits experiment, and what is taken from them."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from itertools import pairwise

from events import Event
from idx_files import IdxError, mnist_files

from . import REPOSITORY
from .hosts import Hosts
from .job import JobResult, JobSpec, run_job
from .lab import Lab, Skipped
from .link_stream import stream_bytes_per_s

WIDTHS = (400, 25, 10)
SAMPLES = 5_000
REFERENCE_RATE = 2.0
TIMED_RATE = 0.1
LINK_MBIT_PER_S = 1_000
TIMED_WORKERS = (1, 2, 4)
PARTS = ("forward", "backward", "exchange")
MEMORY, LOOPBACK, LINK = "one host, shared memory", "one host, TCP", "hosts of their own, 1 Gbit/s"
LINK_MODEL = (2048, 2038, 10)  # 16 MiB, by which the link is filled.

_REFERENCE = REPOSITORY / "tests/data/reference"


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


def elements(widths: tuple[int, ...]) -> int:
    """Of a fully connected network's weights and biases."""
    return sum(inputs * outputs + outputs for inputs, outputs in pairwise(widths))


@dataclass
class Curve:
    """What a job with the reference's settings left, step by step."""

    workers: int
    cost: list[float]  # Before each step, over all workers' samples.
    accuracy: dict[int, float]  # After so many steps.
    weights_hash: str


@dataclass
class Reference:
    """What NumPy left."""

    cost: list[float]  # Before each step.
    accuracy: dict[int, float]  # After so many steps.


def reference() -> Reference:
    """The trace that the tests have."""
    trace = json.loads((_REFERENCE / "dt42_trace.json").read_text())
    # Its key n is the accuracy before step n, counted from 1.
    accuracy = {int(key) - 1: value for key, value in trace["accuracy_before_step"].items()}
    return Reference(trace["cost_before_step"], accuracy)


def reference_steps(lab: Lab) -> int:
    """Of the training beside NumPy's."""
    return lab.pick(1_000, 60)


def timed_steps(lab: Lab) -> int:
    """Of a training whose iterations are timed. The first one, which is longer than others, is left out."""
    return lab.pick(61, 16)


def follow_reference(lab: Lab, digits: Digits) -> list[Curve]:
    """The reference's training with 1, 2 and 4 workers."""
    return [_follow(lab, digits, workers) for workers in lab.pick(TIMED_WORKERS, (1, 4))]


def _follow(lab: Lab, digits: Digits, workers: int) -> Curve:
    spec = JobSpec(
        f"reference-{workers}",
        workers,
        [f"--learning_rate={REFERENCE_RATE}"],
        [*_training(digits, reference_steps(lab)), "--eval_every=1"],
        shared_memory=True,
    )
    job = run_job(lab, spec)
    accuracy = {event["step"]: event["accuracy"] for event in job.evaluations()}
    return Curve(workers, mean_losses(job), accuracy, job.weights_hash())


def _training(digits: Digits, steps: int) -> list[str]:
    model = "mlp:" + ",".join(map(str, WIDTHS))
    network = [f"--model={model}", "--activation=sigmoid", "--loss=sigmoid_cross_entropy"]
    initial = f"--init_weights={_REFERENCE / 'dt42_init.safetensors'}"
    return [*digits.flags, *network, initial, "--batch_size=full", "--shuffle=false", f"--steps={steps}"]


def mean_losses(job: JobResult) -> list[float]:
    """Of each step, over the samples of all workers."""
    by_step = zip(*(job.steps(rank) for rank in range(len(job.workers))), strict=True)
    return [sum(one["loss"] * one["samples"] for one in own) / sum(one["samples"] for one in own) for own in by_step]


@dataclass(frozen=True)
class Iteration:
    """Where the time of one worker's iteration went, in seconds."""

    forward: float  # With gathering the batch's samples, during which the exchange before it may go on.
    backward: float
    total: float

    @property
    def exchange(self) -> float:
        """The rest. `push_s` and so on do not have what the training thread itself spends on sending."""
        return max(0.0, self.total - self.forward - self.backward)


@dataclass
class Timing:
    """Some workers in one place: the iterations of all rounds and workers, without each worker's first."""

    place: str
    workers: int
    iterations: list[Iteration] = field(default_factory=list)
    first_round: list[Iteration] = field(default_factory=list)  # Of rank 0.
    last_losses: list[float] = field(default_factory=list)  # Of each round.

    def median_ms(self, part: str) -> float:
        """Of an iteration's part, or of its total."""
        return 1e3 * statistics.median(getattr(each, part) for each in self.iterations)

    def add(self, job: JobResult) -> None:
        """A round."""
        by_rank = [_iterations(job.steps(rank)) for rank in range(self.workers)]
        self.iterations += [each for own in by_rank for each in own]
        self.first_round = self.first_round or by_rank[0]
        self.last_losses.append(mean_losses(job)[-1])


def _iterations(steps: list[Event]) -> list[Iteration]:
    return [Iteration(now["forward_s"], now["backward_s"], now["t"] - before["t"]) for before, now in pairwise(steps)]


def time_one_host(lab: Lab, digits: Digits) -> list[Timing]:
    """Through shared memory and over TCP, all setups by turns."""
    found = [Timing(place, workers) for place in (MEMORY, LOOPBACK) for workers in TIMED_WORKERS]
    for number in range(_rounds(lab)):
        for one in found:
            name = f"{'memory' if one.place == MEMORY else 'loopback'}-{one.workers}-r{number}"
            spec = JobSpec(name, one.workers, *_timed(lab, digits), shared_memory=one.place == MEMORY)
            one.add(run_job(lab, spec))
    return found


def time_hosts(lab: Lab, digits: Digits, hosts: Hosts) -> list[Timing]:
    """Over links, each worker on a host of its own; the server is on the first one's, or, of one worker, on another."""
    found = [Timing(LINK, workers) for workers in TIMED_WORKERS]
    for number in range(_rounds(lab)):
        for one in found:
            shift = 1 if one.workers == 1 else 0
            spec = JobSpec(
                f"link-{one.workers}-r{number}",
                one.workers,
                *_timed(lab, digits),
                server_on=lambda shard: hosts.on(0),
                worker_on=lambda rank, shift=shift: hosts.on(rank + shift),
                listen=lambda shard: listen_on(hosts, 0),
                hosts=hosts.description(),
            )
            one.add(run_job(lab, spec))
    return found


def listen_on(hosts: Hosts, host: int) -> list[str]:
    """A server's flags, to be reached from other hosts."""
    return [f"--listen={hosts.address(host)}:5000", "--insecure"]


def _timed(lab: Lab, digits: Digits) -> tuple[list[str], list[str]]:
    """The servers' and the workers' flags."""
    return [f"--learning_rate={TIMED_RATE}"], [*_training(digits, timed_steps(lab)), "--overlap=false"]


def _rounds(lab: Lab) -> int:
    return lab.pick(5, 1)


@dataclass
class Filled:
    """How fast an exchange over the link is, and what else is known of that."""

    exchange_bytes_per_s: float  # The model there and back, over the median of the iterations' exchanges.
    stream_bytes_per_s: float  # Of a plain TCP connection.


def fill_link(lab: Lab, hosts: Hosts) -> Filled:
    """Exchanges a large model between a worker and a server on two hosts."""
    model = "mlp:" + ",".join(map(str, LINK_MODEL))
    data = f"--dataset=synthetic:samples=100,features={LINK_MODEL[0]},classes={LINK_MODEL[-1]},test=10"
    spec = JobSpec(
        "filled",
        1,
        ["--learning_rate=0.001"],
        [data, f"--model={model}", "--batch_size=1", f"--steps={lab.pick(40, 4)}", "--overlap=false"],
        server_on=lambda shard: hosts.on(0),
        worker_on=lambda rank: hosts.on(1),
        listen=lambda shard: listen_on(hosts, 0),
        hosts=hosts.description(),
    )
    exchange_s = statistics.median(each.exchange for each in _iterations(run_job(lab, spec).steps()))
    moved = 2 * 4 * elements(LINK_MODEL)
    return Filled(moved / exchange_s, stream_bytes_per_s(lab, hosts, lab.pick(5.0, 0.5)))
