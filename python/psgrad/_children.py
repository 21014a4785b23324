"""Processes that never outlive the one that started them, and what becomes of them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Runs in a fresh interpreter that then becomes the program: code between fork and exec (preexec_fn) is not safe where
# other threads run, as they do in a notebook. The kernel ends the process when the thread that started it ends; if that
# was before it was told to, the parent is another one by now. An interpreter ignores SIGPIPE, and a shell's background
# job SIGINT; a program would inherit it.
_TIED = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
    signal.signal(number, signal.SIG_DFL)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"{sys.argv[2]}: {error.strerror}")
"""


def tie_to(parent: int) -> None:
    """The same for a process that is an interpreter itself. It ends at once if `parent` is not its parent any more."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


@dataclass(frozen=True)
class Ending:
    """How a process ended: with a status, or by a signal."""

    status: int | None = None
    signal: int | None = None

    @property
    def ok(self) -> bool:
        return self.status == 0

    def __str__(self) -> str:
        if self.signal is None:
            return f"ended with status {self.status}"
        try:
            return f"was killed by signal {self.signal} ({signal.Signals(self.signal).name})"
        except ValueError:  # A real-time signal.
            return f"was killed by signal {self.signal}"


def ending_of(child: int) -> Ending | None:
    """How this child process ended, if it has. It is left unreaped, so that its number, and with it its group's, is not
    given to another one. ChildProcessError if somebody has reaped it.
    """
    ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return Ending(status=ended.si_status) if ended.si_code == os.CLD_EXITED else Ending(signal=ended.si_status)


class Process(ABC):
    """A process of a job. `name` is for people: "worker 2"."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.ending: Ending | None = None  # As of the last look().

    @property
    def running(self) -> bool:
        return self.ending is None

    @property
    def failed(self) -> bool:
        return self.ending is not None and not self.ending.ok

    @property
    def blames_another(self) -> bool:
        """It failed, most likely because another one did, which may take a moment longer to end."""
        return False

    @property
    @abstractmethod
    def fd(self) -> int:
        """Readable once the process has ended."""

    @abstractmethod
    def look(self) -> None:
        """Sets `ending` if the process has ended. Never waits."""

    @abstractmethod
    def signal(self, number: int) -> None:
        """Sends it to the process, if it runs, and to those that it has started in its process group."""

    @abstractmethod
    def release(self) -> None:
        """After its end: ends what is left of its process group, and lets go of it."""


class Child(Process):
    """A program with pipes for stdout and stderr, in a session of its own: a terminal's Ctrl-C does not reach it.

    Start it from a thread that lives longer than it does.
    """

    def __init__(self, name: str, number: int, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        super().__init__(name, number)
        self._popen = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            start_new_session=True,
            bufsize=0,
        )
        self._fd = os.pidfd_open(self._popen.pid)
        assert self._popen.stdout is not None
        assert self._popen.stderr is not None
        self.stdout = self._popen.stdout.fileno()
        self.stderr = self._popen.stderr.fileno()
        for pipe in (self.stdout, self.stderr):
            os.set_blocking(pipe, False)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def fd(self) -> int:
        return self._fd

    def look(self) -> None:
        if self.ending is None:
            self.ending = ending_of(self._popen.pid)

    def signal(self, number: int) -> None:
        if self.running:
            self._signal_group(number)

    def release(self) -> None:
        if self._popen.returncode is not None:
            return
        self._signal_group(signal.SIGKILL)
        self._popen.wait()
        os.close(self._fd)
        for pipe in (self._popen.stdout, self._popen.stderr):
            if pipe is not None:
                pipe.close()

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(PermissionError):  # A program that runs as somebody else.
            os.killpg(self._popen.pid, number)


class Server(Child):
    """A ps_server."""

    address: str | None = None  # Once it listens.

    @property
    def blames_another(self) -> bool:
        # 1 is also how it ends when the job has failed, which most often is a worker's doing.
        return self.ending is not None and self.ending.status == 1 and self.address is not None
