"""Where an experiment runs: its folder, the programs, its form; its jobs, and what is kept of them."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from experiments.shared import machine
from experiments.shared.job import GRACE_S, Interrupted, Job, JobFailed, Part
from experiments.shared.metrics import Event, Events, read_events
from experiments.shared.processes import Child, Stop

T = TypeVar("T")
S = TypeVar("S", bound=Hashable)


class ExperimentFailed(Exception):
    """Why it came to no result, in one line."""


class Skipped(Exception):
    """What this machine lacks for the experiment, or for a part of it, in one line."""


@dataclass(frozen=True)
class Made:
    """When, in how long and from which sources a job, or a program that ran by itself, was made."""

    date: str  # As in 2026-01-31.
    commit: str  # Empty if it was not stored.
    seconds: float | None  # None if that was not stored.
    kept: bool = False  # An earlier run has made it.


@dataclass
class Lab:
    name: str
    folder: Path  # For all that it makes.
    bin: Path  # With ps_server, ps_worker and ps_bench.
    quick: bool = False  # As CI runs it: all its parts, none of them long enough for figures to be worth quoting.
    data_dir: str = ""  # As ps_worker has it, for MNIST's files.
    python: str = sys.executable  # May have PyTorch.
    stop: Stop = field(default_factory=Stop)
    fresh: bool = False  # What earlier runs have left is made again.
    made: dict[str, Made] = field(default_factory=dict)  # What was used so far, by name.

    def say(self, text: str) -> None:
        print(f"experiments: {self.name}: {text}", file=sys.stderr, flush=True)

    def pick(self, full: T, quick: T) -> T:
        return quick if self.quick else full

    def once(
        self,
        name: str,
        file: Path,
        identity: dict[str, Any],
        make: Callable[[], dict[str, Any]],
        needed: Collection[str] = (),
    ) -> dict[str, Any]:
        """What `make` returned, now or for an earlier run of the same identity, which has left it in the file. The time
        that it took is its "wall_s", where it has one. `needed`: what of it must be there.
        """
        stored = machine.read_json(file) if not self.fresh or name in self.made else {}
        if stored.get("identity") == json.loads(json.dumps(identity)) and set(stored) >= set(needed):
            if name not in self.made:
                self.made[name] = _kept(stored, file)
            return stored
        file.unlink(missing_ok=True)
        began = time.monotonic()
        found = make()
        seconds = found.get("wall_s", time.monotonic() - began)
        self.made[name] = Made(_date(time.time()), sources(), round(seconds, 3))
        made = {key: value for key, value in asdict(self.made[name]).items() if key != "kept"}
        stored = {"identity": identity, **found, "made": made}
        file.write_text(json.dumps(stored, indent=1) + "\n")
        self.say(f"{name}: {seconds:.1f} s")
        return stored

    def file_hash(self, program: str) -> str:
        return machine.file_hash(self.bin / program)


def _kept(stored: dict[str, Any], file: Path) -> Made:
    """What the file does not tell is its own time, or not known."""
    with contextlib.suppress(KeyError, TypeError):
        return Made(**stored["made"], kept=True)
    return Made(_date(file.stat().st_mtime), "", stored.get("wall_s"), kept=True)


def together(all_made: Collection[Made]) -> str:
    """How long they took, and which are of an earlier run. Empty if there are none."""
    if not all_made:
        return ""
    seconds = sum(made.seconds or 0 for made in all_made)
    untold = sum(made.seconds is None for made in all_made)
    said = f"Its {len(all_made)} job{'s' * (len(all_made) > 1)} took {seconds / 60:.1f} minutes together"
    said += f" (without {untold} whose time is not known)." if untold else "."
    earlier = [made for made in all_made if made.kept]
    if not earlier:
        return said
    dates = sorted({made.date for made in earlier})
    commits = sorted({made.commit for made in earlier if made.commit})
    were = f"{len(earlier)} of {len(all_made)} jobs {'were' if len(earlier) > 1 else 'was'} kept from {dates[0]}"
    were += f" to {dates[-1]}" if len(dates) > 1 else ""
    were += f" (sources {', '.join(commits)})" if commits else ""
    return f"{said} {were}."


@cache
def sources() -> str:
    """The commit that this runs from, shortened."""
    head, changed = machine.commit()
    return head[:12] + (" with changes" if changed else "")


def _date(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(unix_s))


# ---- Jobs


def by_turns(rounds: int, setups: Iterable[S], run: Callable[[S, int], Mapping[str, Any]]) -> dict[S, pd.DataFrame]:
    """What `run` finds of each setup, a row a round, from round 1 on. The setups take turns, since a machine's speed
    drifts.
    """
    rows: dict[S, list[Mapping[str, Any]]] = {setup: [] for setup in setups}
    for number in range(1, rounds + 1):
        for setup, own in rows.items():
            own.append(run(setup, number))
    return {setup: pd.DataFrame(own) for setup, own in rows.items()}


@dataclass
class JobSpec:
    """Servers and workers, started with these flags; what differs by rank is in `worker_own`."""

    name: str  # Its folder is named so.
    workers: int
    server: list[str]
    worker: list[str]
    servers: int = 1
    worker_own: Callable[[int], list[str]] = lambda rank: []
    limit_s: float = 600
    # The meaning is that of Part.
    server_on: Callable[[int], list[str]] = lambda shard: []
    worker_on: Callable[[int], list[str]] = lambda rank: []
    listen: Callable[[int], list[str]] = lambda shard: ["--listen=127.0.0.1:0"]
    hosts: dict[str, Any] | None = None  # Hosts.description() of those that it runs on, if it does.
    shared_memory: bool = False  # Where workers wait there, they look again and again for a while.
    # False, for a long job, whose files would be large: worker 0's metrics alone are written, and the others are empty.
    all_metrics: bool = True


@dataclass
class JobResult:
    """What a job has left. Events are those of the metrics files."""

    folder: Path
    workers: list[Events]  # By rank.
    server: Events  # The chief's.
    # By name, "server0" or "worker3": cpu_s, from its start to its end; handovers, how often a thread left its
    # processor to another, by sched_yield or since its time was up.
    used: dict[str, dict[str, Any]]
    training_cpu_s: float  # All processes used it together during training_s; looked at ten times a second.

    @cached_property
    def steps(self) -> pd.DataFrame:
        """All steps of the workers, by rank and in order: the fields of the metrics, rank and unix_s, when it ended."""
        return _steps(self.workers)

    @cached_property
    def iterations(self) -> pd.DataFrame:
        """All steps but each worker's first, in seconds: `total` is the time since the step before; forward is with
        gathering the batch's samples, and `exchange` is the rest: sending, waiting, receiving.
        """
        steps = self.steps
        found = pd.DataFrame({"rank": steps["rank"], "forward": steps["forward_s"], "backward": steps["backward_s"]})
        found["total"] = steps.groupby("rank")["t"].diff()
        found["exchange"] = (found["total"] - found["forward"] - found["backward"]).clip(lower=0)
        return found.dropna(subset="total")

    def evaluations(self, split: str = "test") -> list[Event]:
        """By step; any of the workers may have been the lead."""
        found = [event for events in self.workers for event in events.named("eval") if event["split"] == split]
        return sorted(found, key=lambda event: event["step"])

    def last(self, split: str = "test") -> Event:
        """The last evaluation on the split. ExperimentFailed if there is none."""
        found = self.evaluations(split)
        if not found:
            raise ExperimentFailed(f"{self.folder.name}: no evaluation on the {split} split in its metrics")
        return found[-1]

    @property
    def training_s(self) -> float:
        """From the end of the first step of any worker to the end of the last, without starting and evaluating."""
        begin_unix_s, end_unix_s = _training_unix_s(self.steps)
        return end_unix_s - begin_unix_s

    @property
    def samples_per_s(self) -> float:
        """Together, in training_s, without each worker's first step; 0 where nobody has made two."""
        after_first = self.steps.groupby("rank").cumcount() > 0
        return float(self.steps["samples"][after_first].sum()) / self.training_s if self.training_s > 0 else 0.0

    def weights_hash(self) -> str:
        """As the lead printed it, of the servers' last version. Empty if nobody did."""
        for out in sorted(self.folder.glob("worker*.out")):
            for line in out.read_text(errors="replace").splitlines():
                if line.startswith("weights hash"):
                    return line.split()[2]  # What was saved may be of an earlier version, and the line says so.
        return ""


def _steps(workers: Sequence[Events]) -> pd.DataFrame:
    rows = []
    for rank, events in enumerate(workers):
        zero = events.start_unix_s or 0.0  # A process counts `t` from its own start.
        rows += [{**event, "rank": rank, "unix_s": zero + event["t"]} for event in events.named("step")]
    return pd.DataFrame(rows, columns=None if rows else ["rank", "unix_s", "t", "samples", "loss"])


def _training_unix_s(steps: pd.DataFrame) -> tuple[float, float]:
    """When the first step of any worker had ended, and the last; twice 0 if there was none."""
    return (0.0, 0.0) if steps.empty else (float(steps["unix_s"].min()), float(steps["unix_s"].max()))


def run_job(lab: Lab, spec: JobSpec) -> JobResult:
    """Runs it, or takes what the same job, with the same programs and flags, left in its folder.

    ExperimentFailed with who failed and why; KeyboardInterrupt if a signal asked to stop.
    """
    folder = lab.folder / spec.name
    needed = ("wall_s", "used", "training_cpu_s")
    stored = lab.once(spec.name, folder / "job.json", identity(lab, spec), lambda: run_once(lab, spec), needed)
    workers = [read_events(folder / f"worker{rank}.jsonl") for rank in range(spec.workers)]
    chief = read_events(folder / "server0.jsonl")
    return JobResult(folder, workers, chief, stored["used"], stored["training_cpu_s"])


def identity(lab: Lab, spec: JobSpec) -> dict[str, Any]:
    """All that decides what comes of it."""
    over = {} if spec.hosts is None else {"hosts": spec.hosts}
    return {
        **over,
        "programs": [lab.file_hash(name) for name in ("ps_server", "ps_worker")],
        "servers": [[*spec.server_on(k), *spec.listen(k), *spec.server] for k in range(spec.servers)],
        "workers": [[*spec.worker_on(k), *spec.worker, *spec.worker_own(k)] for k in range(spec.workers)],
        "shared_memory": spec.shared_memory,
        "all_metrics": spec.all_metrics,
    }


def run_once(lab: Lab, spec: JobSpec) -> dict[str, Any]:
    """What is kept of it, beside its metrics."""
    folder = lab.folder / spec.name
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    common = [] if spec.shared_memory else ["--shared_memory=off"]
    servers = [
        Part([*spec.listen(shard), *common, *spec.server], spec.server_on(shard), spec.all_metrics)
        for shard in range(spec.servers)
    ]
    workers = [
        Part([*common, *spec.worker, *spec.worker_own(rank)], spec.worker_on(rank), spec.all_metrics or rank == 0)
        for rank in range(spec.workers)
    ]
    began = time.monotonic()
    with guarded(lab, spec.name, folder) as job:
        job.start(lab.bin, servers, workers)
        job.wait(spec.limit_s)
        wall_s = time.monotonic() - began
    training = _training_unix_s(_steps([read_events(folder / f"{one.name}.jsonl") for one in job.workers]))
    return {
        "wall_s": wall_s,
        "used": {one.name: {"cpu_s": round(one.cpu_s, 3), "handovers": one.handovers} for one in job.children},
        "training_cpu_s": round(job.clock.between_s(*training), 3),
    }


def run_program(lab: Lab, name: str, command: Sequence[str], folder: Path, limit_s: float = 600) -> Child:
    """Runs it by itself; its output is in FOLDER/NAME.out and .log. ExperimentFailed if it fails or takes longer than
    the limit; KeyboardInterrupt if a signal asked to stop.
    """
    return run_programs(lab, folder, {name: command}, limit_s)[0]


def run_programs(lab: Lab, folder: Path, commands: dict[str, Sequence[str]], limit_s: float) -> list[Child]:
    """The same with several at a time, by name."""
    folder.mkdir(parents=True, exist_ok=True)
    with guarded(lab, "", folder) as job:
        for name, command in commands.items():
            job.start_worker(name, command)
        job.wait(limit_s)
    return job.workers


@contextlib.contextmanager
def guarded(lab: Lab, name: str, folder: Path) -> Iterator[Job]:
    job = Job(folder, lab.stop, blame_s=0)
    try:
        yield job
    except JobFailed as failed:
        raise ExperimentFailed(f"{name}: {failed}" if name else str(failed)) from None
    except Interrupted:
        raise KeyboardInterrupt from None
    finally:
        job.end(GRACE_S)
