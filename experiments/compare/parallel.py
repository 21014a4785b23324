"""Work that is shared by forks of this process."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import TypeVar

_PROCESSES_MAX = 8

T = TypeVar("T")
R = TypeVar("R")


def in_parallel(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """The results in order. Only they go from one process to another. Raises the first exception of `work`."""
    count = min(len(os.sched_getaffinity(0)), _PROCESSES_MAX, len(items))
    if count < 2:
        return [work(item) for item in items]
    context = multiprocessing.get_context("fork")
    shares = []
    for first in range(count):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_do, args=(work, items[first::count], sender), daemon=True)
        process.start()
        sender.close()  # So that the end of the process is the end of what comes.
        shares.append((process, receiver))
    results: dict[int, R] = {}
    for first, (process, receiver) in enumerate(shares):
        try:
            done = receiver.recv()
        except EOFError:
            process.join()
            raise OSError(f"a process of the report ended with status {process.exitcode}") from None
        process.join()
        if isinstance(done, Exception):
            raise done
        results |= {first + count * place: result for place, result in enumerate(done)}
    return [results[place] for place in range(len(items))]


def _do(work: Callable[[T], R], items: Sequence[T], sender: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is the parent's to tell of.
    try:
        sender.send([work(item) for item in items])
    except Exception as error:  # It is raised again where the result is wanted.
        sender.send(error)
