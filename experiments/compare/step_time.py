"""How long a batch takes to compute, by a short run with all workers; and how long a batch is to last."""

from __future__ import annotations

import math
import re
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cpu_clock import applied_unix_s
from flags import UsageError
from job import Job
from modes import ONE_BY_ONE
from outcome import RESULTS, read_lines
from plan import Rate, RunSpec
from process import Stop
from settings import Settings

STEPS = 100  # Of each worker; fewer of large batches, but for the least.
_STEPS_LEAST = 20
_SAMPLES = 64_000
_WARM_UP_SHARE = 0.25  # Of the steps: the first ones take long.
_LIMIT_S = 180.0
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
    """What the short run has told."""

    compute_s: float  # Median of forward and backward of a batch, with all workers on the machine.
    cpu_s: float  # Processor time of all processes for one batch of each worker.
    samples: int  # Of the training split.

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
        steps=max(_STEPS_LEAST, min(STEPS, _SAMPLES // settings.batch_size)),
        step_time_s=0 if settings.real else min(settings.step_time_s or _FIRST_STEP_TIME_S, _FIRST_STEP_TIME_S_MAX),
    )
    job = Job(spec, settings, folder, stop)
    result = job.run(_LIMIT_S)
    if result["status"] not in RESULTS:  # It has learned next to nothing.
        if refused := _REFUSED.search(result["reason"]):
            raise UsageError(refused[1])
        raise ProbeFailed(f"a first short run {result['status']}: {result['reason']}; logs in {folder}")
    times = []
    for path in folder.glob("worker*.jsonl"):
        steps = (event for event in read_lines(path) if event.get("event") == "step")
        times += [step["forward_s"] + step["backward_s"] for step in steps]
    samples = [event["samples"] for event in read_lines(folder / "server0.jsonl") if event.get("event") == "runs"]
    applied = applied_unix_s(folder)
    applied = applied[int(len(applied) * _WARM_UP_SHARE) :]
    if not times or not samples or len(applied) < 2:
        raise ProbeFailed(f"a first short run left no times of steps; logs in {folder}")
    rounds = (len(applied) - 1) / settings.workers
    return Probe(statistics.median(times), job.clock.between_s(applied[0], applied[-1]) / rounds, samples[0])
