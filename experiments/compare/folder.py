"""The folder of a comparison: who writes to it, and what it was begun with."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from experiments.compare.run import RESULTS, lack_of_metrics
from experiments.compare.settings import UsageError
from experiments.shared.machine import read_json, write_json
from experiments.shared.processes import in_parallel

_LOCK = ".lock"
_PLAN = "plan.json"
_TUNING = "tuning.json"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_LEAST_FREE_BYTES = 1 << 20  # A run that fails with less has failed for want of it.
# What plan.json must have: for a report, and for a comparison that goes on.
REPORTED: Mapping[str, type] = {"settings": dict, "runs": list}
GOES_ON: Mapping[str, type] = {**REPORTED, "commit": str, "programs": dict, "machine": dict, "no_pytorch": str}


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
            if error.errno in _FULL:
                raise
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

    def __enter__(self) -> OutputFolder:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._lock.close()  # The file stays: another process may have it open, and lock it next.

    def read_plan(self) -> dict[str, Any] | None:
        """None if there is none yet."""
        plan = read_plan(self.path, needed=GOES_ON)
        if plan is not None:
            _check_measured(plan, self.path)
        return plan

    def write_plan(self, plan: dict[str, Any]) -> None:
        write_json(self.path / _PLAN, plan)

    def read_tuning(self) -> dict[str, Any]:
        """What --tune has found so far, by item."""
        return read_json(self.path / _TUNING)

    def write_tuning(self, found: dict[str, Any]) -> None:
        write_json(self.path / _TUNING, found)

    def run_folder(self, run_id: str) -> Path:
        return self.path / "runs" / run_id

    def ended_runs(self) -> dict[str, bool]:
        """Whether each run that has ended is kept: one that failed, timed out or lost metrics is to be made again."""
        ids = sorted(path.parent.name for path in self.path.glob("runs/*/run.json"))
        return dict(zip(ids, in_parallel(self._is_kept, ids), strict=True))

    def _is_kept(self, run_id: str) -> bool:
        result = self.read_run(run_id)
        if result.get("status") != "done":
            return result.get("status") in RESULTS
        return not lack_of_metrics(self.run_folder(run_id), result["workers"])

    def read_run(self, run_id: str) -> dict[str, Any]:
        """The run.json of a run that has ended; empty if it is damaged."""
        return read_json(self.run_folder(run_id) / "run.json")

    def remove_run(self, run_id: str) -> None:
        shutil.rmtree(self.run_folder(run_id), ignore_errors=True)

    def check_space(self) -> None:
        """OSError if there is next to none."""
        if shutil.disk_usage(self.path).free < _LEAST_FREE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))


@contextlib.contextmanager
def space_on(path: Path) -> Iterator[None]:
    """Refused, with what to do, where there is none left."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise Refused(
            f"{path}: no space is left there: free some and give the same command again; runs that have ended are kept"
        ) from None


def read_plan(folder: Path, needed: Mapping[str, type]) -> dict[str, Any] | None:
    """plan.json of a comparison; None if there is none. Refused if it lacks what is needed."""
    path = folder / _PLAN
    if not path.is_file():
        return None
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(folder, f"cannot be read ({error})") from None
    if not isinstance(plan, dict):
        raise _damaged(folder, "is no JSON object")
    for name, kind in needed.items():
        if not isinstance(plan.get(name), kind):
            raise _damaged(folder, f"has no '{name}', or a wrong one")
    return plan


def _check_measured(plan: dict[str, Any], folder: Path) -> None:
    """Refused if what was measured before the first run is not in it."""
    probe = plan.get("probe", {})
    measured = {"step_time_s": plan.get("step_time_s")}
    if probe is not None:
        inner = probe if isinstance(probe, dict) else {}
        measured |= {f"probe.{name}": inner.get(name) for name in ("samples", "compute_s")}
    for name, value in measured.items():
        if not isinstance(value, int | float):
            raise _damaged(folder, f"has no number for '{name}'")


def _damaged(folder: Path, what: str) -> Refused:
    return Refused(f"{folder / _PLAN} {what}; it is damaged. To start anew: another --output, or rm -r {folder}")


def check_same(old: dict[str, Any], new: dict[str, Any], path: Path) -> None:
    """Refused, with what differs, if the comparison that was begun is another one than the one asked for."""
    before, now = old["settings"], new["settings"]
    missing = [name for name in now if name not in before]
    if missing and old["commit"] == new["commit"]:
        raise _damaged(path, f"has no '{missing[0]}' among its settings")
    differences = [
        f"--{name} was {_text(before.get(name))}, is {_text(now.get(name))}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]
    if old["commit"] != new["commit"]:
        differences.append(f"the commit was {old['commit'][:12]}, is {new['commit'][:12]}")
    elif old["programs"] != new["programs"]:
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
