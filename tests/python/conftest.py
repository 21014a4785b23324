"""Servers for tests: real ones, on free ports, which end with the test."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from restarts import Restartable

Servers = Callable[..., str]
EXIT_TIMEOUT_S = 30.0


def await_exit_of(pids: Sequence[int]) -> None:
    """They end within a deadline."""
    for pid in pids:
        try:
            ended = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        assert select.select([ended], [], [], EXIT_TIMEOUT_S)[0], f"process {pid} still runs"
        os.close(ended)


class ServerProcesses:
    """Starts the servers of a job; ``start`` returns the chief's address."""

    def __init__(self) -> None:
        """None yet."""
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, num_workers: int, *flags: str, shards: int = 1, mode: str = "bsp") -> str:
        """Servers that wait for so many workers; the optimizer is theirs unless a flag says otherwise."""
        from psgrad._supervisor import find_program

        chief = ""
        for shard in range(shards):
            arguments = [f"--num_workers={num_workers}", f"--mode={mode}", f"--num_shards={shards}", f"--shard={shard}"]
            if not any(flag.startswith("--optimizer") for flag in flags):
                arguments.append("--optimizer=from_worker")
            if chief:
                arguments.append(f"--chief={chief}")
            process = subprocess.Popen(
                [find_program("ps_server"), *arguments, *flags], stdout=subprocess.PIPE, text=True
            )
            self.processes.append(process)
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("listening on "), line
            chief = chief or line.split()[-1]
        return chief

    def wait(self) -> list[int]:
        """Their exit statuses, once all have ended by themselves."""
        return [process.wait(30) for process in self.processes]

    def end(self) -> None:
        """Ends those that run."""
        for process in self.processes:
            process.send_signal(signal.SIGKILL)
            process.wait(30)
            if process.stdout is not None:
                process.stdout.close()


@pytest.fixture
def servers() -> Iterator[ServerProcesses]:
    """The servers of a test."""
    started = ServerProcesses()
    yield started
    started.end()


@pytest.fixture
def restartable(tmp_path: Path) -> Iterator[Restartable]:
    """Servers of a test that kills them and starts them again."""
    started = Restartable(tmp_path)
    yield started
    started.end()
