"""The jobs of the scaling experiment: fixed work for more and more workers, on cores of their own or idling."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from .job import JobResult, JobSpec, run_job
from .lab import Lab
from .network import BATCH, FLAGS, SAMPLES, SERVER_FLAGS

PLAYED_BATCHES = (BATCH, 10 * BATCH)
STAND_IN = 10  # Samples of a batch whose worker idles for the rest of a played batch's time.
BUSY_SHARE = 0.70  # As compare has it: beyond this share of all cores they may set the pace.


@dataclass(frozen=True)
class Setup:
    """What is the same in all rounds."""

    workers: int
    batch: int  # Of each worker; in the idle-time form the one that is played.
    shared_memory: bool
    server_alone: bool = False  # In the form on real cores: the server has a core to itself.
    idle: bool = False

    @property
    def of_one(self) -> Setup:
        """The setup that its speed-up refers to."""
        return replace(self, workers=1)

    @property
    def crowded(self) -> bool:
        """Whether the server runs on the workers' cores, so that there are fewer than workers and server."""
        return not self.idle and not self.server_alone

    @property
    def transport(self) -> str:
        """For people."""
        return "shared memory" if self.shared_memory else "TCP"


@dataclass
class Measured:
    """A setup's rounds. A value of each."""

    setup: Setup
    seconds: list[float] = field(default_factory=list)  # For the fixed work.
    busy: list[float] = field(default_factory=list)  # Share of all cores.
    exchange_busy: list[float] = field(default_factory=list)  # The same, as if nobody needed a core while computing.
    step_s: list[float] = field(default_factory=list)
    computing_s: list[float] = field(default_factory=list)  # Of a step: medians, with idling.
    hashes: set[str] = field(default_factory=set)

    @property
    def lower_bound(self) -> bool:
        """In the idle-time form: the exchange may have waited for cores. So many machines are no slower than this."""
        return self.setup.idle and self.setup.workers > 1 and max(self.exchange_busy) > BUSY_SHARE

    def add(self, lab: Lab, job: JobResult) -> None:
        """A round."""
        training_s, steps = job.training_s(), [job.steps(rank) for rank in range(self.setup.workers)]
        step_s = training_s / (len(steps[0]) - 1)
        computing_s = statistics.median(_computing_s(step) for of_rank in steps for step in of_rank[1:])
        self.step_s.append(step_s)
        self.computing_s.append(computing_s)
        self.seconds.append(step_s * _steps(lab, self.setup))
        self.busy.append(job.training_cpu_s / (training_s * len(cores())))
        self.exchange_busy.append(min(1.0, self.busy[-1] * step_s / max(step_s - computing_s, 1e-9)))
        self.hashes.add(job.weights_hash())


def cores() -> list[int]:
    """That this process may use."""
    return sorted(os.sched_getaffinity(0))


def workers(lab: Lab) -> tuple[int, ...]:
    """How many there are, setup by setup."""
    return lab.pick((1, 2, 4, 8), (1, 2, 8))


def passes(lab: Lab) -> int:
    """Over the data, by all workers together: the fixed work."""
    return lab.pick(64, 2)


def rounds(lab: Lab) -> int:
    """How often each setup runs, by turns."""
    return lab.pick(4, 1)


def _steps(lab: Lab, setup: Setup) -> int:
    """Of each worker."""
    return passes(lab) * SAMPLES // (setup.batch * setup.workers)


def _computing_s(step: dict) -> float:
    return step["forward_s"] + step["backward_s"] + step.get("idle_s", 0.0)


def measure_compute(lab: Lab, batch: int) -> float:
    """How long a worker computes a batch for: the median of forward and backward of one that runs alone.

    It has a core to itself where there are two, and sends nothing while it computes.
    """
    on = cores()
    spec = JobSpec(
        f"compute-{batch}",
        1,
        list(SERVER_FLAGS),
        [*FLAGS, f"--batch_size={batch}", f"--steps={lab.pick(3000, 60) * BATCH // batch + 10}", "--overlap=false"],
        server_on=lambda shard: _pinned(on[:1]),
        worker_on=lambda rank: _pinned(on[-1:]),
        shared_memory=True,
    )
    steps = run_job(lab, spec).steps()
    return statistics.median(_computing_s(step) for step in steps[1:])


def real_setups(lab: Lab) -> list[Setup]:
    """As many workers as there are cores for: on two, two among which the server runs, or one beside it."""
    count = len(cores())
    return [
        Setup(number, BATCH, shared_memory, server_alone)
        for shared_memory in (True, False)
        for server_alone in (True, False)
        for number in workers(lab)
        if number <= count - server_alone
    ]


def idle_setups(lab: Lab) -> list[Setup]:
    """All numbers of workers, whatever cores there are."""
    return [
        Setup(number, batch, shared_memory, idle=True)
        for batch in PLAYED_BATCHES
        for shared_memory in (True, False)
        for number in workers(lab)
    ]


def measure(lab: Lab, compute_s: dict[int, float]) -> list[Measured]:
    """Every setup once in each round. `compute_s` is of a batch, by its samples."""
    found = [Measured(setup) for setup in [*real_setups(lab), *idle_setups(lab)]]
    for number in range(1, rounds(lab) + 1):
        for one in found:
            one.add(lab, run_job(lab, _spec(lab, one.setup, compute_s, number)))
    return found


def step_time(seconds: float) -> str:
    """In whole microseconds, as a flag has it."""
    return f"{round(seconds * 1e6)}us"


def _spec(lab: Lab, setup: Setup, compute_s: dict[int, float], number: int) -> JobSpec:
    if setup.idle:
        size = [f"--batch_size={STAND_IN}", f"--experiment_step_time={step_time(compute_s[setup.batch])}"]
        name = f"idle-{setup.batch}"
        server_on, worker_on = _anywhere, _anywhere
    else:
        size = [f"--batch_size={setup.batch}"]
        name = "beside-a-server" if setup.server_alone else "with-the-server"
        server_on, worker_on = _places(setup)
    return JobSpec(
        f"{name}-{'shm' if setup.shared_memory else 'tcp'}-{setup.workers}-r{number}",
        setup.workers,
        list(SERVER_FLAGS),
        [*FLAGS, *size, f"--steps={_steps(lab, setup)}"],
        server_on=server_on,
        worker_on=worker_on,
        shared_memory=setup.shared_memory,
    )


def _anywhere(number: int) -> list[str]:
    return []


def _places(setup: Setup) -> tuple[Callable[[int], list[str]], Callable[[int], list[str]]]:
    """Of the server, and of a worker by its rank."""
    on = cores()
    first = 1 if setup.server_alone else 0
    server = on[:1] if setup.server_alone else on[: setup.workers]
    return (lambda shard: _pinned(server), lambda rank: _pinned([on[first + rank]]))


def _pinned(to: list[int]) -> list[str]:
    return ["taskset", "--cpu-list", ",".join(map(str, to))]
