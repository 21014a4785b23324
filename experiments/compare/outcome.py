"""What became of a run: by its processes' endings, logs and metrics.

done; diverged: weights or losses are not finite; did not learn: it ended, at an accuracy of about guessing, which a
training that is much too short does too; failed; timed out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from events import read_events
from incomplete import lack_of
from process import Child

RESULTS = ("done", "diverged", "did not learn")  # Of the others nothing is known: they are made again.
_NOT_FINITE = re.compile("(?:is|are|was|were) not finite")
_LOG_PREFIX = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+ ")
# As psrun says it: "psrun: worker 1 ended with status 1: ending the others".
_PSRUN_BLAMES = re.compile(r"psrun: ((?:worker|server) \d+) (?:ended with|was killed by) [^:]*")
_TAIL_BYTES = 64 << 10
_REASON_CHARACTERS = 300
# Of guessing.
_CHANCE_FACTOR = 1.5


@dataclass(frozen=True)
class Result:
    """The last evaluation on a split. None where it is not known, or not finite."""

    loss: float | None = None
    accuracy: float | None = None
    found: bool = False
    diverged: bool = False  # A loss is there, and not finite. Scripts of users need not tell of one.


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a metrics file that are whole; none if there is no file."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            yield event


def last_result(folder: Path, split: str = "test") -> Result:
    """The evaluation of the highest version on this split, by whichever worker was the lead."""
    best: dict[str, Any] | None = None
    for path in sorted(folder.glob("worker*.jsonl")):
        for event in read_lines(path):
            if event.get("event") != "eval" or event.get("split") != split:
                continue
            if best is None or event.get("version", 0) >= best.get("version", 0):
                best = event
    if best is None:
        return Result()
    loss = _finite(best.get("loss"))
    return Result(loss, _finite(best.get("accuracy")), found=True, diverged="loss" in best and loss is None)


def _finite(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _tail(path: Path) -> list[str]:
    """The last lines that say something."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [_LOG_PREFIX.sub("", line).strip() for line in text.splitlines() if line.strip()]


def last_line(child: Child) -> str:
    """Of its log, else of its output."""
    lines = _tail(child.log) or _tail(child.out)
    return lines[-1][:_REASON_CHARACTERS] if lines else ""


def not_finite_line(children: Sequence[Child]) -> str | None:
    """The first line of the logs that says that weights or gradients were not finite."""
    for child in children:
        for line in _tail(child.log):
            if _NOT_FINITE.search(line):
                return line[:_REASON_CHARACTERS]
    return None


def failure_reason(child: Child) -> str:
    """How this process failed, in a line."""
    said = last_line(child)
    blamed = next(filter(None, map(_PSRUN_BLAMES.match, _tail(child.log))), None)
    if blamed:  # What it said is above, and the others' ends may be below.
        prefix = f"[{blamed[1]}] "
        own = [line for line in _tail(child.log) if line.startswith(prefix)]
        name = blamed[0].removeprefix("psrun: ")
        return name + (f": {own[-1].removeprefix(prefix)[:_REASON_CHARACTERS]}" if own else "")
    if said.startswith("I "):  # What it told of as it went on is not the cause.
        said = ""
    return f"{child.name} {child.ending()}" + (f": {said}" if said else "")


def status_of_ended(
    children: Sequence[Child], blamed: Child | None, folder: Path, classes: int | None
) -> tuple[str, str]:
    """Status and reason of a run whose processes have all ended by themselves, or after `blamed` had failed."""
    if blamed is not None:
        line = not_finite_line(children)
        return ("diverged", line) if line else ("failed", failure_reason(blamed))
    result = last_result(folder)
    if not result.found:
        return "done", ""
    if result.diverged:
        return "diverged", "the final test loss is not finite"
    if classes and result.accuracy is not None and result.accuracy <= _CHANCE_FACTOR / classes:
        return "did not learn", f"the final test accuracy is {result.accuracy:.1%}, about that of guessing"
    return "done", ""


def lack_of_metrics(folder: Path, workers: int) -> str:
    """What the metrics files of a run that is done lack, for people; empty: nothing."""
    files = {rank: read_events(folder / f"worker{rank}.jsonl") for rank in range(workers)}
    lack = lack_of(read_events(folder / "server0.jsonl"), files, workers)
    return lack and f"its metrics are not whole: {lack}"
