"""Writes a report's sentences anew from recompute.py's figures, without the report's modules."""

from __future__ import annotations

import math
from typing import Any

from recompute import TARGETS, by_seed, counts, paired, points, reached, spread_text, statistics, t_975

Group = list[dict[str, Any]]
BEGIN = {
    "even": "When workers are alike",
    "straggler": "When one worker is always four times slower",
    "transient": "When each worker is now and then ten times slower",
}


def ratio(own: dict[int, float], other: dict[int, float]) -> tuple[float, float, float] | None:
    """A mean ratio with its interval's ends; None without an interval."""
    found = paired({seed: math.log(own[seed]) for seed in own}, {seed: math.log(other[seed]) for seed in other})
    if found is None or found[1] is None:
        return None
    return math.exp(found[0]), math.exp(found[0] - found[1]), math.exp(found[0] + found[1])


def times_to(group: Group, bsp: Group) -> tuple[float, tuple[float, float, float]] | None:
    """The highest accuracy that all runs of both reached, and the ratio of the times to it."""
    if any(run["cpu"] > 0.7 for run in group + bsp):
        return None
    for target in reversed(TARGETS):
        seconds = [{run["seed"]: mark[0] for run in each if run["status"] == "done" and (mark := reached(run, target))}
                   for each in (group, bsp)]  # fmt: skip
        if len(seconds[0]) == len(group) and len(seconds[1]) == len(bsp):
            found = ratio(*seconds)
            if found is not None:
                return target, found
    return None


def time_sentence(group: Group, bsp: Group) -> str:
    """What is said of the time to an accuracy; empty if nothing is."""
    found = times_to(group, bsp)
    if found is None:
        return ""
    target, (mean, low, high) = found
    if low <= 1 <= high:
        return f"the runs do not show another time to {target:.0%} than bsp's".replace("%", " %")
    return f"{100 * target:.0f} % accuracy in {mean:.2f} times bsp's time ({low:.2f} to {high:.2f} times)"


def wait_sentence(group: Group, bsp: Group) -> str:
    """What is said of waiting; empty if nothing is."""
    if any(run["cpu"] > 0.7 for run in group + bsp):
        return ""
    found = paired(by_seed(group, "wait", 100), by_seed(bsp, "wait", 100))
    if found is None or found[1] is None:
        return ""
    mean, half = found
    if abs(mean) <= half:
        return f"no other share of waiting than bsp's is shown ({mean:+.1f} ± {half:.1f} points)"
    return f"workers wait {abs(mean):.1f} ± {half:.1f} points of their time {'less' if mean < 0 else 'more'} than bsp's"


class Judged:
    """What the intervals say of a mode beside bsp."""

    def __init__(self, group: Group, bsp: Group) -> None:
        self.mode = group[0]["mode"]
        self.speed = ratio(by_seed(group, "rate"), by_seed(bsp, "rate"))
        self.faster = self.speed is not None and self.speed[1] > 1 and self.speed[0] >= 1.05
        lost = any(run["status"] != "done" for run in group + bsp)
        found = None if lost else paired(by_seed(group, "accuracy", 100), by_seed(bsp, "accuracy", 100))
        self.accuracy = None if found is None or found[1] is None else (found[0], found[1])
        to_target = times_to(group, bsp)
        self.time = to_target if to_target and not to_target[1][1] <= 1 <= to_target[1][2] else None

    @property
    def kind(self) -> str:
        """Which list it is in."""
        if not self.faster:
            return "rest"
        if self.time is not None and self.time[1][0] > 1:
            return "later"
        if self.accuracy is None:
            return "unknown"
        mean, half = self.accuracy
        if mean + half < 0:
            return "costly"
        return "equal" if mean - half >= -1 else "unknown"

    def __str__(self) -> str:
        price = "price not known"
        if self.accuracy is not None:
            mean, half = self.accuracy
            price = f"{mean:+.2f} ± {half:.2f} points"
            if abs(mean) > half:
                price = f"{abs(mean):.2f} ± {half:.2f} points {'less' if mean < 0 else 'more'} accurate"
        if self.time is not None:
            price += f", {100 * self.time[0]:.0f} % accuracy in {self.time[1][0]:.2f} times bsp's time"
        assert self.speed is not None
        return f"{self.mode} ({self.speed[0]:.2f} times bsp's samples/s, {price})"


def choice(condition: str, groups: list[Group]) -> str:
    """The sentences of what to choose under a condition; the first group is bsp's."""
    begin, bsp = BEGIN[condition], groups[0]
    if any(run["cpu"] > 0.7 for group in groups for run in group):
        return f"{begin}: nothing can be said about speed, since the processors were busy (CPU-bound)."
    judged = [Judged(group, bsp) for group in groups[1:]]
    if all(each.speed is None for each in judged):
        return f"{begin}: nothing can be said, since intervals need two seeds or more that finished."
    fast = sorted((each for each in judged if each.faster), key=lambda each: -each.speed[0] if each.speed else 0)
    if not fast:
        return f"{begin}, no mode was shown to be at least 5 % faster than bsp, the reproducible one: choose bsp."
    said = []
    for kind, alone, after, end in (
        ("equal", f"{begin}, choose", "", ": faster than bsp without a loss of accuracy that matters."),
        ("costly", f"{begin}, these were faster than bsp, at a price in accuracy:",
         "Faster, at a price in accuracy:", "."),
        ("unknown", f"{begin}, these were faster than bsp, but these runs do not tell at what price in accuracy:",
         "Faster, but these runs do not tell at what price in accuracy:", "."),
        ("later", f"{begin}, these took more samples a second than bsp, but reached an accuracy later:",
         "More samples a second, but reached an accuracy later:", "."),
    ):  # fmt: skip
        own = [str(each) for each in fast if each.kind == kind]
        if own:
            said.append(f"{after if said else alone} {(' or ' if kind == 'equal' else '; ').join(own)}{end}")
    if rest := [each.mode for each in judged if not each.faster]:
        said.append(f"Not shown to be worth it: {', '.join(rest)}.")
    return " ".join(said)


def reference_rows(curves: dict[str, Group]) -> list[list[str]]:
    """The table of the reference curves, by name; all are compared with NxB."""
    rows = []
    first = by_seed(curves["NxB"], "accuracy", 100)
    for name, group in curves.items():
        own = by_seed(group, "accuracy", 100)
        half = t_975(len(own)) * statistics.stdev(own.values()) / math.sqrt(len(own))
        row = [name, counts(group), spread_text(list(own.values()), 2), f"± {half:.2f}"]
        row.append(points(own, None if name == "NxB" else first))
        rows.append([*row, f"{group[0]['learning_rate']:g}", f"{group[0]['momentum']:g}"])
    return rows


def apart(group: Group, other: Group) -> tuple[float, float, int]:
    """The largest differences of accuracy, in points, and of loss, and at how many shared marks."""
    accuracies, losses = [], []
    for run in group:
        for twin in other:
            if run["seed"] != twin["seed"]:
                continue
            batch = max(each["batch_size"] * each["workers"] for each in (run, twin))
            for mine, its in zip(run["marks"], twin["marks"], strict=False):
                if abs(mine[2] - its[2]) < batch:
                    accuracies.append(100 * abs(mine[3] - its[3]))
                    losses.append(abs(mine[4] - its[4]))
    return max(accuracies), max(losses), len(losses)
