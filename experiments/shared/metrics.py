"""The metrics files (`--metrics_file`) of a job's processes: one JSON object a line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class Events(list[Event]):
    """All whole lines of a metrics file."""

    broken_line: int | None = None  # The first one that is not whole, from 1.

    def named(self, name: str) -> list[Event]:
        return [event for event in self if event["event"] == name]

    @property
    def start_unix_s(self) -> float | None:
        """The Unix time at which the process's `t` was 0, by its first `start` event that tells it."""
        for event in self.named("start"):
            unix_time_s, t_s = number(event, "unix_time"), number(event, "t")
            if unix_time_s is not None and t_s is not None:
                return unix_time_s - t_s
        return None


def read_events(path: Path) -> Events:
    """What a killed process left of a line, and a missing file, are passed over."""
    events = Events()
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return events
    for count, line in enumerate(text.splitlines(), 1):
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if isinstance(event, dict) and isinstance(event.get("event"), str):
            events.append(event)
        elif events.broken_line is None:
            events.broken_line = count
    return events


def number(event: Event, field: str) -> float | None:
    """A field's finite value; None if it is missing, null, not a number or not finite."""
    value = event.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def applied_unix_s(folder: Path) -> list[float]:
    """When the chief had applied each version."""
    chief = read_events(folder / "server0.jsonl")
    zero = chief.start_unix_s or 0.0
    return [zero + event["t"] for event in chief.named("apply")]


def lack_of(chief: Events, workers: dict[int, Events], count: int) -> str:
    """What the files of a run of so many workers that ended as it should lack, in a few words; empty: nothing.

    A disk that was full for a moment, or a file that was cut off, must not change a mean.
    """
    files = {"server0.jsonl": chief} | {f"worker{rank}.jsonl": workers.get(rank, Events()) for rank in range(count)}
    for name, events in files.items():
        if events.broken_line is not None:
            return f"line {events.broken_line} of {name} is broken"
        if not events:
            return f"{name} is missing or empty"
    without_end = [name for name, events in files.items() if not events.named("end")]
    # Scripts of users may end without telling it; but where one worker tells it, all do.
    if without_end and without_end != list(files)[1:]:
        return f"{without_end[0]} has no end"
    versions = [number(event, "version") for event in chief.named("apply")]
    return "" if versions == [first + 1 for first in range(len(versions))] else "server0.jsonl lacks a version"
