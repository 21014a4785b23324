"""The jobs of the processes experiment: the same network by so many processes with so many threads each."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from .job import JobResult, JobSpec, run_job
from .lab import Lab
from .network import BATCH, FLAGS, SERVER_FLAGS

# Of all processes together. A slow setup runs fewer than a fast one, and all are scaled to the same work.
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
    def plain(self) -> bool:
        """One of the grid's, and no variant."""
        return self.shared_memory and not self.passive

    @property
    def name(self) -> str:
        """Of its folders."""
        return f"p{self.processes}-t{self.threads}{'' if self.shared_memory else '-tcp'}{'-passive' * self.passive}"


@dataclass
class Measured:
    """A setup's rounds. A value of each, but for `first_hash`."""

    setup: Setup
    batches: int  # Of all processes together, in a round.
    first_hash: str  # Of the weights after the first short run, which has as many batches in every setup.
    samples_per_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)  # Of a batch.
    busy: list[float] = field(default_factory=list)  # Share of all cores.
    handovers: list[float] = field(default_factory=list)  # Of a batch.

    @property
    def seconds(self) -> list[float]:
        """For WORK."""
        return [WORK * BATCH / rate for rate in self.samples_per_s]

    def add(self, job: JobResult) -> None:
        """A round."""
        rate, training_s = job.samples_per_s(), job.training_s()
        self.samples_per_s.append(rate)
        self.cpu_s.append(job.training_cpu_s / (rate * training_s / BATCH))
        self.busy.append(job.training_cpu_s / (training_s * cores()))
        self.handovers.append(sum(used.handovers for used in job.used.values()) / self.batches)


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))


def numbers(lab: Lab) -> tuple[int, ...]:
    """Of processes, and of threads beside those of all cores."""
    return lab.pick((1, 2, 4, 8), (1, 2, 8))


def rounds(lab: Lab) -> int:
    """How often each setup runs, by turns."""
    return lab.pick(4, 1)


def first_batches(lab: Lab) -> int:
    """Of a first short run, which decides how many the rounds have."""
    return lab.pick(80, 24)


def setups(lab: Lab) -> list[Setup]:
    """All products; one thread each over TCP; and all cores' threads each that do not look again and again."""
    processes, threads = numbers(lab), sorted({*numbers(lab), cores()})
    return [
        *(Setup(count, each) for count in processes for each in threads),
        *(Setup(count, 1, shared_memory=False) for count in processes),
        *(Setup(count, cores(), passive=True) for count in processes),
    ]


def measure(lab: Lab) -> list[Measured]:
    """A first short run of every setup, then every setup once in each round."""
    found = []
    for setup in setups(lab):
        first = run_job(lab, _spec(setup, "first", first_batches(lab)))
        batches = lab.pick(_enough(lab, first.samples_per_s()), first_batches(lab))
        found.append(Measured(setup, batches, first.weights_hash()))
    for number in range(1, rounds(lab) + 1):
        for one in found:
            # A first run of as many batches is a round.
            first = number == 1 and one.batches == first_batches(lab)
            one.add(run_job(lab, _spec(one.setup, "first" if first else f"r{number}", one.batches)))
    return found


def _enough(lab: Lab, samples_per_s: float) -> int:
    """Batches for _PIECE_S, in multiples of what the first run had."""
    least = first_batches(lab)
    return max(1, min(int(samples_per_s * _PIECE_S / BATCH), _BATCHES_MAX) // least) * least


def _spec(setup: Setup, part: str, batches: int) -> JobSpec:
    steps = batches // setup.processes
    return JobSpec(
        f"{setup.name}-{part}",
        setup.processes,
        list(SERVER_FLAGS),
        [*FLAGS, f"--batch_size={BATCH}", f"--steps={steps}", f"--threads={setup.threads}"],
        worker_on=lambda rank: ["env", "OMP_WAIT_POLICY=PASSIVE"] if setup.passive else [],
        shared_memory=setup.shared_memory,
    )
