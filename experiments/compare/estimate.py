"""How long runs will take: for the time left, and for when to give up."""

from __future__ import annotations

from collections.abc import Iterable

from plan import DELAY_FACTOR, DELAY_SHARE, STRAGGLER_FACTOR, RunSpec

_START_S = 2.5  # For the processes to start, read the data and end.
_UNKNOWN_S = 60.0  # A run of which nothing is known.
_OVERHEAD = 1.15  # Of the exchange, on top of a step's time.


def slowdown(spec: RunSpec) -> float:
    """How many times as long the run's condition makes it, roughly; 1: nobody is slow."""
    workers, name = spec.workers, spec.mode.name
    if spec.step_time_s == 0 or spec.condition == "even":
        return 1.0
    spare = (spec.mode.number or 0) if name == "backup" else 0
    if spec.condition == "straggler":
        if name in ("bsp", "local_sgd", "ssp"):
            return STRAGGLER_FACTOR
        if name == "backup":
            return 1.0
        return workers / (workers - 1 + 1 / STRAGGLER_FACTOR)
    mean = 1 + DELAY_SHARE * (DELAY_FACTOR - 1)
    if name in ("asp", "easgd"):
        return mean
    if name == "backup":
        return 1.0 if spare > 1 else 1.2
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
        batches = self._samples * spec.epochs / spec.batch_size
        # A backup worker's batches of each step are not used, but count.
        rounds = batches / spec.workers
        step_s = max(spec.step_time_s, self._compute_s * _OVERHEAD)
        return _START_S + rounds * step_s * slowdown(spec) * _OVERHEAD

    def learn(self, spec: RunSpec, took_s: float) -> None:
        self._expected_s += self.of(spec)
        self._took_s += took_s

    def left_s(self, specs: Iterable[RunSpec]) -> float:
        """Of these runs together."""
        factor = self._took_s / self._expected_s if self._expected_s > 0 else 1.0
        return factor * sum(self.of(spec) for spec in specs)

    @property
    def known(self) -> bool:
        """Whether there is anything to tell the time left by."""
        return self._samples is not None or self._expected_s > 0
