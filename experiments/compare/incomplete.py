"""Whether the metrics files of a run that ended as it should are whole.

A disk that was full for a moment, or a file that was cut off, must not change a mean.
"""

from __future__ import annotations

from events import Events, named, number


def lack_of(chief: Events, workers: dict[int, Events], count: int) -> str:
    """What the files of this run of so many workers lack, in a few words; empty: nothing."""
    files = {"server0.jsonl": chief} | {f"worker{rank}.jsonl": workers.get(rank, Events()) for rank in range(count)}
    for name, events in files.items():
        if events.broken_line is not None:
            return f"line {events.broken_line} of {name} is broken"
        if not events:
            return f"{name} is missing or empty"
    without_end = [name for name, events in files.items() if not named(events, "end")]
    # Scripts of users may end without telling it; but where one worker tells it, all do.
    if without_end and without_end != list(files)[1:]:
        return f"{without_end[0]} has no end"
    versions = [number(event, "version") for event in named(chief, "apply")]
    if versions != [first + 1 for first in range(len(versions))]:
        return "server0.jsonl lacks a version"
    return ""
