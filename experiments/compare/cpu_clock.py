"""How busy the processes of a run kept the processors while it trained."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

from outcome import read_lines
from process import Child

_EVERY_S = 0.1


class CpuClock:
    """The processor time of all processes over the wall clock, looked at ten times a second."""

    def __init__(self) -> None:
        self._unix_s: list[float] = []
        self._cpu_s: list[float] = []

    def look(self, children: Sequence[Child]) -> None:
        """To be called often."""
        now = time.time()
        if not self._unix_s or now - self._unix_s[-1] >= _EVERY_S:
            self._unix_s.append(now)
            self._cpu_s.append(sum(child.cpu_now_s() for child in children))

    def between_s(self, begin_unix_s: float, end_unix_s: float) -> float:
        """Processor time between two moments."""
        return self._at(end_unix_s) - self._at(begin_unix_s)

    def _at(self, unix_s: float) -> float:
        after = bisect_left(self._unix_s, unix_s)
        if after == 0 or after == len(self._unix_s):
            return self._cpu_s[min(after, len(self._cpu_s) - 1)] if self._cpu_s else 0.0
        begin, end = self._unix_s[after - 1], self._unix_s[after]
        share = (unix_s - begin) / (end - begin) if end > begin else 0.0
        return self._cpu_s[after - 1] + share * (self._cpu_s[after] - self._cpu_s[after - 1])


def applied_unix_s(folder: Path) -> list[float]:
    """When the chief had applied each version."""
    zero, times = 0.0, []
    for event in read_lines(folder / "server0.jsonl"):
        if event.get("event") == "start" and "unix_time" in event:
            zero = event["unix_time"] - event["t"]
        elif event.get("event") == "apply":
            times.append(event["t"])
    return [zero + t for t in times]
