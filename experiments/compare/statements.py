"""What may be said in words: a statement where its 95 % interval allows it, else that the runs do not show it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pandas as pd

from experiments.compare.groups import PYTORCH, Comparison, Group
from experiments.compare.runs import TARGETS
from experiments.shared.intervals import Ratio
from experiments.shared.pages import plural

LOSS_POINTS_THAT_MATTER = 1.0  # A mode is recommended where the interval excludes such a loss of accuracy.
WORTH_RATIO = 1.05  # A mode that is faster by less is not recommended for it.
CONDITION_WORDS = {
    "even": "When workers are alike",
    "straggler": "When one worker is always four times slower",
    "transient": "When each worker is now and then ten times slower",
}


def about(group: Group) -> str:
    """What the runs say of a mode beside bsp under one condition; empty for bsp itself."""
    if not group.is_compared:
        return ""
    said = [_speed(group), _waiting(group), _accuracy(group), _time_to_target(group)]
    return f"{group.mode}: {'; '.join(each for each in said if each)}."


def _speed(group: Group) -> str:
    if _cpu_bound(group):
        return "no statement about speed, since the processors were busy (CPU-bound)"
    found = group.speed_ratio
    if found is None:
        return "no statement about speed, since it and bsp have no seed with which both finished"
    if found.low is None:
        return f"{found.mean:.2f} times bsp's samples/s with one seed, which allows no statement"
    if not found.differs:
        return f"the runs do not show another throughput than bsp's ({found.range} times)"
    return f"{found.mean:.2f} times bsp's samples/s (95 % interval {found.range} times)"


def _waiting(group: Group) -> str:
    found = None if _cpu_bound(group) else group.difference("wait_percent")
    if found is None or found.half is None:
        return ""
    if not found.excludes(0):
        return f"no other share of waiting than bsp's is shown ({found.text(1, '+')} points)"
    side = "less" if found.mean < 0 else "more"
    return f"workers wait {abs(found.mean):.1f} ± {found.half:.1f} points of their time {side} than bsp's"


def _cpu_bound(group: Group) -> bool:
    return group.cpu_bound or (group.reference is not None and group.reference.cpu_bound)


def _accuracy(group: Group) -> str:
    if lost := _lost(group):
        return f"no statement about accuracy, since {lost}"
    found = group.accuracy_difference
    if found is None:
        return "no statement about accuracy, since nothing was evaluated on a test split"
    if found.half is None:
        return f"{found.mean:+.2f} points from bsp's accuracy with one seed, which allows no statement"
    if not found.excludes(0):
        return f"the runs do not show another accuracy than bsp's ({found.text(sign='+')} points)"
    side = "below" if found.mean < 0 else "above"
    return f"accuracy {abs(found.mean):.2f} ± {found.half:.2f} points {side} bsp's"


def _lost(group: Group) -> str:
    """Which runs are missing for a comparison of means; empty if none."""
    for each in (group, group.reference):
        if each is not None and each.lost:
            return f"{len(each.lost)} of {len(each.runs)} runs of {each.mode} did not end as they should"
    return ""


def _highest(group: Group) -> tuple[str, Ratio] | None:
    """The highest accuracy that all runs of both reached, and the times to it, where they have an interval."""
    for target in sorted(TARGETS, reverse=True):
        found = None if _cpu_bound(group) else group.time_ratio(target)
        if found is not None and found.low is not None:
            return f"{100 * target:.0f} %", found
    return None


def _time_to_target(group: Group) -> str:
    if (highest := _highest(group)) is None:
        return ""
    percent, found = highest
    if found.differs:
        return f"{percent} accuracy in {found.mean:.2f} times bsp's time ({found.range} times)"
    return f"the runs do not show another time to {percent} than bsp's ({found.range} times)"


def _later(group: Group) -> bool:
    """Shown to reach an accuracy later than bsp, however many samples it takes a second."""
    highest = _highest(group)
    return highest is not None and highest[1].differs and highest[1].mean > 1


def choices(comparison: Comparison) -> list[str]:
    """What to choose when: a sentence for each condition, made of allowed statements only."""
    return [_choice(comparison.under(condition), condition) for condition in comparison.conditions]


def _choice(groups: list[Group], condition: str) -> str:
    begin = CONDITION_WORDS.get(condition, f"Under {condition}")
    others = [group for group in groups if group.is_compared]
    if not others:
        return f"{begin}: nothing can be said, since bsp and another mode are needed."
    if any(group.cpu_bound for group in groups):
        return f"{begin}: nothing can be said about speed, since the processors were busy (CPU-bound)."
    if all(group.speed_ratio is None or group.speed_ratio.low is None for group in others):
        return f"{begin}: nothing can be said, since intervals need two seeds or more that finished."
    speeds = {group.mode: group.speed_ratio.mean for group in others if group.speed_ratio and group.speed_ratio.differs}
    faster = sorted((group for group in others if speeds.get(group.mode, 0) > 1), key=lambda each: -speeds[each.mode])
    worth = [group for group in faster if speeds[group.mode] >= WORTH_RATIO]
    later = [group for group in worth if _later(group)]
    equal = [group for group in worth if _loss_excluded(group) and group not in later]
    costly = [group for group in worth if _loss_shown(group) and group not in later]
    unknown = [group for group in worth if group not in (*equal, *costly, *later)]
    parts = []
    if equal:
        parts.append(f"{begin}, choose {_or(equal)}: faster than bsp without a loss of accuracy that matters.")
    for own, first, after, what in (
        (costly, "were faster", "Faster", "at a price in accuracy"),
        (unknown, "were faster", "Faster", "but these runs do not tell at what price in accuracy"),
        (later, "took more samples a second", "More samples a second", "but reached an accuracy later"),
    ):
        if own:
            start = after if parts else f"{begin}, these {first} than bsp"
            parts.append(f"{start}, {what}: {_or(own, '; ')}.")
    if not worth:
        least = f"{100 * (WORTH_RATIO - 1):.0f} %"
        parts.append(
            f"{begin}, no mode was shown to be at least {least} faster than bsp, the reproducible one: choose bsp."
        )
    elif rest := [group.mode for group in others if group not in worth]:
        parts.append(f"Not shown to be worth it: {', '.join(rest)}.")
    return " ".join(parts)


def _or(groups: list[Group], separator: str = " or ") -> str:
    return separator.join(
        f"{each.mode} ({each.speed_ratio.mean:.2f} times bsp's samples/s, {_price(each)}{_shown_time(each)})"
        for each in groups
        if each.speed_ratio
    )


def _shown_time(group: Group) -> str:
    highest = _highest(group)
    if highest is None or not highest[1].differs:
        return ""
    return f", {highest[0]} accuracy in {highest[1].mean:.2f} times bsp's time"


def _loss_shown(group: Group) -> bool:
    """Accuracy was shown to be worse than bsp's."""
    found = group.accuracy_difference
    return not _lost(group) and found is not None and found.excludes(0) and found.mean < 0


def _loss_excluded(group: Group) -> bool:
    """Accuracy was neither shown to be worse, nor can it be by an amount that matters."""
    found = group.accuracy_difference
    low = None if found is None or _lost(group) else found.low
    return low is not None and not _loss_shown(group) and low >= -LOSS_POINTS_THAT_MATTER


def _price(group: Group) -> str:
    found = group.accuracy_difference
    if _lost(group) or found is None or found.half is None or found.low is None:
        return "price not known"
    if found.excludes(0):
        return f"{abs(found.mean):.2f} ± {found.half:.2f} points {'less' if found.mean < 0 else 'more'} accurate"
    return f"{found.text(sign='+')} points"


def about_staleness(comparison: Comparison) -> list[str]:
    """From which enforced staleness on accuracy is shown to suffer."""
    groups = [group for group in comparison.staleness if group.is_compared]
    if not groups:
        return []
    sentences = []
    for group in groups:
        found, value = group.accuracy_difference, group.runs[0].staleness
        if group.lost:
            lost = f"{len(group.lost)} of {len(group.runs)} runs"
            sentences.append(f"Staleness {value}: {lost} did not end as they should.")
        elif found is not None and found.half is not None:
            text = f"{found.text(sign='+')} points from staleness 0"
            shown = "" if found.excludes(0) else ", which does not show a difference"
            sentences.append(f"Staleness {value}: {text}{shown}.")
    return sentences or ["One seed allows no statement about what staleness costs."]


# ---- How far two curves that should be one are apart: bsp, one worker with its batches together, and plain PyTorch

WHY_ALIKE = (
    "NxB and PyTorch begin with equal weights and see equal batches. So does bsp, where no worker asks for a batch a "
    "whole step late, but that it fills the version at an epoch's end with batches of the next epoch where N·B does "
    "not divide the samples. At first they differ by rounding alone. Training amplifies that: an input of a ReLU "
    "that is once on the other side of 0 is enough."
)


def about_references(comparison: Comparison) -> list[str]:
    curves = [(f"bsp with {bsp.runs[0].workers} workers", bsp) for bsp in [comparison.group("bsp", "even")] if bsp]
    curves += [(name, group) for name in ("NxB", PYTORCH) if (group := comparison.reference(name)) is not None]
    found = [_apart(*one, *other) for place, other in enumerate(curves) for one in curves[place + 1 :]]
    return [each for each in found if each]


def _apart(name: str, group: Group, other_name: str, other: Group) -> str:
    """How far they are apart; empty if they share no marks."""
    seeds = _gaps(group, other)
    if not seeds or not (largest := _largest(pd.concat(seeds))):
        return ""
    first = pd.concat([gaps.iloc[:1] for gaps in seeds])
    return (
        f"{name} and {other_name}: at most {largest} apart, at {sum(map(len, seeds))} marks of "
        f"{plural(len(seeds), 'seed')}; at the first mark, after {first['samples'].iloc[0]:.0f} samples, "
        f"{_largest(first)}."
    )


def _gaps(group: Group, other: Group) -> list[pd.DataFrame]:
    """For each seed that both have: between their marks after the same number of samples, or within a batch of it."""
    found, runs = [], {run.seed: run for run in other.done}
    for run in group.done:
        if (twin := runs.get(run.seed)) is not None:
            marks, others = (one.marks.reset_index(drop=True) for one in (run, twin))
            gaps, batch = (marks - others).abs(), max(one.batch_size * one.workers for one in (run, twin))
            found.append(gaps.assign(samples=marks["samples"])[gaps["samples"] < batch])
    return [gaps for gaps in found if len(gaps)]


def _largest(gaps: pd.DataFrame) -> str:
    most = gaps[["accuracy", "loss"]].max()
    parts = (f"{100 * most['accuracy']:.2f} points of accuracy", f"{most['loss']:.2g} of loss")
    return " and ".join(part for part, value in zip(parts, most, strict=True) if not math.isnan(value))


# ---- The Compose demo's verdicts on sync and async with one slow worker, with figures

SPEED_RATIO_MIN = 1.5  # Async over sync. With one of three workers four times slower, 3 can be had.
ACCURACY_LOSS_MAX_POINTS = 2.0
TEST_SAMPLES = 10_000  # Fashion-MNIST has so many: an accuracy's own error follows from it when there is one seed.


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
    found.append(_speed_verdict(asynchronous))
    found.append(_accuracy_verdict(asynchronous, int(settings.get("test_samples", TEST_SAMPLES))))
    hashes = {run.weights_hash for run in sync.runs}
    found.append(Verdict("weights hash of sync as expected", hashes == {expected}))
    if killed := settings.get("killed_weights_hash"):
        found.append(Verdict("hash after the kills equals the undisturbed hash", killed == expected))
    return found


def _speed_verdict(group: Group) -> Verdict:
    ratio = group.speed_ratio
    if ratio is None:
        return Verdict(f"async at least {SPEED_RATIO_MIN:g} times as fast as sync (not measured)", False)
    spread = f" ({ratio.range})" if ratio.range else ""
    text = f"async {ratio.mean:.2f} times the throughput of sync{spread}, at least {SPEED_RATIO_MIN:g} wanted"
    return Verdict(text, ratio.mean >= SPEED_RATIO_MIN)


def _accuracy_verdict(group: Group, test_samples: int) -> Verdict:
    """Good unless the loss exceeds what is accepted by more than its error."""
    found = group.accuracy_difference
    if found is None:
        return Verdict("accuracy of async not below that of sync (not measured)", False)
    accuracy = group.mean("final_accuracy") or 0.0
    error = 100 * 1.96 * math.sqrt(2 * accuracy * (1 - accuracy) / test_samples)
    half, origin = found.half, f"{found.count} seeds"
    if half is None:
        half = error
        origin = f"one seed, the error of {test_samples} test samples"
    text = f"accuracy difference {found.mean:+.2f} ± {half:.2f} points ({origin}), a loss of more than "
    return Verdict(f"{text}{ACCURACY_LOSS_MAX_POINTS:g} is not shown", found.mean + half >= -ACCURACY_LOSS_MAX_POINTS)
