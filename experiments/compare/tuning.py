"""--tune: the learning rate and momentum of each mode, and of each enforced staleness, by equally many trials.

What is searched is the *effective* rate, learning rate / (1 - momentum), by which momentums can be compared: a grid
of three by three, and then a few trials that each follow from the best so far. If it is at the edge of the rates tried
with its momentum, the next one is beyond that edge; else it is between the best and a neighbour. The best is that of
the highest accuracy on the validation split at the end (where there is none, the lowest loss).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from experiments.compare.modes import ONE_BY_ONE, Mode
from experiments.compare.plan import Rate, RunSpec
from experiments.compare.settings import SEEDS_MAX, Settings

SEED = SEEDS_MAX + 1  # Those of reported runs are below it.
VALIDATION_SPLIT = 0.1
MOMENTUMS = (0.0, 0.5, 0.9)
TRIALS = 14  # Each item gets the grid, and five that follow from it.
_GRID_STEP = 3.0


@dataclass(frozen=True)
class Item:
    """What gets rates of its own."""

    name: str  # "ssp:2", or "staleness:8".
    mode: Mode
    workers: int
    staleness: int | None
    center: float  # The learning rate around which to search, with momentum 0.9.
    untuned: tuple[float, float]  # Learning rate and momentum.

    @property
    def id(self) -> str:
        return self.name.replace(":", "_")


@dataclass(frozen=True)
class Trial:
    id: str
    learning_rate: float
    momentum: float
    status: str
    loss: float | None
    accuracy: float | None

    @property
    def effective(self) -> float:
        return self.learning_rate / (1 - self.momentum)

    @property
    def score(self) -> tuple[float, float]:
        """Higher is better."""
        if self.status != "done" or self.loss is None:
            return (-math.inf, -math.inf)
        return (0.0 if self.accuracy is None else self.accuracy, -self.loss)


def items_of(settings: Settings) -> list[Item]:
    """The one worker with batches of the same size that is a reference is the enforced staleness 0."""
    modes = list(settings.modes)
    if settings.references and not any(mode.name == "bsp" for mode in modes):
        modes.append(Mode("bsp"))

    def item(name: str, mode: Mode, workers: int, staleness: int | None) -> Item:
        center = mode.rate_of_samples(settings.learning_rate, settings.workers)
        if staleness is None:
            center = settings.rates.get(str(mode), center)
        return Item(name, mode, workers, staleness, center, settings.rate_of(mode, staleness))

    values = sorted(set(settings.staleness) | ({0} if settings.references else set()))
    return [item(str(mode), mode, settings.workers, None) for mode in modes] + [
        item(f"staleness:{value}", ONE_BY_ONE, 1, value) for value in values
    ]


def next_point(item: Item, trials: list[Trial]) -> tuple[float, float]:
    center = item.center / (1 - MOMENTUMS[-1])
    grid = [(center * _GRID_STEP**power, momentum) for momentum in reversed(MOMENTUMS) for power in (-1, 0, 1)]
    if len(trials) < len(grid):
        return grid[len(trials)]
    best = max(trials, key=lambda trial: trial.score)
    edge = edge_of(best, trials)
    if edge:
        return best.effective * _GRID_STEP**edge, best.momentum
    for point in _between(best):
        if not any(_same(point, trial) for trial in trials):
            return point
    raise AssertionError("there are more points between than trials")


def edge_of(best: Trial, trials: list[Trial]) -> int:
    """-1: no lower rate was tried with the best one's momentum; 1: no higher one; 0: both were."""
    with_its_momentum = [trial.effective for trial in trials if trial.momentum == best.momentum]
    if best.effective <= min(with_its_momentum):
        return -1
    return 1 if best.effective >= max(with_its_momentum) else 0


def _between(best: Trial) -> Iterator[tuple[float, float]]:
    """Around the best, from far to near."""
    factor = _GRID_STEP
    for _ in range(TRIALS):
        factor = math.sqrt(factor)
        yield best.effective * factor, best.momentum
        yield best.effective / factor, best.momentum


def _same(point: tuple[float, float], trial: Trial) -> bool:
    return point[1] == trial.momentum and math.isclose(point[0], trial.effective, rel_tol=1e-3)


def trial_spec(item: Item, settings: Settings, number: int, point: tuple[float, float], step_time_s: float) -> RunSpec:
    """Trial `number`, from 1. Enforced staleness needs no idle time."""
    effective, momentum = point
    rate = float(f"{effective * (1 - momentum):.4g}")
    return RunSpec(
        id=f"tune-{item.id}-lr{rate:g}-m{momentum:g}-t{number}",
        kind="tuning",
        mode=item.mode,
        condition="even",
        seed=SEED,
        workers=item.workers,
        batch_size=settings.batch_size,
        epochs=settings.epochs,
        rate=Rate(rate, momentum, tuned=False),
        staleness=item.staleness,
        step_time_s=0 if item.staleness is not None else step_time_s,
        validation_split=VALIDATION_SPLIT,
    )


def tune(item: Item, settings: Settings, step_time_s: float, make: Callable[[RunSpec], Trial]) -> dict[str, Any]:
    """What goes into tuning.json about the item. `make` runs a trial, or finds the one that was run. Where no trial has
    ended well, the rate is the untuned one and says so.
    """
    trials: list[Trial] = []
    while len(trials) < TRIALS:
        spec = trial_spec(item, settings, len(trials) + 1, next_point(item, trials), step_time_s)
        trials.append(make(spec))
    best = max(trials, key=lambda trial: trial.score)
    ended_well = best.status == "done" and best.loss is not None
    return {
        "learning_rate": best.learning_rate if ended_well else item.untuned[0],
        "momentum": best.momentum if ended_well else item.untuned[1],
        "tuned": ended_well,
        "at_edge": ended_well and edge_of(best, trials) != 0,
        "validation_split": VALIDATION_SPLIT,
        "seed": SEED,
        "trials": [asdict(trial) for trial in trials],
    }


def rate_of(entry: dict[str, Any]) -> Rate:
    return Rate(entry["learning_rate"], entry["momentum"], entry["tuned"])


def line_of(item: Item, entry: dict[str, Any]) -> str:
    note = " (still at the edge of what was tried)" if entry["at_edge"] else ""
    if not entry["tuned"]:
        note = " (no trial ended well: not tuned)"
    return f"{item.name}: learning rate {entry['learning_rate']:g}, momentum {entry['momentum']:g}{note}"
