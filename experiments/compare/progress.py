"""What the user sees while runs are made: one line each, on stderr."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

from outcome import last_result

# Beyond it, times tell of the scheduler and not of the mode.
CPU_SHARE_MAX = 0.7


def print_anywhere() -> None:
    """A terminal that knows only ASCII gets question marks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def say(text: str) -> None:
    print(f"compare: {text}", file=sys.stderr, flush=True)


def runs(count: int) -> str:
    return f"{count} run" if count == 1 else f"{count} runs"


def duration(seconds: float) -> str:
    """For people: "8 s", "12 min", "1 h 05 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"


def cpu_share(result: dict[str, Any]) -> float:
    """Of the cores, in the run's training."""
    available_s = result["wall_s"] * result["cores"]
    return result["cpu_s"] / available_s if available_s > 0 else 0.0


def run_line(number: int, total: int, result: dict[str, Any], folder: Path, left: str) -> str:
    """Which of how many, what, the result, the time left."""
    parts = [result["status"], f"{result['total_wall_s']:.1f} s"]
    if result["status"] == "done":
        measured = last_result(folder, "validation" if result["validation_split"] > 0 else "test")
        if measured.accuracy is not None:
            parts.append(f"accuracy {measured.accuracy:.2%}")
        elif measured.loss is not None:
            parts.append(f"loss {measured.loss:.5g}")
        if result["step_time_s"] > 0 and cpu_share(result) > CPU_SHARE_MAX:
            parts.append(f"CPU-bound ({cpu_share(result):.0%} of the cores)")
    else:
        parts.append(result["reason"])
    width = len(str(total))
    return f"{number:{width}} of {total}  {result['id']}: {', '.join(parts)}{left}"
