"""Makes one run, and says what became of it: by its processes' endings, logs and metrics.

done; diverged: weights or losses are not finite; did not learn: it ended, at an accuracy of about guessing, which a
training that is much too short does too; failed; timed out.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.compare import commands
from experiments.compare.modes import ONE_BY_ONE
from experiments.compare.plan import Rate, RunSpec
from experiments.compare.settings import Settings, UsageError
from experiments.shared.job import GRACE_S, Job, JobFailed, Part, first_line_with, names
from experiments.shared.machine import cores, write_json
from experiments.shared.metrics import applied_unix_s, lack_of, number, read_events
from experiments.shared.processes import Child, Stop

RESULTS = ("done", "diverged", "did not learn")  # Nothing is known of the others: they are made again.
_NOT_FINITE = re.compile("(?:is|are|was|were) not finite")
_CHANCE_FACTOR = 1.5  # At so many times what guessing gets, and less, nothing was learned.
# What is the script's own.
_OF_A_SCRIPT = {"learning_rate": None, "momentum": None, "batch_size": 0, "epochs": 0}


# ---- What became of it


@dataclass(frozen=True)
class Result:
    """The last evaluation on a split. None where it is not known, or not finite."""

    loss: float | None = None
    accuracy: float | None = None
    found: bool = False
    diverged: bool = False  # A loss is there, and not finite. Scripts of users need not tell of one.


def last_result(folder: Path, split: str = "test") -> Result:
    """The evaluation of the highest version on this split, by whichever worker was the lead."""
    found = [
        event
        for path in sorted(folder.glob("worker*.jsonl"))
        for event in read_events(path).named("eval")
        if event.get("split") == split
    ]
    if not found:
        return Result()
    highest = max(event.get("version", 0) for event in found)
    best = [event for event in found if event.get("version", 0) == highest][-1]
    loss = number(best, "loss")
    return Result(loss, number(best, "accuracy"), found=True, diverged="loss" in best and loss is None)


def status_of_ended(
    children: Sequence[Child], failure: JobFailed | None, folder: Path, classes: int | None
) -> tuple[str, str]:
    """Status and reason of a run whose processes have all ended by themselves, or after one had failed."""
    if failure is not None:
        line = first_line_with(_NOT_FINITE, children) if failure.blamed else None
        return ("diverged", line) if line else (failure.status, str(failure))
    result = last_result(folder)
    if result.diverged:
        return "diverged", "the final test loss is not finite"
    if classes and result.accuracy is not None and result.accuracy <= _CHANCE_FACTOR / classes:
        return "did not learn", f"the final test accuracy is {result.accuracy:.1%}, about that of guessing"
    return "done", ""


def lack_of_metrics(folder: Path, workers: int) -> str:
    """What the metrics files of a run that is done lack, for people; empty: nothing."""
    files = {rank: read_events(folder / f"worker{rank}.jsonl") for rank in range(workers)}
    lack = lack_of(read_events(folder / "server0.jsonl"), files, workers)
    return lack and f"its metrics are not whole: {lack}"


# ---- Making it


def make_run(spec: RunSpec, settings: Settings, folder: Path, stop: Stop, limit_s: float) -> tuple[dict[str, Any], Job]:
    """What is in run.json then, in the folder, which is emptied before. Interrupted, without one, if it was to stop."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    began_unix, began = time.time(), time.monotonic()
    grace_s = 3 * GRACE_S if settings.command else GRACE_S
    job, failure = Job(folder, stop), None
    try:
        _start(job, spec, settings)
        job.wait(limit_s)
    except JobFailed as failed:
        failure = failed
    finally:
        took_s = time.monotonic() - began
        killed = job.end(grace_s)
    if settings.command:
        commands.name_script_metrics(folder)
    sizes = _model_sizes(settings)
    status, reason = status_of_ended(job.children, failure, folder, sizes[-1] if sizes else None)
    if status == "done" and (lack := lack_of_metrics(folder, spec.workers)):
        status, reason = "failed", lack
    if status == "timed out" and killed:
        reason += f"; killed {grace_s:g} s after SIGTERM: {names(killed)}"
    result = {
        **spec.as_json(),
        **(_OF_A_SCRIPT if settings.command else {}),
        "status": status,
        "reason": reason,
        "began_unix": began_unix,
        **_times(job, took_s),
        "cores": len(cores()),
        "parameters": sum(a * b + b for a, b in itertools.pairwise(sizes)) if len(sizes) > 1 else None,
        "flags": {"server": commands.server_flags(spec, settings), "worker": commands.worker_flags(spec, settings)},
    }
    write_json(folder / "run.json", result)
    return result, job


def _start(job: Job, spec: RunSpec, settings: Settings) -> None:
    folder = job.folder
    if settings.command:
        environment = commands.script_environment(spec, settings, folder)
        job.start_worker("psrun", commands.script_command(spec, settings, folder), environment)
    elif spec.pytorch:
        job.start_worker("pytorch", commands.pytorch_command(spec, settings, folder))
    else:
        server = Part(["--listen=127.0.0.1:0", *commands.server_flags(spec, settings)])
        worker = Part(commands.worker_flags(spec, settings))
        job.start(settings.bin, [server] * settings.servers, [worker] * spec.workers)


def _model_sizes(settings: Settings) -> list[int]:
    """As in "mlp:784,128,10"; empty where that is not known. A regression ends with 1, and has no accuracy."""
    name, _, sizes = settings.model.partition(":")
    if name == "mlp" and not settings.command:
        with contextlib.suppress(ValueError):
            return [int(size) for size in sizes.split(",")]
    return []


def _times(job: Job, total_wall_s: float) -> dict[str, float]:
    """wall_s and cpu_s are the training's, from the first version to the last; of the whole run if it has none."""
    wall_s, cpu_s = total_wall_s, sum(child.cpu_s for child in job.children)
    found = {"total_wall_s": wall_s, "total_cpu_s": cpu_s}
    applied = applied_unix_s(job.folder)
    if len(applied) > 1:
        wall_s, cpu_s = applied[-1] - applied[0], job.clock.between_s(applied[0], applied[-1])
    return {name: round(value, 3) for name, value in (found | {"wall_s": wall_s, "cpu_s": cpu_s}).items()}


# ---- How long a batch takes to compute, by a short run with all workers; and how long a batch is to last

_PROBE_STEPS = 100  # Each worker makes so many; fewer of large batches, but for the least.
_PROBE_STEPS_LEAST = 20
_PROBE_SAMPLES = 64_000
_PROBE_LIMIT_S = 180.0
_WARM_UP_SHARE = 0.25  # The first ones take long.
_TIMES_COMPUTE = 4
_LEAST_S = 0.002
# In the short run itself: without idle time, workers that share cores would wait for each other while they compute.
_FIRST_STEP_TIME_S = 0.01
_FIRST_STEP_TIME_S_MAX = 0.1
# How programs name a flag of ours, or the data, that they cannot do with.
_REFUSED = re.compile(
    r" ended with status \d+: ps_\w+: ((?:--(?:model|activation|dataset|data_dir|batch_size|eval_every)|dataset)\b.*)"
)
# What all processes of the machine's cores may be busy with, if a round of batches takes a step's time.
_BUSY_SHARE = 0.6


class ProbeFailed(Exception):
    """Why nothing can be run."""


@dataclass(frozen=True)
class Probe:
    compute_s: float  # Median of forward and backward of a batch, with all workers on the machine.
    cpu_s: float  # Processor time of all processes for one batch of each worker.
    samples: int  # The training split has so many.

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def step_time_s(self, cores: int) -> float:
        """Four times the compute; more where the cores would be too busy for that; in whole tenths of milliseconds."""
        least = max(_TIMES_COMPUTE * self.compute_s, self.cpu_s / (cores * _BUSY_SHARE), _LEAST_S)
        return math.ceil(least * 10_000 - 1e-9) / 10_000


def probe(settings: Settings, folder: Path, stop: Stop) -> Probe:
    """UsageError; ProbeFailed; Interrupted."""
    spec = RunSpec(
        id="probe",
        kind="probe",
        mode=ONE_BY_ONE,  # It makes the most versions, and so the most work.
        condition="even",
        seed=1,
        workers=settings.workers,
        batch_size=settings.batch_size,
        epochs=0,
        rate=Rate(1e-4, 0),
        steps=max(_PROBE_STEPS_LEAST, min(_PROBE_STEPS, _PROBE_SAMPLES // settings.batch_size)),
        step_time_s=0 if settings.real else min(settings.step_time_s or _FIRST_STEP_TIME_S, _FIRST_STEP_TIME_S_MAX),
    )
    result, job = make_run(spec, settings, folder, stop, _PROBE_LIMIT_S)
    if result["status"] not in RESULTS:  # It has learned next to nothing.
        if refused := _REFUSED.search(result["reason"]):
            raise UsageError(refused[1])
        raise ProbeFailed(f"a first short run {result['status']}: {result['reason']}; logs in {folder}")
    steps = [step for path in folder.glob("worker*.jsonl") for step in read_events(path).named("step")]
    samples = [event["samples"] for event in read_events(folder / "server0.jsonl").named("runs")]
    applied = applied_unix_s(folder)
    applied = applied[int(len(applied) * _WARM_UP_SHARE) :]
    if not steps or not samples or len(applied) < 2:
        raise ProbeFailed(f"a first short run left no times of steps; logs in {folder}")
    compute_s = statistics.median(step["forward_s"] + step["backward_s"] for step in steps)
    rounds = (len(applied) - 1) / settings.workers
    return Probe(compute_s, job.clock.between_s(applied[0], applied[-1]) / rounds, samples[0])
