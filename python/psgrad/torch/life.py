"""A worker's life in its job: what it is there, how it leaves, and what ends one whose script does not.

The interpreter's exit, an exception that nobody caught and a fork end a worker as well as finish() and leave() do.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import queue
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

import psgrad
from psgrad.torch.records import Records
from psgrad.torch.steps import Progress, Steps, WentBack
from psgrad.torch.tensors import Memory

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger("psgrad")

# In the order in which they were made. A worker whose script has dropped it, as at the end of main(), is still in its
# job.
_live: dict[Ending, None] = {}
_lock = threading.Lock()
_installed = False
_FINISHED = "finish() was called: this worker has left the job"


class Ending(Protocol):
    """What ends with the process: all of it may be called twice, and in any order."""

    def finish(self) -> None: ...

    def leave(self, reason: str) -> None: ...

    def forked(self) -> None: ...


class Member(ABC):
    """A worker from its join on. How it trains is the subclass's to say, which sets these once the job has started."""

    _progress: Progress
    _memory: Memory
    _steps: Steps
    _records: Records

    def __init__(self, client: psgrad.Client, name: str | None = None) -> None:
        self._client = client
        self._name = name
        self._pid = os.getpid()
        self._thread = threading.get_ident()
        self._is_entered = False  # It is in its `with`,
        self._is_at_its_end = False  # or that has been left, and another model's has not.
        self._ended = ""  # Why it cannot be used any more.
        self._beside = _Beside() if name is not None else None
        watch(self)

    @abstractmethod
    def _go_back(self, at: int) -> None:
        """The client has joined the next generation of the job: all that is the worker's own begins anew there."""

    def start(self) -> None:  # noqa: B027
        """Where the subclass may start later: what is asked for needs that it has."""

    # ---- What it is

    @property
    def client(self) -> psgrad.Client:
        """The connection to the job, for what is not here: the weights' hash, runs of a job's budget."""
        return self._client

    @property
    def rank(self) -> int:
        """This worker's number in the job, from 0."""
        return self._client.rank

    @property
    def num_workers(self) -> int:
        """How many workers the job has when it starts; what a sampler divides the data by."""
        return self._client.num_workers

    @property
    def name(self) -> str | None:
        """Which of the script's models this is, where it has several."""
        return self._name

    @property
    def is_one_of_several(self) -> bool:
        """Whether the script has several models, each in a job of its own."""
        return self._name is not None

    @property
    def mode(self) -> str:
        """What the servers run in: "bsp", "asp", "ssp", "backup", "local_sgd", "diloco" or "easgd"."""
        return self._client.mode

    @property
    def lead(self) -> bool:
        """Whether this worker is the lowest live rank: the one to print, evaluate and save."""
        return self._client.lead

    @property
    def step_number(self) -> int:
        """The step of the next push; steps of a job count from 0."""
        self.start()
        return self._progress.step

    @property
    def version(self) -> int:
        """The updates that have been made to the weights (on the server that has made the fewest)."""
        self.start()
        return self._progress.version

    @property
    def dropped(self) -> int:
        """Pushes of this worker that a server refused as too old (stale)."""
        self.start()
        return self._progress.dropped

    @property
    def rollbacks(self) -> int:
        """How often the servers went back to a checkpoint since this worker joined."""
        return self._client.rollbacks

    @property
    def skipped(self) -> int:
        """Steps of this worker (with local steps: batches) that did not count, as a gradient was not finite."""
        self.start()
        return self._progress.skipped

    @property
    def asked_to_leave(self) -> bool:
        """Whether an operator asks this worker to leave the job (`ps_ctl drain`); psgrad.data.Batches then does.

        A loop of another kind calls `leave("asked to")`, and ends the script, when it suits it.
        """
        return self._client.asked_to_leave

    @contextmanager
    def idle(self, what: str = "evaluating") -> Iterator[None]:
        """Says that this worker makes no step for a while and nothing is wrong: `with opt.idle("evaluating"): …`.

        Servers wait for a worker as long as it lives; with this, those who wait for it are told what it does, and the
        servers' --progress_timeout does not count meanwhile.
        """
        self._check_usable()
        log.info("rank %d: %s; its next step is %d", self.rank, what, self.step_number)
        began = time.monotonic()
        self._client.set_busy(what)
        try:
            yield
        finally:
            log.info("rank %d: %s took %.1f s", self.rank, what, time.monotonic() - began)
            if not self._client.closed:
                self._client.set_busy("")

    # ---- Ending

    def finish(self) -> None:
        """This worker has no more batches: it counts as empty from now on, waits for the others, and leaves the job.

        All workers then have the same, last weights. It is called by `with opt:` and at the interpreter's exit, and
        does nothing the second time.

        Raises:
            psgrad.RolledBack: the servers went back to a step before this one meanwhile. The worker is still in the job
                and has their weights: it is to make the steps again, and call finish() again.
            psgrad.Error: as of psgrad.Client.done.
        """
        if self._ended or os.getpid() != self._pid:
            return
        if not hasattr(self, "_steps"):  # The process ends while another thread waits for the start.
            self.leave("the process ended before the job had started")
            return
        step = self._progress.step + self._steps.pushes_to_settle
        try:
            while not self._try_to_finish(step):
                pass
        except psgrad.RolledBack:
            raise
        except BaseException as error:
            self._say_left(reason_of(type(error), error))
            self._end(_FINISHED)
            raise
        if self._progress.skipped:
            log.warning(
                "rank %d: %d steps of this worker in all were skipped, as gradients were not finite",
                self.rank,
                self._progress.skipped,
            )
        self._end(_FINISHED)

    def _try_to_finish(self, step: int) -> bool:
        """False: the servers have gone back, but to no step before this one. RolledBack: they have."""
        try:
            self._steps.settle()
            self._client.done(counts_as_empty=self._client.synchronous)
            self._progress.pull_last(self._memory.weight_buffers)
            self._memory.publish()
            self._client.leave()
            return True
        except (WentBack, psgrad.RolledBack):
            self._go_back(step)
        if self._progress.step < step:
            raise psgrad.RolledBack(
                f"rank {self.rank}: the job was rolled back to step {self._progress.step}, and this worker was "
                f"finishing at step {step}: its loop has to make these steps again (psgrad.data.Batches goes on there) "
                "and then call finish() again"
            )
        return False

    def leave(self, reason: str) -> None:
        """Leaves the job at once, for this reason, which the servers and the other workers are told. Never raises."""
        if self._ended or os.getpid() != self._pid:
            return
        self._client.stop()
        self._end(f"this worker has left the job: {reason}")
        self._say_left(reason)

    def _say_left(self, reason: str) -> None:
        try:
            self._client.leave(reason)
        except Exception as error:  # The job may be gone by now, and there is another exception to be seen.
            log.debug("leave: %s", error)

    def _end(self, why: str) -> None:
        """Lets go of the model and the metrics file, as far as there are any: the job may not have started."""
        self._close(why)
        unwatch(self)
        if hasattr(self, "_steps"):
            self._steps.let_go()
        if hasattr(self, "_records"):
            self._records.end(self.dropped, self.skipped)

    def _close(self, why: str) -> None:
        self._ended = why
        if hasattr(self, "_steps"):
            self._steps.close(why)

    def forked(self) -> None:
        """In a child of the process: the client, its threads and connections belong to the parent."""
        self._close(
            f"this process was forked from the worker's (pid {self._pid}), which alone can train: keep backward() and "
            "step() out of DataLoader workers and other children"
        )

    def __enter__(self) -> Self:
        self._is_entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_entered = False
        self._is_at_its_end = True
        others = self._others()
        if value is not None and not ends_well(value):
            for one in [self, *(each for each in others if each._is_at_its_end)]:
                one.leave(reason_of(type(value), value))
        elif not any(each._is_entered for each in others):  # Else those of all models finish with the outermost.
            _finish_together([self, *(each for each in others if each._is_at_its_end)])

    def _others(self) -> list[Member]:
        """This worker in the jobs of the script's other models."""
        return [] if self._name is None else [one for one in _workers_of(self._thread) if one is not self]

    def _check_usable(self) -> None:
        if self._ended:
            raise RuntimeError(self._ended)


def watch(worker: Ending) -> None:
    """Ends the worker with the process: finish() at its exit, leave(reason) at an exception, forked() in a child."""
    global _installed
    with _lock:
        _live[worker] = None
        if _installed:
            return
        _installed = True
    atexit.register(_at_exit)
    os.register_at_fork(after_in_child=_in_child)
    before = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        before(kind, value, trace)
        leave_all(value)

    sys.excepthook = hook


def unwatch(worker: Ending) -> None:
    """It has ended."""
    with _lock:
        _live.pop(worker, None)


def live() -> list[Ending]:
    return list(_live)


def _workers_of(thread: int) -> list[Member]:
    """The worker that this thread is, in the job of each model that has a name."""
    with _lock:
        members = [one for one in _live if isinstance(one, Member)]
    return [one for one in members if one._name is not None and one._thread == thread]


def workers_of_this_thread() -> list[Member]:
    return _workers_of(threading.get_ident())


def finish_all() -> None:
    """The script has ended well."""
    while _live:
        first = next(iter(_live))
        _finish_together([first, *(first._others() if isinstance(first, Member) else [])])
        with _lock:
            _live.pop(first, None)  # After a fork it is the parent's.


class _Beside:
    """A thread that does one thing when it is asked to. Python 3.12 begins no thread any more while it exits."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=lambda: self._work.get()(), daemon=True)
        self._thread.start()

    def start(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def join(self) -> None:
        self._thread.join()


def _finish_together(members: Sequence[Ending]) -> None:
    """Finishes a worker in the jobs of all its models at once, and ends all if one cannot.

    One after the other, two workers with different numbers of batches would wait for each other: one for the end of a
    job, and the other one for a step of the other job.
    """
    errors: list[BaseException] = []

    def leave(error: BaseException) -> None:
        errors.append(error)
        for one in members:
            one.leave(reason_of(type(error), error))

    def finish(member: Ending) -> None:
        try:
            member.finish()
        except BaseException as error:  # Also RolledBack: no loop follows that could make the steps again.
            leave(error)

    others = [(member, member._beside) for member in members[1:] if isinstance(member, Member)]
    besides = [(member, beside) for member, beside in others if beside is not None]
    for member, beside in besides:
        beside.start(functools.partial(finish, member))
    finish(members[0])
    for _, beside in besides:
        try:
            beside.join()
        except BaseException as error:  # Ctrl-C.
            leave(error)
            beside.join()
    if errors:
        raise errors[0]


def leave_all(error: BaseException) -> None:
    """The script ends by this error, which is every worker's reason to leave, unless it says that all is well."""
    if not ends_well(error):
        for one in list(_live):
            one.leave(reason_of(type(error), error))


def ends_well(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and (error.code is None or error.code == 0)


def reason_of(kind: type[BaseException], value: BaseException | None) -> str:
    """'ValueError: the first line of its text'."""
    text = str(value).strip().split("\n")[0] if value is not None else ""
    return f"{kind.__name__}: {text}" if text else kind.__name__


def _at_exit() -> None:
    """The interpreter would end with status 0 whatever is raised here: a worker that cannot finish ends it itself."""
    try:
        finish_all()
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _in_child() -> None:
    for worker in list(_live):
        worker.forked()
    _live.clear()
