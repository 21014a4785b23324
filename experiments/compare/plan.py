"""What is run, in which order, and about how long it takes: for the time left, and for when to give up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from experiments.compare.modes import ALL_WAIT, NOBODY_WAITS, ONE_BY_ONE, Mode
from experiments.compare.settings import Settings

STRAGGLER_FACTOR = 4
DELAY_SHARE = 0.05
DELAY_FACTOR = 10
_START_S = 2.5  # For the processes to start, read the data and end.
_UNKNOWN_S = 60.0  # For a run of which nothing is known.
_OVERHEAD = 1.15  # By the exchange, on top of a step's time.


@dataclass(frozen=True)
class Rate:
    learning_rate: float
    momentum: float
    tuned: bool = False


@dataclass(frozen=True)
class RunSpec:
    """One run. Its names are those of run.json."""

    id: str
    kind: str  # comparison, reference, staleness, tuning or probe.
    mode: Mode
    condition: str
    seed: int
    workers: int
    batch_size: int
    epochs: float
    rate: Rate
    staleness: int | None = None  # Enforced.
    step_time_s: float = 0  # 0: no idle time.
    validation_split: float = 0
    eval_every: float = 0  # Epochs; 0: only at the end.
    steps: int = 0  # If not 0, of each worker, instead of epochs.
    pytorch: bool = False  # Trained by pytorch_reference.py, without a server.

    def as_json(self) -> dict[str, Any]:
        """The part of run.json that is known beforehand."""
        left_out = ("rate", "eval_every", "steps", "pytorch")
        shown = {name: value for name, value in asdict(self).items() if name not in left_out}
        return shown | {"mode": str(self.mode)} | asdict(self.rate)

    @property
    def experiment_flags(self) -> list[str]:
        """Flags of ps_worker for the run's condition."""
        flags = []
        if self.step_time_s > 0:
            flags.append(f"--experiment_step_time={self.step_time_s * 1000:.6g}ms")
            if self.condition == "straggler":
                flags.append(f"--experiment_straggler={self.workers - 1}:{STRAGGLER_FACTOR}")
            elif self.condition == "transient":
                flags.append(f"--experiment_delays={DELAY_SHARE}:{DELAY_FACTOR}")
        if self.staleness is not None:
            flags.append(f"--experiment_staleness={self.staleness}")
        return flags


class Rates:
    """The rates of all runs: --learning_rate's, or what tuning has found."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._tuned: dict[str, Rate] = {}

    def set(self, item: str, rate: Rate) -> None:
        """What tuning has found for a mode ("ssp:2"), or an enforced staleness ("staleness:8")."""
        self._tuned[item] = rate

    def of_mode(self, mode: Mode) -> Rate:
        return self._tuned.get(str(mode), Rate(*self._settings.rate_of(mode)))

    def of_staleness(self, staleness: int) -> Rate:
        """The rate of one worker, whose every batch is an update of its own, as in asp."""
        return self._tuned.get(f"staleness:{staleness}", Rate(*self._settings.rate_of(ONE_BY_ONE, staleness)))


def make_plan(settings: Settings, rates: Rates, step_time_s: float, pytorch: bool = False) -> list[RunSpec]:
    """All runs but tuning's; `pytorch`: its reference curve too. The seeds come one after the other, so that a
    comparison that is stopped is a complete one of fewer seeds, and modes take turns on a machine whose speed changes.
    """
    batch, bsp = settings.batch_size, Mode("bsp")
    same = {"epochs": settings.epochs, "eval_every": settings.eval_every}
    runs = []
    for seed in range(1, settings.seeds + 1):

        def one(
            name: str, kind: str, mode: Mode, rate: Rate, factor: int = 1, seed: int = seed, **more: Any
        ) -> RunSpec:
            """A single worker."""
            return RunSpec(f"{name}-s{seed}", kind, mode, "even", seed, 1, batch * factor, rate=rate, **same, **more)

        for condition in settings.conditions:
            for mode in settings.modes:
                spec = one("", "comparison", mode, rates.of_mode(mode), step_time_s=step_time_s)
                name = f"{condition}-{mode.id}-s{seed}"
                runs.append(replace(spec, id=name, condition=condition, workers=settings.workers))
        if settings.references:
            # With the batches of all, one worker has N times the work, so a batch lasts N times as long.
            wide = (bsp, rates.of_mode(bsp), settings.workers)
            rate = rates.of_staleness(0)
            runs.append(one("reference_1xB", "reference", ONE_BY_ONE, rate, step_time_s=step_time_s))
            runs.append(one("reference_NxB", "reference", *wide, step_time_s=step_time_s * settings.workers))
            if pytorch:  # The same by another program: what bsp computes, if it is right. It is not about time.
                runs.append(one("reference_PyTorch", "reference", *wide, pytorch=True))
        for staleness in settings.staleness:  # It is about accuracy, not time: without idle time.
            rate = rates.of_staleness(staleness)
            runs.append(one(f"staleness_{staleness}", "staleness", ONE_BY_ONE, rate, staleness=staleness))
    return runs


def slowdown(spec: RunSpec) -> float:
    """How many times as long the run's condition makes it, roughly; 1: nobody is slow."""
    workers, name = spec.workers, spec.mode.name
    if spec.step_time_s == 0 or spec.condition == "even":
        return 1.0
    if spec.condition == "straggler":
        if name in (*ALL_WAIT, "ssp"):
            return STRAGGLER_FACTOR
        return 1.0 if name == "backup" else workers / (workers - 1 + 1 / STRAGGLER_FACTOR)
    mean = 1 + DELAY_SHARE * (DELAY_FACTOR - 1)
    if name in NOBODY_WAITS:
        return mean
    if name == "backup":
        return 1.0 if (spec.mode.number or 0) > 1 else 1.2
    slowest = 1 + (1 - (1 - DELAY_SHARE) ** workers) * (DELAY_FACTOR - 1)
    return slowest if name == "bsp" else (slowest + mean) / 2


class Estimate:
    """Learns from the runs that were made how much longer they take than expected."""

    def __init__(self, samples: int | None, compute_s: float) -> None:
        """`samples`: of the training split; `compute_s`: of a batch, with all workers at once. None: not known."""
        self._samples = samples
        self._compute_s = compute_s
        self._expected_s = 0.0
        self._took_s = 0.0

    def of(self, spec: RunSpec) -> float:
        """Seconds, as far as the settings tell."""
        if self._samples is None:
            return _UNKNOWN_S
        # A backup worker's batches of each step are not used, but count.
        rounds = self._samples * spec.epochs / spec.batch_size / spec.workers
        step_s = max(spec.step_time_s, self._compute_s * _OVERHEAD)
        return _START_S + rounds * step_s * slowdown(spec) * _OVERHEAD

    def learn(self, spec: RunSpec, took_s: float) -> None:
        self._expected_s += self.of(spec)
        self._took_s += took_s

    def left_s(self, specs: Iterable[RunSpec]) -> float:
        """For these runs together."""
        factor = self._took_s / self._expected_s if self._expected_s > 0 else 1.0
        return factor * sum(map(self.of, specs))

    @property
    def known(self) -> bool:
        """Whether there is anything to tell the time left by."""
        return self._samples is not None or self._expected_s > 0
