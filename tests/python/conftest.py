"""Servers for tests, which end with the test."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from server_processes import Restartable, ServerProcesses

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
