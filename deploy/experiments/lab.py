"""Where an experiment runs: its folder, the programs, and whether it takes its quick form."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from process import Stop


class ExperimentFailed(Exception):
    """Why it came to no result, in one line."""


class Skipped(Exception):
    """What this machine lacks for the experiment, or for a part of it, in one line."""


@dataclass
class Lab:
    """What an experiment is given."""

    name: str
    folder: Path  # For all that it makes.
    bin: Path  # With ps_server, ps_worker and ps_bench.
    quick: bool = False  # As CI runs it: all its parts, none of them long enough for figures to be worth quoting.
    data_dir: str = ""  # Of ps_worker, for MNIST's files.
    python: str = sys.executable  # May have PyTorch.
    stop: Stop = field(default_factory=Stop)
    began: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        """A line of progress, on stderr."""
        print(f"experiments: {self.name}: {text}", file=sys.stderr, flush=True)

    def pick(self, full, quick):
        """The one for this form."""
        return quick if self.quick else full
