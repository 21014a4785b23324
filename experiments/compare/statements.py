"""What may be said in words: a statement where its 95 % interval allows it, else that the runs do not show it."""

from __future__ import annotations

from records import TARGETS
from spread import Ratio
from summary import Comparison, Group, wait_percent

LOSS_POINTS_THAT_MATTER = 1.0  # Of accuracy. A mode is recommended where the interval excludes such a loss.
WORTH_RATIO = 1.05  # A mode that is faster by less is not recommended for it.
CONDITION_WORDS = {
    "even": "When workers are alike",
    "straggler": "When one worker is always four times slower",
    "transient": "When each worker is now and then ten times slower",
}


def words_of(condition: str) -> str:
    """The begin of a sentence."""
    return CONDITION_WORDS.get(condition, f"Under {condition}")


def about(group: Group) -> str:
    """What the runs say of a mode beside bsp under one condition; empty for bsp itself."""
    if group.reference is None or group.reference is group:
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
        return f"the runs do not show another throughput than bsp's ({_range(found)})"
    return f"{found.mean:.2f} times bsp's samples/s (95 % interval {_range(found)})"


def _waiting(group: Group) -> str:
    found = None if _cpu_bound(group) else group.difference(wait_percent)
    if found is None or found.half is None:
        return ""
    if not found.excludes(0):
        return f"no other share of waiting than bsp's is shown ({found.mean:+.1f} ± {found.half:.1f} points)"
    side = "less" if found.mean < 0 else "more"
    return f"workers wait {abs(found.mean):.1f} ± {found.half:.1f} points of their time {side} than bsp's"


def _cpu_bound(group: Group) -> bool:
    return group.cpu_bound or (group.reference is not None and group.reference.cpu_bound)


def _range(found: Ratio) -> str:
    return f"{found.low:.2f} to {found.high:.2f} times"


def _accuracy(group: Group) -> str:
    if lost := _lost(group):
        return f"no statement about accuracy, since {lost}"
    found = group.accuracy_difference
    if found is None:
        return "no statement about accuracy, since nothing was evaluated on a test split"
    if found.half is None:
        return f"{found.mean:+.2f} points from bsp's accuracy with one seed, which allows no statement"
    if not found.excludes(0):
        return f"the runs do not show another accuracy than bsp's ({found.mean:+.2f} ± {found.half:.2f} points)"
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
        return f"{percent} accuracy in {found.mean:.2f} times bsp's time ({_range(found)})"
    return f"the runs do not show another time to {percent} than bsp's ({_range(found)})"


def _later(group: Group) -> bool:
    """Shown to reach an accuracy later than bsp, however many samples it takes a second."""
    highest = _highest(group)
    return highest is not None and highest[1].differs and highest[1].mean > 1


def choices(comparison: Comparison) -> list[str]:
    """What to choose when: a sentence for each condition, made of allowed statements only."""
    return [_choice(comparison.under(condition), condition) for condition in comparison.conditions]


def _choice(groups: list[Group], condition: str) -> str:
    begin = words_of(condition)
    others = [group for group in groups if group.reference is not None and group.reference is not group]
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
    if costly:
        start = "Faster" if parts else f"{begin}, these were faster than bsp"
        parts.append(f"{start}, at a price in accuracy: {_or(costly, '; ')}.")
    if unknown:
        start = "Faster" if parts else f"{begin}, these were faster than bsp"
        parts.append(f"{start}, but these runs do not tell at what price in accuracy: {_or(unknown, '; ')}.")
    if later:
        start = "More samples a second" if parts else f"{begin}, these took more samples a second than bsp"
        parts.append(f"{start}, but reached an accuracy later: {_or(later, '; ')}.")
    if not worth:
        least = f"{100 * (WORTH_RATIO - 1):.0f} %"
        parts.append(
            f"{begin}, no mode was shown to be at least {least} faster than bsp, the reproducible one: choose bsp."
        )
    elif rest := [group.mode for group in others if group not in worth]:
        parts.append(f"Not shown to be worth it: {', '.join(rest)}.")
    return " ".join(parts)


def _or(groups: list[Group], separator: str = " or ") -> str:
    """Each mode with its speed and its price."""
    return separator.join(
        f"{each.mode} ({each.speed_ratio.mean:.2f} times bsp's samples/s, {_price(each)}{_shown_time(each)})"
        for each in groups
        if each.speed_ratio
    )


def _shown_time(group: Group) -> str:
    """Beside its price."""
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
    """What a faster mode costs in accuracy."""
    found = group.accuracy_difference
    if _lost(group) or found is None or found.half is None or found.low is None:
        return "price not known"
    if found.excludes(0):
        return f"{abs(found.mean):.2f} ± {found.half:.2f} points {'less' if found.mean < 0 else 'more'} accurate"
    return f"{found.mean:+.2f} ± {found.half:.2f} points"


def about_staleness(comparison: Comparison) -> list[str]:
    """From which enforced staleness on accuracy is shown to suffer."""
    groups = [group for group in comparison.staleness if group.reference is not group]
    if not groups or groups[0].reference is None:
        return []
    sentences = []
    for group in groups:
        found, value = group.accuracy_difference, group.runs[0].staleness
        if group.lost:
            sentences.append(
                f"Staleness {value}: {len(group.lost)} of {len(group.runs)} runs did not end as they should."
            )
        elif found is not None and found.half is not None:
            text = f"{found.mean:+.2f} ± {found.half:.2f} points from staleness 0"
            shown = "" if found.excludes(0) else ", which does not show a difference"
            sentences.append(f"Staleness {value}: {text}{shown}.")
    return sentences or ["One seed allows no statement about what staleness costs."]
