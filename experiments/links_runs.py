"""Runs each system over links of each rate, and takes from it what a batch took and what links carried."""

from __future__ import annotations

import hashlib
import json
import shutil
import statistics
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from .digits_runs import listen_on
from .hosts import Carried, Hosts
from .job import JobResult, JobSpec, run_job
from .lab import ExperimentFailed, Lab
from .link_stream import stream_bytes_per_s
from .links_systems import BATCH, LEARNING_RATE, SYSTEMS, WORKERS, Network, System, network
from .made import read_mark
from .mpi_hosts import PROGRAM, RING, run_ranks, why_no_mpi

RATES = (10, 100, 1_000)  # Mbit/s.
FREE = None  # Links without a rate, as fast as the processors.
_QUICK_AT_10 = ("bsp-4", "local-sgd-4", "mpi-ring")  # Mbit/s, in the quick form.
_EXCHANGES_MIN = 10
_WARM_UP = 2  # Exchanges that are left out: of connections that begin, and of memory that is touched first.


@dataclass
class Outcome:
    """A system over links of one rate."""

    batch_s: float  # From one batch of a worker to its next, on the average of an exchange; the median of exchanges.
    losses: list[float]  # Of each batch, the mean over workers.
    ends_s: list[float]  # When it was done, the mean over workers, since the first worker's first was.
    periods_s: list[float]  # The exchanges of all workers that batch_s is the median of, each over its batches.
    fullest_bytes: int  # One way, over the link that carried most.
    accuracy: float | None = None  # Of the test split, with the last weights. MPI's program does not evaluate.
    weights_hash: str = ""

    @property
    def batches(self) -> int:
        """Of each worker."""
        return len(self.losses)

    @property
    def samples_per_s(self) -> float:
        """Of all workers together."""
        return WORKERS * BATCH / self.batch_s


def rates(lab: Lab) -> tuple[int | None, ...]:
    """Of links, one after another."""
    return lab.pick((*RATES, FREE), (10, 1_000))


def systems(lab: Lab, rate: int | None) -> list[System]:
    """Those that run over links of this rate."""
    found = [system for system in SYSTEMS if not (system.is_mpi and why_no_mpi(lab))]
    return [system for system in found if not lab.quick or rate == 1_000 or system.name in _QUICK_AT_10]


def batches(lab: Lab, system: System, rate: int | None) -> int:
    """Of each worker: as many as the rate has time for; at the highest one, an epoch's whole ones."""
    if rate is FREE:
        return 80
    if rate == 1_000:
        return lab.pick(232, 40)
    exchanges = {10: lab.pick(8, 4), 100: lab.pick(24, 4)}[rate]
    if system.servers == 1:
        exchanges = max(_EXCHANGES_MIN, exchanges // 2)  # Which takes several times as long.
    return exchanges * system.batches_per_exchange


def measure(lab: Lab) -> dict[int | None, dict[str, Outcome]]:
    """By rate and system. MPI is left out where it is not. Skipped where there can be no hosts."""
    found: dict[int | None, dict[str, Outcome]] = {}
    for rate in rates(lab):
        with Hosts(2 * WORKERS, rate) as hosts:
            found[rate] = {system.name: _measure(lab, hosts, system) for system in systems(lab, rate)}
    return found


def plain_stream(lab: Lab) -> dict[int, float]:
    """What a TCP connection carries over a link of each rate, in bytes per second."""
    found = {}
    for rate in rates(lab):
        if rate is not FREE:
            with Hosts(2, rate) as hosts:
                found[rate] = stream_bytes_per_s(lab, hosts, lab.pick(3.0, 0.5))
    return found


def _measure(lab: Lab, hosts: Hosts, system: System) -> Outcome:
    name = f"{system.name}-{'free' if hosts.mbit_per_s is FREE else hosts.mbit_per_s}"
    flags = [*network(lab).flags, f"--steps={batches(lab, system, hosts.mbit_per_s)}"]
    return _run_mpi(lab, hosts, system, name, flags) if system.is_mpi else _run_job(lab, hosts, system, name, flags)


def _run_job(lab: Lab, hosts: Hosts, system: System, name: str, flags: list[str]) -> Outcome:
    first = 0 if system.colocated else WORKERS  # Host of server 0.
    spec = JobSpec(
        name,
        WORKERS,
        list(system.mode),
        flags,
        servers=system.servers,
        server_on=lambda shard: hosts.on(first + shard),
        worker_on=lambda rank: hosts.on(rank),
        listen=lambda shard: listen_on(hosts, first + shard),
        hosts=hosts.description(),
    )
    path = lab.folder / name / "carried.json"
    if not path.exists():
        (lab.folder / name / "job.json").unlink(missing_ok=True)  # Stopped between the two: it runs again.
    before = hosts.carried()
    job = run_job(lab, spec)
    if not path.exists():  # It has run, in an empty folder.
        path.write_text(json.dumps(_difference(before, hosts.carried())) + "\n")
    carried = [Carried(**each) for each in json.loads(path.read_text())]
    by_rank = [_exchange_ends(job, rank) for rank in range(WORKERS)]
    if min(map(len, by_rank)) < _WARM_UP + 2:
        raise ExperimentFailed(f"{name}: too few exchanges in its metrics")
    each = system.batches_per_exchange
    periods = [(after - before) / each for own in by_rank for before, after in pairwise(own[_WARM_UP:])]
    rows = list(zip(*(_batches(job, rank) for rank in range(WORKERS)), strict=True))
    zero_s = min(end_s for _, end_s in rows[0])
    return Outcome(
        statistics.median(periods),
        [statistics.fmean(loss for loss, _ in row) for row in rows],
        [statistics.fmean(end_s for _, end_s in row) - zero_s for row in rows],
        periods,
        max(each.fuller for each in carried),
        job.last()["accuracy"],
        job.weights_hash(),
    )


def _exchange_ends(job: JobResult, rank: int) -> list[float]:
    """Of a worker, in order, Unix time: each ends with the last batch that goes into it."""
    last: dict[int, float] = defaultdict(float)
    for step in job.steps(rank):
        last[step["step"]] = max(last[step["step"]], _unix_s(job, rank, step))
    return [last[step] for step in sorted(last)]


def _batches(job: JobResult, rank: int) -> list[tuple[float, float]]:
    """Loss and end of each."""
    return [(step["loss"], _unix_s(job, rank, step)) for step in job.steps(rank)]


def _unix_s(job: JobResult, rank: int, step: dict[str, Any]) -> float:
    start = next(event for event in job.workers[rank] if event["event"] == "start")
    return start["unix_time"] - start["t"] + step["t"]


def _difference(before: list[Carried], after: list[Carried]) -> list[dict[str, int]]:
    return [asdict(late - early) for early, late in zip(before, after, strict=True)]


def _run_mpi(lab: Lab, hosts: Hosts, system: System, name: str, flags: list[str]) -> Outcome:
    folder = lab.folder / name
    stored = folder / "mpi.json"
    arguments = ["worker", str(LEARNING_RATE), *flags, f"--overlap={'true' if system.overlap else 'false'}"]
    options = [option for each in system.mpi for option in {"ring": RING}[each]]
    program = hashlib.sha256((lab.bin / PROGRAM).read_bytes()).hexdigest()[:16]
    identity = {"program": program, "arguments": arguments, "options": options, "hosts": hosts.description()}
    kept = read_mark(stored, {"identity": identity}) if lab.may_keep(name) else None
    if kept is None:
        shutil.rmtree(folder, ignore_errors=True)
        before, began = hosts.carried(), time.monotonic()
        lines = run_ranks(lab, hosts, WORKERS, folder, arguments, options).splitlines()
        kept = {"identity": identity, "steps": [[float(field) for field in line.split()] for line in lines]}
        kept["carried"] = _difference(before, hosts.carried())
        kept |= lab.note_made(name, time.monotonic() - began)
        stored.write_text(json.dumps(kept) + "\n")
        lab.say(f"{name}: {kept['steps'][-1][1]:.1f} s of steps")
    else:
        lab.note_kept(name, kept, stored)
    losses, ends_s = zip(*kept["steps"], strict=True)
    periods = [after - before for before, after in pairwise(ends_s[_WARM_UP:])]
    return Outcome(
        statistics.median(periods),
        list(losses),
        [end_s - ends_s[0] for end_s in ends_s],
        periods,
        max(Carried(**each).fuller for each in kept["carried"]),
    )


def models_carried(outcome: Outcome, of: Network) -> float:
    """Over the fullest link, one way, for each batch of a worker."""
    return outcome.fullest_bytes / outcome.batches / of.model_bytes
