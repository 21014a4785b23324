"""What ends a worker whose script does not: the interpreter's exit, an exception that nobody caught, a fork."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
import weakref
from types import TracebackType
from typing import Protocol


class Worker(Protocol):
    """What is to be ended."""

    def finish(self) -> None: ...
    def leave(self, reason: str) -> None: ...
    def forked(self) -> None: ...


_live: weakref.WeakSet[Worker] = weakref.WeakSet()
_lock = threading.Lock()
_installed = False


def watch(worker: Worker) -> None:
    """Ends the worker with the process: finish() at its exit, leave(reason) at an exception, forked() in a child."""
    global _installed
    with _lock:
        _live.add(worker)
        if _installed:
            return
        _installed = True
    atexit.register(_at_exit)
    os.register_at_fork(after_in_child=_in_child)
    before = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        before(kind, value, trace)
        for one in list(_live):
            one.leave(reason_of(kind, value))

    sys.excepthook = hook


def unwatch(worker: Worker) -> None:
    with _lock:
        _live.discard(worker)


def live() -> list[Worker]:
    return list(_live)


def reason_of(kind: type[BaseException], value: BaseException | None) -> str:
    """'ValueError: the first line of its text'."""
    text = str(value).strip().split("\n")[0] if value is not None else ""
    return f"{kind.__name__}: {text}" if text else kind.__name__


def _at_exit() -> None:
    """The interpreter would end with status 0 whatever is raised here: a worker that cannot finish ends it itself."""
    for worker in list(_live):
        try:
            worker.finish()
        except BaseException:
            traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


def _in_child() -> None:
    for worker in list(_live):
        worker.forked()
    _live.clear()
