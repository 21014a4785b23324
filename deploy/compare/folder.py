"""The folder of a comparison: who writes to it, and what it was begun with."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from pathlib import Path
from typing import Any, TextIO

from flags import UsageError
from job import write_json

_LOCK = ".lock"
_PLAN = "plan.json"
_TUNING = "tuning.json"


class Refused(Exception):
    """Why the folder cannot be written to, in one line."""


class OutputFolder:
    """Locked for this process until it is closed. Refused if it is another one's, or not a comparison's."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            others = sorted(entry.name for entry in path.iterdir() if entry.name not in (_LOCK, _PLAN))
            if others and not (path / _PLAN).exists() and others != ["probe"]:
                raise Refused(
                    f"--output={path} is not empty and no comparison (it has {others[0]}); name another folder"
                )
            self._lock: TextIO = (path / _LOCK).open("a+", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--output={path}: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.seek(0)
            holder = self._lock.read().strip() or "another process"
            self._lock.close()
            raise Refused(f"{path} is being written to by {holder}") from None
        self._lock.truncate(0)
        self._lock.write(f"process {os.getpid()}\n")
        self._lock.flush()

    def close(self) -> None:
        self._lock.close()  # The file stays: another process may have it open, and lock it next.

    def read_plan(self) -> dict[str, Any] | None:
        """None if there is none yet."""
        path = self.path / _PLAN
        if not path.exists():
            return None
        try:
            plan = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise Refused(f"{path} cannot be read ({error}); remove {self.path} to start anew") from None
        return plan if isinstance(plan, dict) else {}

    def write_plan(self, plan: dict[str, Any]) -> None:
        write_json(self.path / _PLAN, plan)

    def read_tuning(self) -> dict[str, Any]:
        """What --tune has found so far, by item."""
        with contextlib.suppress(OSError, ValueError):
            found = json.loads((self.path / _TUNING).read_text(encoding="utf-8"))
            return found if isinstance(found, dict) else {}
        return {}

    def write_tuning(self, found: dict[str, Any]) -> None:
        write_json(self.path / _TUNING, found)

    def run_folder(self, run_id: str) -> Path:
        return self.path / "runs" / run_id

    def read_run(self, run_id: str) -> dict[str, Any] | None:
        """The run.json of a run that has ended."""
        with contextlib.suppress(OSError, ValueError):
            result = json.loads((self.run_folder(run_id) / "run.json").read_text(encoding="utf-8"))
            return result if isinstance(result, dict) else None
        return None


def check_same(old: dict[str, Any], new: dict[str, Any], path: Path) -> None:
    """Refused, with what differs, if the comparison that was begun is another one than the one asked for."""
    differences = []
    before, now = old.get("settings", {}), new["settings"]
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            differences.append(f"--{name} was {_text(before.get(name))}, is {_text(now.get(name))}")
    if old.get("commit") != new["commit"]:
        differences.append(f"the commit was {str(old.get('commit'))[:12]}, is {new['commit'][:12]}")
    elif old.get("programs") != new["programs"]:
        differences.append("the programs are not those that it was begun with")
    if differences:
        raise Refused(
            f"{path} has a comparison that differs: {'; '.join(differences)}. To start anew: another --output, or "
            f"rm -r {path}"
        )


def _text(value: object) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value)) or "empty"
    if isinstance(value, dict):
        return ",".join(f"{name}={number:g}" for name, number in value.items())
    return str(value)
