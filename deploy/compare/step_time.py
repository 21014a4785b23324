"""How long a batch takes to compute, by a short run with all workers; and how long a batch is to last."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from job import Job
from modes import Mode
from outcome import read_lines
from plan import Rate, RunSpec
from process import Stop
from settings import Settings

STEPS = 60  # Of each worker.
_LIMIT_S = 180.0
_TIMES_COMPUTE = 4
_LEAST_S = 0.002
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
    """ProbeFailed; Interrupted."""
    spec = RunSpec(
        id="probe",
        kind="probe",
        mode=Mode("bsp"),
        condition="even",
        seed=1,
        workers=settings.workers,
        batch_size=settings.batch_size,
        epochs=0,
        rate=Rate(1e-4, 0),
        steps=STEPS,
    )
    result = Job(spec, settings, folder, stop).run(_LIMIT_S)
    if result["status"] not in ("done", "diverged"):  # It has learned next to nothing.
        raise ProbeFailed(f"a first short run {result['status']}: {result['reason']}; logs in {folder}")
    times = []
    for path in folder.glob("worker*.jsonl"):
        times += [
            event["forward_s"] + event["backward_s"] for event in read_lines(path) if event.get("event") == "step"
        ]
    samples = [event["samples"] for event in read_lines(folder / "server0.jsonl") if event.get("event") == "runs"]
    if not times or not samples:
        raise ProbeFailed(f"a first short run left no times of steps; logs in {folder}")
    return Probe(statistics.median(times), result["cpu_s"] / (STEPS - 1), samples[0])
