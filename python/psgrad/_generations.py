"""How a worker goes on with a job that went back to a checkpoint: it joins the next generation under its name and rank.

What has a generation of its own is the core's client. Memory is the worker's, and outlasts it.
"""

from __future__ import annotations

import threading

from psgrad import _core
from psgrad._waiting import LOG, call


class Generations:
    """The core's client of the generation that runs. Threads may share it."""

    def __init__(self, core: _core.Client) -> None:
        self.core = core
        self.initial: _core.Tensors | None = None  # Kept: a job without a checkpoint yet begins anew with them.
        self.next_step = 0  # That the last push named.
        self.rollbacks = 0
        self.rolled_back_to: int | None = None
        self._joining: _core.Client | None = None
        self._stopped = False
        self._lock = threading.Lock()

    def stop(self) -> None:
        """Ends all waits, and joins nothing any more."""
        self._stopped = True
        for core in (self.core, self._joining):
            if core is not None:
                core.stop()

    def pushed(self, core: _core.Client, result: _core.Result) -> None:
        """A push has ended in the generation of this client."""
        if core is self.core:
            self.next_step = max(self.next_step, result.next_step)
            if result.answers:
                self.rolled_back_to = None

    def check_step(self, step: int) -> None:
        """ValueError for the first push after a rollback, if it is of a step that others do not make now."""
        if self.rolled_back_to is not None and self.core.exact_versions and step != self.rolled_back_to:
            raise ValueError(
                f"rank {self.core.rank}: a push of step {step}, but the job was rolled back to step "
                f"{self.rolled_back_to}, and goes on there (Result.next_step, Client.rolled_back_to)"
            )

    def go_back(self, over: _core.Client, weights: _core.Tensors | None) -> _core.Result:
        """After RolledBack of this client: joins again, waits for the start, and brings the newest weights, if wanted.

        ``next_step`` of the result is the step to go on at. Raises what a join raises: Refused, and Unavailable if the
        servers have not come back within their --server_timeout.
        """
        while True:
            core = self._join_after(over)
            try:
                result: _core.Result = call(core.start(self.initial, weights), core)
            except _core.RolledBack:
                over = core
                continue
            except Exception:
                raise
            except BaseException:  # Ctrl-C.
                self._stopped = True
                raise
            self.next_step = self.rolled_back_to = result.next_step
            LOG.warning(
                "generation %d: rolled back to step %d (version %d); going on",
                core.generation,
                result.next_step,
                result.version,
            )
            return result

    def _join_after(self, over: _core.Client) -> _core.Client:
        with self._lock:
            if self._stopped:
                raise _core.Cancelled(f"rank {over.rank}: this client was stopped; join again")
            if self.core is not over:  # Another thread was first.
                return self.core
            LOG.warning("the job was rolled back: joining it again as %s, rank %d", over.name, over.rank)
            core = self._joining = over.again()
            if self._stopped:  # In the meantime.
                core.stop()
            try:
                call(core.join(), core)
                self.core = core
            except Exception:
                raise
            except BaseException:  # Ctrl-C.
                self._stopped = True
                raise
            finally:
                self._joining = None
            self.rollbacks += 1
            return core
