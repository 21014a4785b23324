"""What is run, in which order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from modes import ONE_BY_ONE, Mode
from settings import Settings

STRAGGLER_FACTOR = 4
DELAY_SHARE = 0.05
DELAY_FACTOR = 10


@dataclass(frozen=True)
class Rate:
    """What a mode is trained with."""

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
    eval_every: float = 0  # Epochs; 0: only at the end.
    validation_split: float = 0
    steps: int = 0  # If not 0, of each worker, instead of epochs.
    pytorch: bool = False  # Trained by pytorch_reference.py, without a server.

    def as_json(self) -> dict[str, Any]:
        """The part of run.json that is known beforehand."""
        return {
            "id": self.id,
            "kind": self.kind,
            "mode": str(self.mode),
            "condition": self.condition,
            "seed": self.seed,
            "workers": self.workers,
            "batch_size": self.batch_size,
            "epochs": self.epochs,
            "learning_rate": self.rate.learning_rate,
            "momentum": self.rate.momentum,
            "tuned": self.rate.tuned,
            "staleness": self.staleness,
            "step_time_s": self.step_time_s,
            "validation_split": self.validation_split,
        }


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
        """Of one worker, whose every batch is an update of its own, as in asp."""
        return self._tuned.get(f"staleness:{staleness}", Rate(*self._settings.rate_of(ONE_BY_ONE, staleness)))


def make_plan(settings: Settings, rates: Rates, step_time_s: float, pytorch: bool = False) -> list[RunSpec]:
    """All runs but tuning's; `pytorch`: its reference curve too. The seeds come one after the other, so that a
    comparison that is stopped is a complete one of fewer seeds, and modes take turns on a machine whose speed changes.
    """
    seeds = range(1, settings.seeds + 1)
    runs = []
    for seed in seeds:
        for condition in settings.conditions:
            runs += [_comparison(settings, rates, mode, condition, seed, step_time_s) for mode in settings.modes]
        if settings.references:
            runs += _references(settings, rates, seed, step_time_s)
            runs += [_pytorch(settings, rates, seed)] * pytorch
        runs += [_staleness(settings, rates, staleness, seed) for staleness in settings.staleness]
    return runs


def _comparison(settings: Settings, rates: Rates, mode: Mode, condition: str, seed: int, step_time_s: float) -> RunSpec:
    return RunSpec(
        id=f"{condition}-{mode.id}-s{seed}",
        kind="comparison",
        mode=mode,
        condition=condition,
        seed=seed,
        workers=settings.workers,
        batch_size=settings.batch_size,
        epochs=settings.epochs,
        rate=rates.of_mode(mode),
        step_time_s=step_time_s,
        eval_every=settings.eval_every,
    )


def _references(settings: Settings, rates: Rates, seed: int, step_time_s: float) -> list[RunSpec]:
    """One worker. With the batches of all it has N times the work, so a batch lasts N times as long."""
    references = []
    for name, factor, rate in (
        ("1xB", 1, rates.of_staleness(0)),
        ("NxB", settings.workers, rates.of_mode(Mode("bsp"))),
    ):
        references.append(
            RunSpec(
                id=f"reference_{name}-s{seed}",
                kind="reference",
                mode=ONE_BY_ONE if factor == 1 else Mode("bsp"),
                condition="even",
                seed=seed,
                workers=1,
                batch_size=settings.batch_size * factor,
                epochs=settings.epochs,
                rate=rate,
                step_time_s=step_time_s * factor,
                eval_every=settings.eval_every,
            )
        )
    return references


def _pytorch(settings: Settings, rates: Rates, seed: int) -> RunSpec:
    """The same as NxB, by another program: what bsp computes, if it is right. It is not about time either."""
    return RunSpec(
        id=f"reference_PyTorch-s{seed}",
        kind="reference",
        mode=Mode("bsp"),
        condition="even",
        seed=seed,
        workers=1,
        batch_size=settings.batch_size * settings.workers,
        epochs=settings.epochs,
        rate=rates.of_mode(Mode("bsp")),
        eval_every=settings.eval_every,
        pytorch=True,
    )


def _staleness(settings: Settings, rates: Rates, staleness: int, seed: int) -> RunSpec:
    """One worker whose gradients are held back. It is about accuracy, not time: without idle time."""
    return RunSpec(
        id=f"staleness_{staleness}-s{seed}",
        kind="staleness",
        mode=ONE_BY_ONE,
        condition="even",
        seed=seed,
        workers=1,
        batch_size=settings.batch_size,
        epochs=settings.epochs,
        rate=rates.of_staleness(staleness),
        staleness=staleness,
        eval_every=settings.eval_every,
    )


def experiment_flags(spec: RunSpec) -> list[str]:
    """Flags of ps_worker for the run's condition."""
    flags = []
    if spec.step_time_s > 0:
        flags.append(f"--experiment_step_time={spec.step_time_s * 1000:.6g}ms")
        if spec.condition == "straggler":
            flags.append(f"--experiment_straggler={spec.workers - 1}:{STRAGGLER_FACTOR}")
        elif spec.condition == "transient":
            flags.append(f"--experiment_delays={DELAY_SHARE}:{DELAY_FACTOR}")
    if spec.staleness is not None:
        flags.append(f"--experiment_staleness={spec.staleness}")
    return flags
