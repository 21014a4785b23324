"""Whether the metrics files of a run that ended as it should are whole.

A disk that was full for a moment, or a file that was cut off, must not change a mean.
"""

from __future__ import annotations

import json
from pathlib import Path

from events import named, number, read_events


def lack_of(folder: Path, workers: int) -> str:
    """What the files of this run lack, in a few words; empty: nothing."""
    server = folder / "server0.jsonl"
    files = [server, *(folder / f"worker{rank}.jsonl" for rank in range(workers))]
    for path in files:
        if not path.is_file():
            return f"{path.name} is missing"
        if (line := _broken_line(path)) is not None:
            return f"line {line} of {path.name} is broken"
    # Scripts of users may end without telling it; where one worker does, all do.
    without_end = [path.name for path in files if not named(read_events(path), "end")]
    if (without_end and len(without_end) != workers) or server.name in without_end:
        return f"{without_end[0]} has no end"
    versions = [number(event, "version") for event in named(read_events(server), "apply")]
    if versions != [first + 1 for first in range(len(versions))]:
        return f"{server.name} lacks a version"
    return ""


def _broken_line(path: Path) -> int | None:
    for count, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        try:
            json.loads(line)
        except ValueError:
            return count
    return None
