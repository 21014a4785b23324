"""Where an experiment runs: its folder, the programs, and whether it takes its quick form."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from process import Stop

from .made import Made, as_stored, kept, made_now


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
    fresh: bool = False  # What earlier runs have left is made again.
    made: dict[str, Made] = field(default_factory=dict)  # What was used so far, by name.

    def say(self, text: str) -> None:
        """A line of progress, on stderr."""
        print(f"experiments: {self.name}: {text}", file=sys.stderr, flush=True)

    def may_keep(self, name: str) -> bool:
        """Whether what is there under this name may be used."""
        return not self.fresh or name in self.made

    def note_made(self, name: str, seconds: float) -> dict[str, Any]:
        """It has just been made. Returns what is to be stored with it."""
        self.made[name] = made_now(seconds)
        return as_stored(self.made[name])

    def note_kept(self, name: str, stored: Mapping[str, Any], file: Path, seconds: float | None = None) -> None:
        """What the file has is used; `seconds`: that it took, if that is not stored otherwise."""
        if name not in self.made:
            self.made[name] = kept(stored, file, seconds)

    def pick(self, full, quick):
        """The one for this form."""
        return quick if self.quick else full
