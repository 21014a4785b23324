"""The Compose demo's verdicts on sync and async with one slow worker, with figures."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from summary import Comparison, Group

SPEED_RATIO_MIN = 1.5  # Of async over sync. With one of three workers four times slower, 3 can be had.
ACCURACY_LOSS_MAX_POINTS = 2.0
TEST_SAMPLES = 10_000  # Of Fashion-MNIST and MNIST: what an accuracy's own error follows from when there is one seed.


@dataclass(frozen=True)
class Verdict:
    """A sentence that ends with its answer."""

    text: str
    good: bool

    def __str__(self) -> str:
        return f"{self.text}: {'yes' if self.good else 'no'}"


def verdicts_of(comparison: Comparison, settings: dict[str, Any]) -> list[Verdict]:
    """Empty but for the Compose demo, whose plan's settings have `expected_weights_hash`, of bsp; they may have
    `test_samples`, and `killed_weights_hash`, of the same job after a worker and its chief were killed.
    """
    expected = settings.get("expected_weights_hash")
    sync, asynchronous = comparison.group("bsp", "straggler"), comparison.group("asp", "straggler")
    if not expected or sync is None or asynchronous is None:
        return []
    runs = sync.runs + asynchronous.runs
    done = sum(run.done for run in runs)
    found = [Verdict(f"{done} of {len(runs)} runs of sync and async ended as they should", done == len(runs))]
    found.append(_speed(asynchronous))
    found.append(_accuracy(asynchronous, int(settings.get("test_samples", TEST_SAMPLES))))
    hashes = {run.weights_hash for run in sync.runs}
    found.append(Verdict("weights hash of sync as expected", hashes == {expected}))
    if killed := settings.get("killed_weights_hash"):
        found.append(Verdict("hash after the kills equals the undisturbed hash", killed == expected))
    return found


def _speed(group: Group) -> Verdict:
    ratio = group.speed_ratio
    if ratio is None:
        return Verdict(f"async at least {SPEED_RATIO_MIN:g} times as fast as sync (not measured)", False)
    spread = "" if ratio.low is None else f" ({ratio.low:.2f} to {ratio.high:.2f})"
    text = f"async {ratio.mean:.2f} times the throughput of sync{spread}, at least {SPEED_RATIO_MIN:g} wanted"
    return Verdict(text, ratio.mean >= SPEED_RATIO_MIN)


def _accuracy(group: Group, test_samples: int) -> Verdict:
    """Good unless the loss exceeds what is accepted by more than its error."""
    found = group.accuracy_difference
    if found is None:
        return Verdict("accuracy of async not below that of sync (not measured)", False)
    accuracy = group.mean(lambda run: run.final_accuracy) or 0.0
    error = 100 * 1.96 * math.sqrt(2 * accuracy * (1 - accuracy) / test_samples)
    half, origin = found.half, f"{found.count} seeds"
    if half is None:
        half = error
        origin = f"one seed, the error of {test_samples} test samples"
    text = f"accuracy difference {found.mean:+.2f} ± {half:.2f} points ({origin}), a loss of more than "
    return Verdict(f"{text}{ACCURACY_LOSS_MAX_POINTS:g} is not shown", found.mean + half >= -ACCURACY_LOSS_MAX_POINTS)
