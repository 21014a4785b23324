"""One run: its servers and workers, from start to end."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import commands
from cpu_clock import CpuClock, applied_unix_s
from outcome import lack_of_metrics, last_line, status_of_ended
from plan import RunSpec
from process import Child, Stop, end_all, running, wait_until
from settings import Settings

START_LIMIT_S = 30.0  # For a server to listen.
END_LIMIT_S = 60.0  # For the servers to end after the workers.
GRACE_S = 10.0  # For a process to end after SIGTERM, before SIGKILL.
# One that failed because of another may end first; so may the others, with the servers' reason in their logs.
BLAME_S = 1.0
_LISTENING = "listening on "
# What is the script's own.
_OF_A_SCRIPT = {"learning_rate": None, "momentum": None, "batch_size": 0, "epochs": 0}


class RunFailed(Exception):
    """The run is over, with this status and reason; or with one that `blamed` and the logs tell."""

    def __init__(self, status: str, reason: str = "", blamed: Child | None = None) -> None:
        super().__init__(reason)
        self.status = status
        self.blamed = blamed


class Interrupted(Exception):
    """The run was stopped by a signal, and is as if it had not been."""


def model_sizes(model: str) -> list[int]:
    """Of "mlp:784,128,10"; empty where it is written otherwise."""
    name, _, sizes = model.partition(":")
    with contextlib.suppress(ValueError):
        return [int(size) for size in sizes.split(",")] if name == "mlp" else []
    return []


def parameters_of(settings: Settings) -> int | None:
    """How many numbers the model has; None if that is not known."""
    sizes = [] if settings.command else model_sizes(settings.model)
    return sum(a * b + b for a, b in itertools.pairwise(sizes)) if len(sizes) > 1 else None


def classes_of(settings: Settings) -> int | None:
    """None if that is not known; 1 of a regression, which has no accuracy."""
    sizes = [] if settings.command else model_sizes(settings.model)
    return sizes[-1] if sizes else None


class Job:
    """Runs one run in its folder, which is emptied before."""

    def __init__(self, spec: RunSpec, settings: Settings, folder: Path, stop: Stop) -> None:
        self._spec = spec
        self._settings = settings
        self._folder = folder
        self._stop = stop
        self._servers: list[Child] = []
        self._workers: list[Child] = []
        self.clock = CpuClock()

    def run(self, limit_s: float) -> dict[str, Any]:
        """What is in run.json then. Interrupted, without one, if it was to stop."""
        if self._folder.exists():
            shutil.rmtree(self._folder)
        self._folder.mkdir(parents=True)
        began_unix, began = time.time(), time.monotonic()
        grace_s = 3 * GRACE_S if self._settings.command else GRACE_S
        failure, killed = None, []
        try:
            self._start()
            self._train(limit_s)
        except RunFailed as failed:
            failure = failed
        finally:
            took_s = time.monotonic() - began
            killed = end_all(self._children, grace_s, lambda: self._stop.hurry)
        if self._settings.command:
            commands.name_script_metrics(self._folder)
        status, reason = self._outcome(failure)
        if status == "timed out" and killed:
            reason += f"; killed {grace_s:g} s after SIGTERM: {_names(killed)}"
        result = {
            **self._spec.as_json(),
            **(_OF_A_SCRIPT if self._settings.command else {}),
            "status": status,
            "reason": reason,
            "began_unix": began_unix,
            **self._times(took_s),
            "cores": len(os.sched_getaffinity(0)),
            "parameters": parameters_of(self._settings),
            "flags": {
                "server": commands.server_flags(self._spec, self._settings),
                "worker": commands.worker_flags(self._spec, self._settings),
            },
        }
        write_json(self._folder / "run.json", result)
        return result

    def _outcome(self, failure: RunFailed | None) -> tuple[str, str]:
        """Status and reason."""
        if failure is not None and failure.blamed is None:
            return failure.status, str(failure)
        blamed = None if failure is None else failure.blamed
        status, reason = status_of_ended(self._children, blamed, self._folder, classes_of(self._settings))
        if status == "done" and (lack := lack_of_metrics(self._folder, self._spec.workers)):
            return "failed", lack
        return status, reason

    @property
    def _children(self) -> list[Child]:
        # Servers first: they know first why a job fails.
        return [*self._servers, *self._workers]

    # ---- Starting

    def _start(self) -> None:
        spec, settings, folder = self._spec, self._settings, self._folder
        try:
            if settings.command:
                command = commands.script_command(spec, settings, folder)
                environment = commands.script_environment(spec, settings, folder)
                self._workers.append(Child("psrun", command, folder, environment))
                return
            if spec.pytorch:
                self._workers.append(Child("pytorch", commands.pytorch_command(spec, settings, folder), folder))
                return
            chief: str | None = None
            for shard in range(settings.servers):
                command = commands.server_command(spec, settings, folder, shard, chief)
                self._servers.append(Child(f"server{shard}", command, folder))
                if shard == 0:
                    chief = self._address(self._servers[0])
            for rank in range(spec.workers):
                command = commands.worker_command(spec, settings, folder, rank, chief or "")
                self._workers.append(Child(f"worker{rank}", command, folder))
        except OSError as error:
            raise RunFailed("failed", f"{error.filename}: {error.strerror}") from None

    def _address(self, server: Child) -> str:
        """What its first line on stdout says."""

        def said() -> str:
            with server.out.open(errors="replace") as out:
                line = out.readline()
            return line.strip() if line.endswith("\n") else ""

        if not wait_until(lambda: bool(said()) or not server.running, START_LIMIT_S, lambda: self._stop.requested):
            self._check_stop()
            raise RunFailed(
                "timed out", f"{server.name} was not listening within {START_LIMIT_S:g} s: {last_line(server)}"
            )
        line = said()
        if not line:
            raise RunFailed("failed", blamed=server)
        if not line.startswith(_LISTENING):
            raise RunFailed("failed", f"{server.name} said '{line}', expected 'listening on HOST:PORT'")
        return line.removeprefix(_LISTENING)

    # ---- Training

    def _train(self, limit_s: float) -> None:
        """Until all have ended well. RunFailed; Interrupted."""

        def over() -> bool:
            self.clock.look(self._children)
            running(self._servers)  # They may have failed.
            return not running(self._workers) or self._blamed() is not None

        in_time = wait_until(over, limit_s, lambda: self._stop.requested)
        self._check_stop()
        if self._blamed() is not None:
            wait_until(self._all_ended, BLAME_S, lambda: self._stop.requested)
            raise RunFailed("failed", blamed=self._blamed())
        if not in_time:
            raise RunFailed("timed out", f"ran longer than {limit_s:g} s; {self._last_words()}")
        if not wait_until(self._all_ended, END_LIMIT_S, lambda: self._stop.requested):
            self._check_stop()
            raise RunFailed("timed out", f"servers ran {END_LIMIT_S:g} s longer than the workers; {self._last_words()}")
        if self._blamed() is not None:
            raise RunFailed("failed", blamed=self._blamed())

    def _all_ended(self) -> bool:
        return not running(self._children)

    def _check_stop(self) -> None:
        if self._stop.requested:
            raise Interrupted

    def _blamed(self) -> Child | None:
        """Of those that have failed by themselves, the one to blame: who was killed, else a server, else a worker."""
        failed = [child for child in self._children if child.status not in (None, 0)]
        return next((child for child in failed if (child.status or 0) < 0), failed[0] if failed else None)

    def _last_words(self) -> str:
        """Who has not ended, and the last line of the one that holds the others up, as far as can be seen."""
        late = [child for child in self._children if child.running]
        if not late:
            return "all have ended since"
        stuck = next((child for child in late if child.stopped), None) or min(late, key=self._last_sign_unix_s)
        state = f"{stuck.name} is stopped" if stuck.stopped else f"{stuck.name} was silent longest"
        return f"not ended: {_names(late)}; {state}, its last line: {last_line(stuck) or 'none'}"

    def _last_sign_unix_s(self, child: Child) -> float:
        """When it last wrote to one of its files."""
        files = (child.log, child.out, self._folder / f"{child.name}.jsonl")
        return max(file.stat().st_mtime for file in files if file.exists())

    def _times(self, total_wall_s: float) -> dict[str, float]:
        """wall_s and cpu_s are the training's, from the first version to the last; of the whole run if it has none."""
        total_cpu_s = sum(child.cpu_s for child in self._children)
        applied = applied_unix_s(self._folder)
        wall_s, cpu_s = total_wall_s, total_cpu_s
        if len(applied) > 1:
            wall_s, cpu_s = applied[-1] - applied[0], self.clock.between_s(applied[0], applied[-1])
        return {
            "wall_s": round(wall_s, 3),
            "cpu_s": round(cpu_s, 3),
            "total_wall_s": round(total_wall_s, 3),
            "total_cpu_s": round(total_cpu_s, 3),
        }


def _names(children: Sequence[Child]) -> str:
    return ", ".join(child.name for child in children)


def write_json(path: Path, value: object) -> None:
    """All of it or nothing."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
