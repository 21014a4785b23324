"""The metrics file: one JSON object a line, with the names that ps_worker's have."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import platform
import socket
import stat
import time
from collections.abc import Mapping
from typing import Any, TextIO

import torch

import psgrad

_FLUSH_EVERY_S = 1.0

log = logging.getLogger("psgrad")


class Records:
    """Writes `start`, `step`, `eval` and `end`. Times are in seconds; `t` counts from when this was made.

    In a step's line `forward_s` is the time from the end of the last step() to the first gradient, loading the batch
    included; `backward_s` from there to step(); `push_s`, `wait_s` and `pull_s` the part of the exchange that step()
    waited for.
    """

    def __init__(self, path: str | None, client: psgrad.Client, settings: dict[str, Any], *, append: bool) -> None:
        """`{rank}` in the path is replaced. RuntimeError if a running process has the file."""
        self._began = time.monotonic()
        self._file: TextIO | None = None
        self._rank = client.rank
        self._flushed = 0.0
        self._extra: dict[str, float | None] = {}
        self.steps = 0
        self.samples = 0
        self._busy_s = 0.0
        if path is None:
            return
        path = path.replace("{rank}", str(client.rank))
        try:
            file = open(path, "a", encoding="utf-8")  # noqa: SIM115  (it stays open)
        except OSError as error:
            raise type(error)(error.errno, f"metrics_file: {error.strerror}", path) from None
        self._path = path
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise RuntimeError(
                f"metrics_file: {path} belongs to a running process; a file by worker: "
                f"metrics_file='worker{{rank}}.jsonl'"
            ) from None
        if not append and stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.truncate(0)
        self._file = file
        self._write(
            "start",
            {
                "unix_time": time.time(),
                "flags": settings,
                "mode": client.mode,
                "generation": client.generation,
                "incarnation": client.incarnation,
                "workers": client.num_workers,
                "shards": client.num_shards,
                "step": client.start_step,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "python": platform.python_version(),
                "torch": torch.__version__,
                "threads": torch.get_num_threads(),
            },
        )

    def add(self, values: Mapping[str, Any]) -> None:
        """To the next step's line: its loss, say."""
        if self._file is not None:
            self._extra.update(_numbers(values))

    def step(
        self, step: int, version: int, samples: int, result: psgrad.Result | None, times: tuple[float, float, float]
    ) -> None:
        """`times`: of the forward pass, the backward pass and step(), in seconds."""
        self.steps += 1
        self.samples += samples
        self._busy_s += sum(times)
        if self._file is None:
            return
        forward_s, backward_s, step_s = times
        fixed = {"step": step, "version": version, "samples": samples}
        line: dict[str, Any] = {**fixed, **self._extra, **fixed}
        self._extra.clear()
        line.update(forward_s=forward_s, backward_s=backward_s)
        if result is None:
            line.update(backward_s=backward_s + step_s, push_s=0.0, wait_s=0.0, pull_s=0.0)
        else:
            line.update(push_s=result.push_s, wait_s=result.wait_s, pull_s=result.pull_s)
            if any(answer != "applied" for answer in result.answers):
                line["answer"] = list(result.answers)
            if result.skipped:
                line["skipped"] = result.skipped
        self._write("step", line)

    def went_back(self, generation: int, step: int, version: int) -> None:
        """A `rollback` line: the servers went back to this step."""
        self._extra.clear()
        self._write("rollback", {"generation": generation, "step": step, "version": version})

    def evaluated(self, step: int, version: int, split: str, values: Mapping[str, Any]) -> None:
        """An `eval` line of the weights of this version."""
        fixed = {"step": step, "version": version, "split": split}
        self._write("eval", {**fixed, **_numbers(values), **fixed})

    def end(self, dropped: int, skipped: int) -> None:
        if self._file is None:
            return
        rate = self.samples / self._busy_s if self._busy_s > 0 else 0.0
        self._write(
            "end",
            {
                "steps": self.steps,
                "samples": self.samples,
                "samples_per_s": rate,
                "dropped_pushes": dropped,
                "skipped": skipped,
            },
        )
        if self._file is not None:
            self._close(self._file)

    def _close(self, file: TextIO) -> None:
        self._file = None
        with contextlib.suppress(OSError):  # What could not be written is tried once more.
            file.close()

    def _write(self, event: str, values: dict[str, Any]) -> None:
        if self._file is None:
            return
        now = time.monotonic()
        fixed = {"event": event, "t": round(now - self._began, 6), "rank": self._rank}
        line = {**fixed, **values, **fixed}  # First in the line, whatever a user's value is called.
        try:
            self._file.write(json.dumps(line) + "\n")
            if event != "step" or now - self._flushed > _FLUSH_EVERY_S:
                self._file.flush()
                self._flushed = now
        except OSError as error:  # Training is worth more than its records.
            log.warning("metrics_file: %s: %s; nothing is written to it any more", self._path, error.strerror)
            self._close(self._file)


def _numbers(values: Mapping[str, Any]) -> dict[str, float | None]:
    """None in place of what JSON has no number for. TypeError, naming the value, for what is none."""
    numbers: dict[str, float | None] = {}
    for name, value in values.items():
        try:
            number = float(value.detach() if isinstance(value, torch.Tensor) else value)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"{name}={value!r}: a number is expected") from None
        numbers[name] = number if math.isfinite(number) else None
    return numbers
