"""What is known of one run. Times are on the run's clock: 0 s is the chief's (server 0's) first applied version.

Samples are counted when a version contains them. Evaluations belong to the version whose weights they used, whenever
they were computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

TARGETS = (0.80, 0.85, 0.87)  # Test accuracies; the report says when they are reached.
CPU_BOUND_SHARE = 0.70  # Beyond this share of all cores the processors, not the waiting, may set the pace.
FLOAT_BYTES = 4
PARTS = ("compute", "idle", "push", "wait", "pull")  # Of a batch, in the order in which they happen.


@dataclass(slots=True)
class Mark:
    """An evaluation on the test split, placed at the version whose weights it used."""

    version: int
    time_s: float
    samples: int  # Applied, in all versions up to this one.
    pushes: int  # Contributions in them.
    loss: float | None
    accuracy: float | None  # In [0, 1]; None for regression.


@dataclass(slots=True)
class Batch:
    """What a worker did for one batch."""

    rank: int
    step: int  # The exchange that the batch went into.
    version: int  # Of the weights.
    samples: int
    end_s: float
    parts_s: tuple[float, ...]  # By PARTS.
    applied: bool  # False if some server refused the push (late or stale).

    def part_s(self, name: str) -> float:
        """One of PARTS."""
        return self.parts_s[PARTS.index(name)]

    @property
    def begin_s(self) -> float:
        """The end less all parts."""
        return self.end_s - sum(self.parts_s)


@dataclass(slots=True)
class Apply:
    """A version made by the chief."""

    version: int
    time_s: float
    ranks: list[int]
    staleness: list[int]
    samples: int


@dataclass(slots=True)
class StepTimes:
    """What the batches of a run took, by worker and in order, without each worker's first one."""

    compute_s: list[list[float]]  # Computing and idling of each batch.
    exchange_s: list[list[float]]  # Exposed pushing and pulling of each batch, without waiting.
    samples: float  # Of a batch.


@dataclass
class Run:
    """A run's settings and outcome, as in run.json, and what the report takes from its metrics files."""

    id: str
    kind: str = "comparison"  # comparison, staleness, reference, tuning; others are not reported.
    mode: str = ""
    condition: str = "even"
    seed: int = 0
    workers: int = 0
    batch_size: int = 0
    epochs: float = 0
    learning_rate: float | None = None
    momentum: float | None = None
    tuned: bool = False
    staleness: int | None = None  # Enforced.
    status: str = "failed"  # Those of outcome.py.
    reason: str = ""
    began_unix: float = 0
    wall_s: float | None = None
    cpu_s: float | None = None
    cores: int | None = None
    parameters: int | None = None
    weights_hash: str | None = None

    # From here on: derived from the metrics files.
    marks: list[Mark] = field(default_factory=list)
    validation_accuracy: float | None = None  # Of the last evaluation on that split, in [0, 1].
    versions: int = 0
    pushes: int = 0  # Contributions that the chief applied.
    samples_applied: int = 0
    samples_computed: int = 0  # In all batches of all workers.
    dropped_samples: int = 0  # Computed and pushed, but late or stale, so that not every server applied them.
    duration_s: float | None = None  # From the first version to the last.
    samples_per_s: float | None = None  # Applied after the first version, over duration_s.
    shares: dict[str, float] | None = None  # By PARTS, of all workers' time in batches after each one's first.
    push_staleness: list[int] = field(default_factory=list)  # Of each contribution, as the chief saw it; versions.
    clock_gaps: list[int] = field(default_factory=list)  # Of each step (gaps.py); steps.
    step_times: StepTimes | None = None
    time_line: list[Batch] = field(default_factory=list)  # A stretch of the run.

    @property
    def done(self) -> bool:
        """Whether the run ended as it should."""
        return self.status == "done"

    @property
    def final(self) -> Mark | None:
        """The last evaluation."""
        return self.marks[-1] if self.marks else None

    @property
    def final_accuracy(self) -> float | None:
        """Test accuracy of the last evaluation, in [0, 1]."""
        return self.final.accuracy if self.final else None

    def bytes_pushed(self, pushes: int) -> int | None:
        """What that many pushes of the whole model weigh; about as much comes back in pulls."""
        return None if self.parameters is None else pushes * self.parameters * FLOAT_BYTES

    @property
    def cpu_share(self) -> float | None:
        """Processor time of all processes over wall time and cores."""
        if self.cpu_s is None or not self.wall_s or not self.cores:
            return None
        return self.cpu_s / (self.wall_s * self.cores)

    @property
    def cpu_bound(self) -> bool:
        """Whether the processors may have set the pace, so that times cannot be compared."""
        return self.cpu_share is not None and self.cpu_share > CPU_BOUND_SHARE

    def reached(self, target: float) -> Mark | None:
        """The first evaluation with at least that accuracy."""
        return next((mark for mark in self.marks if mark.accuracy is not None and mark.accuracy >= target), None)
