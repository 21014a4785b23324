"""Where batches come from, as in worker/train/batch_source.h: a fixed share of every epoch, or what the chief hands out."""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Callable
from typing import Protocol

from psgrad.sampling import Plan, Sampler

# Others wait for the contribution of a worker that has no run; but most often the last run is about to be finished.
_FILLING_WAIT_S = 0.02


class Source(Protocol):
    def take(self, finished: int) -> Plan | None:
        """The next share, or None when the budget is spent. The first `finished` that were taken are used: the pushes
        that they went into are answered.
        """

    def skip_to(self, batch: int) -> int:
        """The job has gone on to this batch without this worker, if it is ahead. Returns how many samples are jumped
        over.
        """

    def go_back_to(self, batch: int) -> None:
        """The job was rolled back: this batch comes next."""


class FixedShare:
    """The same share of every epoch for a rank."""

    def __init__(self, sampler: Sampler, first: int, total: int) -> None:
        self._sampler = sampler
        self._total = total
        self._next = first

    def take(self, finished: int) -> Plan | None:
        if self._next >= self._total:
            return None
        self._next += 1
        return self._sampler.plan(self._next - 1)

    def skip_to(self, batch: int) -> int:
        jumped_over = range(self._next, min(batch, self._total))
        self._next = max(self._next, batch)
        return sum(self._sampler.samples_of(each) for each in jumped_over)

    def go_back_to(self, batch: int) -> None:
        self._next = batch


class HandedOutRuns:
    """--budget=job: the chief hands out runs of samples, until the whole job's are used. As in
    worker/train/handed_out_runs.cc.

    take_run: Client.take_run. settle: completes the exchange that shares which are not finished wait for.
    fills_steps: others need a contribution of this worker to every step, if only an empty one: while it has to wait for
    a run it gets shares without samples. rolled_back: whether the job was rolled back, and go_back_to is yet to come.
    """

    def __init__(
        self,
        sampler: Sampler,
        total: int,
        *,
        take_run: Callable[..., int | None],
        fills_steps: bool,
        settle: Callable[[], object],
        rolled_back: Callable[[], bool],
    ) -> None:
        self._rolled_back = rolled_back
        self._sampler = sampler  # Of a single worker: its steps are the runs.
        self._total = total
        self._take_run = take_run
        self._fills_steps = fills_steps
        self._settle = settle
        self._taken = 0
        self._finished = 0
        self._last = 0
        self._open: deque[bool] = deque()  # For each share that is not finished: whether it is a run.
        self._finished_shares = 0

    def take(self, finished: int) -> Plan | None:
        self._finish(finished)
        wait_s = _FILLING_WAIT_S if self._fills_steps else None
        try:
            if self._open:
                # Others may wait for what this worker has not pushed yet, so it must not wait for them.
                try:
                    return self._next(wait_s=0.0)
                except exception("WaitAgain"):
                    self._settle()
                    if self._rolled_back():
                        return None
                    self._finish(self._finished_shares + len(self._open))
            return self._next(wait_s)
        except exception("WaitAgain"):
            if self._fills_steps:
                self._open.append(False)
                place = self._sampler.plan(self._last)
                return Plan(place.epoch, place.epoch_step, [])
            unfinished = self._taken - self._finished
            raise RuntimeError(
                f"waiting for a run of samples while {unfinished} of this worker's are not finished"
            ) from None

    def skip_to(self, batch: int) -> int:
        return 0  # Steps have no batches of their own.

    def go_back_to(self, batch: int) -> None:
        """The chief knows which runs the checkpoint has, and hands out all others, to whoever asks."""
        self._taken = self._finished = self._finished_shares = 0
        self._open.clear()

    def _next(self, wait_s: float | None) -> Plan | None:
        terms = (self._sampler.samples, self._sampler.batch_size, self._total)
        run = self._take_run(self._taken + 1, self._finished, *terms, wait=wait_s)
        if run is None:
            return None
        if not 0 <= run < self._total:
            raise RuntimeError(f"the chief handed out run {run} of {self._total}")
        self._taken += 1
        self._last = run
        self._open.append(True)
        return self._sampler.plan(run)

    def _finish(self, shares: int) -> None:
        while self._finished_shares < shares and self._open:
            self._finished += self._open.popleft()
            self._finished_shares += 1


def exception(name: str) -> type[BaseException]:
    """Of psgrad, which need not be importable for the rest of this module."""
    kind: type[BaseException] = getattr(importlib.import_module("psgrad"), name)
    return kind
