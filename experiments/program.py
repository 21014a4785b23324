"""A program that is run by itself to its end: no server, no worker of a job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from process import Child, end_all, wait_until

from .job import GRACE_S, last_line
from .lab import ExperimentFailed, Lab


def run_program(lab: Lab, name: str, command: Sequence[str], folder: Path, limit_s: float = 600) -> Child:
    """Runs it; its output is in FOLDER/NAME.out and .log. ExperimentFailed if it fails or takes longer than the limit;
    KeyboardInterrupt if a signal asked to stop.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        child = Child(name, command, folder)
    except OSError as error:
        raise ExperimentFailed(f"{name}: {error.filename}: {error.strerror}") from None
    try:
        in_time = wait_until(lambda: not child.running, limit_s, lambda: lab.stop.requested)
    finally:
        end_all([child], GRACE_S, lambda: lab.stop.hurry)
    if lab.stop.requested:
        raise KeyboardInterrupt
    if not in_time:
        raise ExperimentFailed(f"{name}: not done after {limit_s:g} s")
    if child.status != 0:
        raise ExperimentFailed(f"{name} {child.ending()}: {last_line(child.log)}")
    return child
