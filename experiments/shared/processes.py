"""Child processes with a process group of their own, which end with this one; their processor time; work in forks."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import shutil
import signal
import subprocess
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, TypeVar

POLL_S = 0.02
_KILL_S = 5.0  # For a process to end after SIGKILL.
_LOOK_EVERY_S = 0.1
_FORKS_MAX = 8
_PR_SET_PDEATHSIG = 1  # <sys/prctl.h> has it.
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

T = TypeVar("T")
R = TypeVar("R")


class Stop:
    """Whether a signal has asked to stop. A second one asks to hurry."""

    def __init__(self) -> None:
        self.signals: list[int] = []

    def watch(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # What is ignored stays so: SIGINT in a shell's background job, SIGHUP under nohup.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, _: self.signals.append(number))

    @property
    def requested(self) -> bool:
        return bool(self.signals)

    @property
    def hurry(self) -> bool:
        return len(self.signals) > 1


class Child:
    """A running program; its stderr goes to FOLDER/NAME.log, its stdout to FOLDER/NAME.out. OSError if it cannot be
    started.
    """

    def __init__(
        self, name: str, command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self.out = folder / f"{name}.out"
        self.status: int | None = None  # As subprocess has it: below 0 for a signal. None: it runs.
        # Once it has ended, with the children that it has waited for:
        self.cpu_s = 0.0  # User and system.
        self.handovers = 0  # How often a thread left its processor to another, by sched_yield or since its time was up.
        # The kernel ends it if this process dies without a chance to.
        tied = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
        with self.log.open("wb") as log, self.out.open("wb") as out:
            self._popen = subprocess.Popen(
                [*tied, *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                start_new_session=True,
                env=None if environment is None else {**os.environ, **environment},
            )

    @property
    def running(self) -> bool:
        """Looks whether it has ended. Never waits."""
        if self.status is None and os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            self.signal(signal.SIGKILL)  # To what it has left behind, while its number is still its own.
            _, status, usage = os.wait4(self._popen.pid, 0)
            self.status = self._popen.returncode = os.waitstatus_to_exitcode(status)
            self.cpu_s, self.handovers = usage.ru_utime + usage.ru_stime, usage.ru_nivcsw
        return self.status is None

    @property
    def stopped(self) -> bool:
        """Whether it is held by SIGSTOP or a debugger."""
        with contextlib.suppress(OSError, IndexError):
            return _stat(self._popen.pid)[0] in "Tt"
        return False

    def cpu_now_s(self) -> float:
        """Processor time so far, with that of all that it has started."""
        return _tree_cpu_s(self._popen.pid) if self.running else self.cpu_s

    def signal(self, number: int) -> None:
        """Sends it to the whole group."""
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._popen.pid, number)

    def ending(self) -> str:
        """How it ended, for people."""
        if self.status is None:
            return "runs"
        if self.status >= 0:
            return f"ended with status {self.status}"
        with contextlib.suppress(ValueError):  # A real-time signal has no name.
            return f"was killed by {signal.Signals(-self.status).name}"
        return f"was killed by signal {-self.status}"


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name, which is in parentheses and may have spaces."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _tree_cpu_s(pid: int) -> float:
    """The processor time of a process and its descendants; 0 for those that have ended in the meantime."""
    cpu_s = 0.0
    with contextlib.suppress(OSError, ValueError, IndexError):
        cpu_s = sum(map(int, _stat(pid)[11:15])) / _TICKS_PER_S  # utime, stime, cutime and cstime.
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        cpu_s += sum(_tree_cpu_s(int(child)) for child in children)
    return cpu_s


def running(children: Sequence[Child]) -> bool:
    """Whether any of them runs. Looks at all."""
    return sum(child.running for child in children) > 0


def wait_until(condition: Callable[[], Any], limit_s: float, given_up: Callable[[], bool] = lambda: False) -> bool:
    """Whether the condition was met in time, and before it was given up."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if given_up() or time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True


def end_all(children: Sequence[Child], grace_s: float, hurry: Callable[[], bool] = lambda: False) -> list[Child]:
    """SIGTERM to all that run, and after `grace_s`, or when it is to hurry, SIGKILL. Returns those that it was for."""
    for child in children:
        child.signal(signal.SIGTERM)
        child.signal(signal.SIGCONT)  # Who is stopped sees no SIGTERM.
    wait_until(lambda: not running(children), grace_s, hurry)
    killed = [child for child in children if child.running]
    for child in killed:
        child.signal(signal.SIGKILL)
    wait_until(lambda: not running(killed), _KILL_S)
    return killed


class CpuClock:
    """The processor time of all processes over the wall clock, looked at ten times a second."""

    def __init__(self) -> None:
        self._unix_s: list[float] = []
        self._cpu_s: list[float] = []

    def look(self, children: Sequence[Child]) -> None:
        """To be called often."""
        now = time.time()
        if not self._unix_s or now - self._unix_s[-1] >= _LOOK_EVERY_S:
            self._unix_s.append(now)
            self._cpu_s.append(sum(child.cpu_now_s() for child in children))

    def between_s(self, begin_unix_s: float, end_unix_s: float) -> float:
        """Processor time between two moments."""
        return self._at(end_unix_s) - self._at(begin_unix_s)

    def _at(self, unix_s: float) -> float:
        after = bisect_left(self._unix_s, unix_s)
        if after == 0 or after == len(self._unix_s):
            return self._cpu_s[min(after, len(self._cpu_s) - 1)] if self._cpu_s else 0.0
        begin, end = self._unix_s[after - 1], self._unix_s[after]
        share = (unix_s - begin) / (end - begin) if end > begin else 0.0
        return self._cpu_s[after - 1] + share * (self._cpu_s[after] - self._cpu_s[after - 1])


# ---- Forks of this process. What they work on is theirs from the fork on; only results are sent.

_shared: list[Any] = []


def in_parallel(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """The results in order. Raises the first exception of `work`; OSError if a process dies."""
    count = min(len(os.sched_getaffinity(0)), _FORKS_MAX, len(items))
    if count < 2:
        return [work(item) for item in items]
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("fork"), _begin, (work, items))
    try:
        return list(pool.map(_work_on, range(len(items))))
    except BrokenProcessPool:
        raise OSError("a process of the report was killed") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(work: Callable[[T], R], items: Sequence[T]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is the parent's to tell of.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # The kernel ends it if the parent is killed.
    _shared[:] = [work, items]


def _work_on(place: int) -> Any:
    work, items = _shared
    return work(items[place])
