"""Reading the metrics files (`--metrics_file`) of one process: one JSON object a line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class Events(list[Event]):
    """All whole lines of a metrics file."""

    broken_line: int | None = None  # The first one that is not whole, from 1.


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


def named(events: list[Event], name: str) -> list[Event]:
    """The events of that name, in the file's order."""
    return [event for event in events if event["event"] == name]


def number(event: Event, field: str) -> float | None:
    """A field's finite value; None if it is missing, null, not a number or not finite."""
    value = event.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def process_start_unix_s(events: list[Event]) -> float | None:
    """The Unix time at which the process's `t` was 0, by its first `start` event."""
    for event in named(events, "start"):
        unix_time_s, t_s = number(event, "unix_time"), number(event, "t")
        if unix_time_s is not None and t_s is not None:
            return unix_time_s - t_s
    return None
