"""One job of an experiment: its servers and workers, from start to end, and what their metrics say."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from cpu_clock import CpuClock
from events import Event, named, process_start_unix_s, read_events
from process import Child, end_all, running, wait_until

from .lab import ExperimentFailed, Lab

START_LIMIT_S = 30.0  # For a server to listen.
END_LIMIT_S = 60.0  # For the servers to end after the workers.
GRACE_S = 10.0  # For a process to end after SIGTERM, before SIGKILL.
_LISTENING = "listening on "
_MEASURED = {"wall_s", "used", "training_cpu_s"}  # Of a job's processes, stored beside what their metrics say.


@dataclass
class JobSpec:
    """Servers and workers, started with these flags; what differs by rank is in `worker_own`."""

    name: str  # Of its folder.
    workers: int
    server: list[str]
    worker: list[str]
    servers: int = 1
    worker_own: Callable[[int], list[str]] = lambda rank: []
    limit_s: float = 600
    # What a program is started with, to run on a host or a processor of its own: ["ip", "netns", "exec", "h1"], say.
    server_on: Callable[[int], list[str]] = lambda shard: []
    worker_on: Callable[[int], list[str]] = lambda rank: []
    listen: Callable[[int], list[str]] = lambda shard: ["--listen=127.0.0.1:0"]
    hosts: dict[str, Any] | None = None  # Hosts.description() of those that it runs on, if it does.
    shared_memory: bool = False  # Where workers wait there, they look again and again for a while.
    # False, for a long job, whose files would be large: worker 0's metrics alone are written, and the others are empty.
    all_metrics: bool = True


@dataclass
class Used:
    """What a process took of the processors, from its start to its end."""

    cpu_s: float
    handovers: int  # How often a thread left its processor to another, by sched_yield or since its time was up.


@dataclass
class JobResult:
    """What a job has left. Events are those of the metrics files."""

    folder: Path
    wall_s: float  # From the first start to the last end.
    workers: list[list[Event]] = field(default_factory=list)  # By rank.
    servers: list[list[Event]] = field(default_factory=list)  # By shard.
    used: dict[str, Used] = field(default_factory=dict)  # By name: "server0", "worker3".
    training_cpu_s: float = 0.0  # Of all processes together during training_s(); looked at ten times a second.

    def steps(self, rank: int = 0) -> list[Event]:
        """Of a worker, in order."""
        return named(self.workers[rank], "step")

    def evaluations(self, split: str = "test") -> list[Event]:
        """Of all workers, by step; any of them may have been the lead."""
        found = [event for events in self.workers for event in named(events, "eval") if event["split"] == split]
        return sorted(found, key=lambda event: event["step"])

    def last(self, split: str = "test") -> Event:
        """The last evaluation on the split. ExperimentFailed if there is none."""
        found = self.evaluations(split)
        if not found:
            raise ExperimentFailed(f"{self.folder.name}: no evaluation on the {split} split in its metrics")
        return found[-1]

    def training_s(self) -> float:
        """From the end of the first step of any worker to the end of the last, without starting and evaluating.

        It is without the first step, which is longer than others.
        """
        begin_unix_s, end_unix_s = training_unix_s(self.workers)
        return end_unix_s - begin_unix_s

    def samples_per_s(self) -> float:
        """Of all workers together in training_s(); 0 where nobody has made two steps."""
        samples = sum(step["samples"] for rank in range(len(self.workers)) for step in self.steps(rank)[1:])
        training_s = self.training_s()
        return samples / training_s if training_s > 0 else 0.0

    def weights_hash(self) -> str:
        """As the lead printed it, of the servers' last version. Empty if nobody did."""
        for out in sorted(self.folder.glob("worker*.out")):
            for line in out.read_text(errors="replace").splitlines():
                if line.startswith("weights hash"):
                    return line.split()[2]  # What was saved may be of an earlier version, and the line says so.
        return ""


def run_job(lab: Lab, spec: JobSpec) -> JobResult:
    """Runs it, or takes what the same job, with the same programs and flags, left in its folder.

    ExperimentFailed with who failed and why; KeyboardInterrupt if a signal asked to stop.
    """
    folder = lab.folder / spec.name
    file, identity = folder / "job.json", _identity(lab, spec)
    stored = _stored(file, identity) if lab.may_keep(spec.name) else None
    if stored is None:
        stored = _Running(lab, spec, folder).run()
        made = lab.note_made(spec.name, stored["wall_s"])
        file.write_text(json.dumps({"identity": identity, **stored, **made}, indent=1) + "\n")
        lab.say(f"{spec.name}: {stored['wall_s']:.1f} s")
    else:
        lab.note_kept(spec.name, stored, file, stored["wall_s"])
    return JobResult(
        folder,
        stored["wall_s"],
        [read_events(folder / f"worker{rank}.jsonl") for rank in range(spec.workers)],
        [read_events(folder / f"server{shard}.jsonl") for shard in range(spec.servers)],
        {name: Used(used["cpu_s"], used["handovers"]) for name, used in stored["used"].items()},
        stored["training_cpu_s"],
    )


def training_unix_s(workers: Sequence[list[Event]]) -> tuple[float, float]:
    """When the first step of any worker had ended, and the last; twice 0 if there was none."""
    # A process counts `t` from its own start.
    zeros = [process_start_unix_s(events) or 0.0 for events in workers]
    times = [zero + step["t"] for zero, events in zip(zeros, workers, strict=True) for step in named(events, "step")]
    return (min(times), max(times)) if times else (0.0, 0.0)


@cache
def _hash(program: Path) -> str:
    return hashlib.sha256(program.read_bytes()).hexdigest()[:16]


def _identity(lab: Lab, spec: JobSpec) -> dict[str, Any]:
    """All that decides what comes of it."""
    over = {} if spec.hosts is None else {"hosts": spec.hosts}
    return {
        **over,
        "programs": [_hash(lab.bin / name) for name in ("ps_server", "ps_worker")],
        "servers": [[*spec.server_on(k), *spec.listen(k), *spec.server] for k in range(spec.servers)],
        "workers": [[*spec.worker_on(k), *spec.worker, *spec.worker_own(k)] for k in range(spec.workers)],
        "shared_memory": spec.shared_memory,
        "all_metrics": spec.all_metrics,
    }


def _stored(file: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """What _Running.run() has returned; None if there is nothing of this job."""
    try:
        stored = json.loads(file.read_text())
        return stored if stored["identity"] == identity and set(stored) >= _MEASURED else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


class _Running:
    def __init__(self, lab: Lab, spec: JobSpec, folder: Path) -> None:
        self._lab, self._spec, self._folder = lab, spec, folder
        self._servers: list[Child] = []
        self._workers: list[Child] = []
        self._clock = CpuClock()

    def run(self) -> dict[str, Any]:
        """_MEASURED."""
        if self._folder.exists():
            shutil.rmtree(self._folder)
        self._folder.mkdir(parents=True)
        began = time.monotonic()
        try:
            self._start()
            self._wait(lambda: not running(self._workers), self._spec.limit_s, "the workers")
            self._wait(lambda: not running(self._servers), END_LIMIT_S, "the servers, after the workers")
            wall_s = time.monotonic() - began
            begin, end = training_unix_s([read_events(self._folder / f"{one.name}.jsonl") for one in self._workers])
            return {
                "wall_s": wall_s,
                "used": {one.name: _used(one) for one in [*self._servers, *self._workers]},
                "training_cpu_s": round(self._clock.between_s(begin, end), 3),
            }
        except OSError as error:
            raise ExperimentFailed(f"{self._spec.name}: {error.filename}: {error.strerror}") from None
        finally:
            end_all([*self._servers, *self._workers], GRACE_S, lambda: self._lab.stop.hurry)

    def _start(self) -> None:
        spec, common = self._spec, [] if self._spec.shared_memory else ["--shared_memory=off"]
        chief = ""
        for shard in range(spec.servers):
            flags = [*spec.listen(shard), f"--num_workers={spec.workers}", *common, *spec.server]
            if spec.servers > 1:
                flags += [f"--num_shards={spec.servers}", f"--shard={shard}"]
            if chief:
                flags.append(f"--chief={chief}")
            self._servers.append(self._child("ps_server", f"server{shard}", spec.server_on(shard), flags))
            chief = chief or self._address(self._servers[0])
        for rank in range(spec.workers):
            flags = [f"--server={chief}", f"--rank={rank}", *common, *spec.worker, *spec.worker_own(rank)]
            self._workers.append(self._child("ps_worker", f"worker{rank}", spec.worker_on(rank), flags))

    def _child(self, program: str, name: str, on: Sequence[str], flags: Sequence[str]) -> Child:
        writes = self._spec.all_metrics or name == "worker0"
        metrics = [f"--metrics_file={self._folder / f'{name}.jsonl'}"] if writes else []
        return Child(name, [*on, str(self._lab.bin / program), *metrics, *flags], self._folder)

    def _address(self, server: Child) -> str:
        def said() -> str:
            with server.out.open(errors="replace") as out:
                line = out.readline()
            return line.strip() if line.endswith("\n") else ""

        self._wait(lambda: bool(said()), START_LIMIT_S, f"{server.name} to listen")
        return said().removeprefix(_LISTENING)

    def _wait(self, condition: Callable[[], bool], limit_s: float, what: str) -> None:
        """Until the condition is met. ExperimentFailed if it is not in time, or if a process fails before."""

        def failed() -> Child | None:
            running([*self._servers, *self._workers])
            self._clock.look([*self._servers, *self._workers])
            return next((one for one in [*self._servers, *self._workers] if one.status not in (None, 0)), None)

        def over() -> bool:
            return failed() is not None or condition()

        in_time = wait_until(over, limit_s, lambda: self._lab.stop.requested)
        if self._lab.stop.requested:
            raise KeyboardInterrupt
        if (blamed := failed()) is not None:
            raise ExperimentFailed(f"{self._spec.name}: {blamed.name} {blamed.ending()}: {last_line(blamed.log)}")
        if not in_time:
            raise ExperimentFailed(f"{self._spec.name}: waited {limit_s:g} s for {what}; logs in {self._folder}")


def _used(ended: Child) -> dict[str, Any]:
    return asdict(Used(round(ended.cpu_s, 3), ended.handovers))


def last_line(log: Path) -> str:
    """Of a log; empty if there is none."""
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1] if lines else ""
