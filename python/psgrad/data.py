"""The product's own division of a data set among workers: exact epochs in every mode.

For each epoch there is one permutation of the n samples, from (seed, epoch), the same as the C++ worker's. With N
workers and batches of B samples, global batch t of the epoch is the next N·B samples of it, and rank r takes the r-th
run of B of them. The last, smaller batch is used, too. So one worker with batches of N·B sees the same global batches
as N workers with B, and each sample is used once an epoch.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import logging
import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import psgrad
from psgrad.sampling import Plan, Sampler, budget_of, permutation

__all__ = ["Batches", "Drained", "Plan", "Sampler", "budget_of", "permutation"]

_log = logging.getLogger("psgrad")
# Others wait for the contribution of a worker that has no run; but most often the last run is about to be finished.
_FILLING_WAIT_S = 0.02
_AHEAD_MAX = 64  # Runs that the chief lets a worker take before it uses them.


def _first_batch(
    step: int,
    local: Any,
    accumulate: int,
    batches_per_epoch: int,
    total: int,
    origin: tuple[int, int] = (0, 0),
    besides: int = 0,
) -> int:
    """The batch that a worker begins with whose first push is of this step, as FirstBatch in
    worker/train/steps/steps.h.

    origin: a step, and the batch that it begins with. besides: by how many batches the rounds before `step` were longer
    than whole ones, all together.
    """
    step, first = max(step - origin[0], 0), min(origin[1], total)
    if local is None:
        return min(first + step * accumulate, total)
    if local.exchange != "average_gradients":
        return max(0, min(first + step * int(local.steps) + besides, total))
    if step == 0:
        return first
    # What is exchanged after which batch: as in worker/train/steps/steps.cc (Averaging).
    every_steps = getattr(local, "average_every_steps", 0)
    weights_every = every_steps if every_steps > 0 else local.average_every_epochs * batches_per_epoch
    batch, exchanges = first, 0
    while exchanges < step and batch < total:
        batch += 1
        averages_weights = math.floor(batch / weights_every + 1e-9) > math.floor((batch - 1) / weights_every + 1e-9)
        exchanges += averages_weights or (local.steps > 0 and batch % local.steps == 0)
    return batch


class _Job:
    """What the optimizer says, or else its client, or the client alone."""

    def __init__(self, optimizer_or_client: Any) -> None:
        self._sources = [optimizer_or_client, getattr(optimizer_or_client, "client", None)]
        for name in ("rank", "num_workers"):
            if self.get(name, None) is None:
                kind = type(optimizer_or_client).__name__
                raise TypeError(f"{kind} has no {name}; expected a psgrad optimizer or client")

    def get(self, name: str, otherwise: Any) -> Any:
        for source in self._sources:
            if hasattr(source, name):
                return getattr(source, name)
        return otherwise

    @property
    def rollbacks(self) -> int:
        return int(self.get("rollbacks", 0))

    @property
    def empty_contributions(self) -> bool:
        # Not known of every client: then as in bsp, where nothing hangs for want of a contribution.
        return bool(self.get("empty_contributions", True))


class _Source(Protocol):
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


class _FixedShare:
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


class _HandedOutRuns:
    """--budget=job: the chief hands out runs of samples, until the whole job's are used. As in
    worker/train/handed_out_runs.cc.

    ahead: so many are taken before the loop gets them.
    """

    def __init__(self, sampler: Sampler, total: int, job: _Job, ahead: int) -> None:
        self._sampler = sampler  # It is a single worker's, whose steps are the runs.
        self._total = total
        self._job = job
        self._ahead = ahead
        # Others need a contribution of this worker to every step, if only an empty one: while it has to wait for a run
        # it gets shares without samples.
        self._fills_steps = job.empty_contributions
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
                except psgrad.WaitAgain:
                    rollbacks = self._job.rollbacks
                    self._job.get("settle", lambda: None)()
                    if self._job.rollbacks != rollbacks:  # go_back_to is yet to come.
                        return None
                    self._finish(self._finished_shares + len(self._open))
            return self._next(wait_s)
        except psgrad.WaitAgain:
            if self._fills_steps:
                self._open.append(False)
                place = self._sampler.plan(self._last)
                return Plan(place.epoch, place.epoch_step, [])
            unfinished = self._taken - self._finished
            raise RuntimeError(
                f"waiting for a run of samples while {unfinished} of this worker's are not finished"
            ) from None

    def take_ahead(self, finished: int) -> Plan | None:
        """The next run, for later; None: there is none now."""
        self._finish(finished)
        with contextlib.suppress(psgrad.WaitAgain, psgrad.RolledBack):  # Which the next take() finds as well.
            return self._next(wait_s=0.0)
        return None

    def skip_to(self, batch: int) -> int:
        return 0  # Steps have no batches of their own.

    def go_back_to(self, batch: int) -> None:
        """The chief knows which runs the checkpoint has, and hands out all others, to whoever asks."""
        self._taken = self._finished = self._finished_shares = 0
        self._open.clear()

    def _next(self, wait_s: float | None) -> Plan | None:
        terms = (self._sampler.samples, self._sampler.batch_size, self._total)
        ahead = {"ahead": self._ahead} if self._ahead else {}
        run = self._job.get("take_run", None)(self._taken + 1, self._finished, *terms, wait=wait_s, **ahead)
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


class _LoadedAhead:
    """Runs that are taken before the loop gets to them, and their batches, which a torch DataLoader reads meanwhile."""

    def __init__(self, dataset: Any, options: Mapping[str, Any], take: Callable[[], Plan | None]) -> None:
        self._dataset = dataset
        self._options = options
        self._take = take
        self._plans: deque[Plan] = deque()
        self._loader: Iterator[Any] | None = None
        self._batch: Any = None

    def begin(self, first: Plan) -> None:
        """Reads this run's batch, and those of as many others as there are now."""
        data: Any = importlib.import_module("torch.utils.data")
        self._loader = iter(
            data.DataLoader(self._dataset, batch_sampler=_TakenRuns(self._indices(first)), **self._options)
        )

    def next(self) -> Plan | None:
        """The run whose batch is there now; None: none is left, and another one has to be begun with."""
        if self._loader is None:
            return None
        self._batch = next(self._loader, None)
        if not self._plans:
            self._loader = None
            return None
        return self._plans.popleft()

    def batch(self) -> Any:
        return self._batch

    def end(self) -> None:
        """What was taken is another generation's."""
        self._loader = None
        self._plans.clear()

    def _indices(self, first: Plan) -> Iterator[list[int]]:
        plan: Plan | None = first
        while plan is not None:
            self._plans.append(plan)
            yield plan.indices
            plan = self._take()


class _TakenRuns:
    """A batch sampler of as many batches as are there when they are asked for."""

    def __init__(self, indices: Iterator[list[int]]) -> None:
        self._indices = indices

    def __iter__(self) -> Iterator[list[int]]:
        return self._indices


class Drained(SystemExit):
    """This worker has left the job, as an operator asked it to: unless it is caught, the process ends with status 0."""

    code = 0


class Batches:
    """This rank's batches of all epochs, for one loop over them:

        for x, y in Batches(data, opt, batch_size=32, epochs=8):
            opt.zero_grad(); loss(model(x), y).backward(); opt.step()

    dataset: has len() and dataset[index]; __getitems__ is used where it is there.
    opt_or_client: a psgrad optimizer or client, which says rank, number of workers, mode and where to begin. The
        optimizer is told the samples of each step (set_samples), so that means are weighted by them.
    batch_size: this worker's samples of a step; "full": its part of all samples. The same on all workers, as are seed,
        shuffle and epochs.
    epochs: passes of all workers over the data; decimals allowed.
    collate: makes a batch of a list of samples. None: torch's default_collate where torch is used, else lists.
    loader: keyword arguments of a torch DataLoader that is to load the batches, as in {"num_workers": 4,
        "pin_memory": True}; None: they are loaded as they are asked for.
    empty_step: called instead of a batch where this worker has no samples in an epoch's last one, and others need a
        contribution of it; None: the optimizer's. Where the script has several models, it has to be a function that
        makes empty steps of all of them.

    If an operator asks the worker to leave (ps_ctl drain), the loop ends between two steps, or rounds, with Drained.

    Where the chief hands out the samples (--budget=job), the batches are what it gives this worker; with `loader` it
    takes num_workers times prefetch_factor of them ahead. If the worker is lost, others get those that it has not used.
    Who leaves the loop before its end has used what it took; where too few workers are left, what was taken is used up
    before training waits.

    If the servers go back to a checkpoint, the batches do, too: the loop is given again what the steps from there on
    are made of. So the result in bsp is that of a run without the rollback. Where the chief hands out the samples, it
    hands out again those that the checkpoint does not have, and what this worker had is forgotten.
    """

    def __init__(
        self,
        dataset: Any,
        opt_or_client: Any,
        *,
        batch_size: int | Literal["full"],
        seed: int = 1,
        shuffle: bool = True,
        epochs: float = 1,
        collate: Callable[[list[Any]], Any] | None = None,
        loader: Mapping[str, Any] | None = None,
        empty_step: Callable[[], object] | None = None,
    ) -> None:
        if not (math.isfinite(epochs) and epochs > 0):
            raise ValueError(f"epochs is {epochs}; expected more than 0")
        self._dataset = dataset
        self._job = _Job(opt_or_client)
        self._collate = collate
        self._loader_options = loader
        # An empty step of one of several models would leave this worker a step behind in those of the others.
        of_optimizer = None if self._job.get("is_one_of_several", False) else self._job.get("empty_step", None)
        self._empty_step = empty_step or of_optimizer
        self._hands_out_runs = bool(self._job.get("hands_out_runs", False))
        share_of = functools.partial(Sampler, len(dataset), seed=seed, shuffle=shuffle)
        num_workers, rank = int(self._job.get("num_workers", 1)), int(self._job.get("rank", 0))
        if self._hands_out_runs:
            rank = 0  # Where workers come and go there are ranks beyond those that the job begins with.
        self._sampler = share_of(num_workers=num_workers, rank=rank, batch_size=batch_size)
        if self._hands_out_runs:
            self._sampler = share_of(num_workers=1, rank=0, batch_size=self._sampler.batch_size)
        # Where runs are handed out, these are the runs of all workers.
        self.steps_per_epoch = self._sampler.steps_per_epoch
        self.total = budget_of(epochs, self.steps_per_epoch)
        self._accumulate = int(self._job.get("accumulate", 1))
        ahead = self._batches_ahead() if self._hands_out_runs else 0
        self._check()
        self._rollbacks = self._job.rollbacks
        self._job.get("rewinds_data", lambda: None)()
        self._first = self._batch_now()
        if self._first >= self.total and not self._hands_out_runs:
            _log.warning("the job has made %d of %d steps already: there are no batches left", self._first, self.total)
        self._source: _Source
        self._ahead: _LoadedAhead | None = None
        if self._hands_out_runs:
            runs = _HandedOutRuns(self._sampler, self.total, self._job, ahead)
            self._source = runs
            if loader is not None:
                options = {"collate_fn": collate} if collate else {}
                take = functools.partial(self._take_ahead, runs)
                self._ahead = _LoadedAhead(dataset, {**options, **loader}, take)
        else:
            self._source = _FixedShare(self._sampler, self._first, self.total)
            self._say_steps()
        self._used_runs = 0
        self._loaded: Iterator[tuple[int, Any]] | None = None
        self._peeked: Plan | None = None
        self._taken = 0
        self._spent = False
        self.plan: Plan | None = None  # The share that the loop is at.

    def _say_steps(self) -> None:
        """For whoever watches the job: how many steps it has in all, as far as a fixed share knows."""
        local = self._job.get("local_steps", None)
        batches_a_step = self._accumulate * (1 if local is None else max(1, int(local.steps)))
        self._job.get("expects_steps", lambda steps: None)(math.ceil(self.total / batches_a_step))

    def __iter__(self) -> Iterator[Any]:
        """Goes on where an earlier loop was left. RuntimeError if there is nothing left at all."""
        for _, part in self.by_epoch():
            yield from part

    def by_epoch(self) -> Iterator[tuple[int, Iterator[Any]]]:
        """Each epoch's number, from 0, and batches. Where samples are handed out, late ones of an earlier epoch are
        among those of a later one. Batches that a loop leaves come in the next.
        """
        self._follow_rollback()
        if self._spent:
            raise RuntimeError("all batches have been used; `epochs` says how many there are, of all loops together")
        while (plan := self._peek()) is not None:
            yield plan.epoch, self._part(plan.epoch)

    def __len__(self) -> int:
        """Batches that a loop gets. TypeError where samples are handed out: nobody knows."""
        if self._hands_out_runs:
            raise TypeError("how many batches the chief will hand out to this worker is not known")
        return sum(self._sampler.samples_of(step) > 0 for step in range(self._first, self.total))

    def sampler(self, epoch: int) -> list[int]:
        """This rank's samples of an epoch in order, for a DataLoader of your own with the same batch_size. Then tell
        the optimizer the samples of each step, and call its empty_step() in steps that only others have a batch for.
        """
        return [index for batch in self.batch_sampler(epoch) for index in batch]

    def batch_sampler(self, epoch: int) -> list[list[int]]:
        """The same, as batches. There are none without samples."""
        if self._hands_out_runs:
            raise ValueError("with --budget=job the chief hands out the samples as they are needed")
        begin = epoch * self.steps_per_epoch
        plans = (self._sampler.plan(step) for step in range(begin, begin + self.steps_per_epoch))
        return [plan.indices for plan in plans if plan.indices]

    # ---- Inside

    def _check(self) -> None:
        if self._hands_out_runs and self._accumulate > 1:
            raise ValueError(
                f"accumulate={self._accumulate}: with --budget=job a run of samples counts as used when the next one "
                "is asked for, so each has to make a step of its own"
            )
        needs_empty = self._hands_out_runs or self._sampler.samples_of(self.steps_per_epoch - 1) == 0
        if needs_empty and self._job.empty_contributions and self._empty_step is None:
            raise ValueError(
                "empty_step: this worker needs one, to push an empty contribution in steps that it has no samples for; "
                "with several models, one that makes an empty step of each, as often as the loop makes one"
            )

    def _batches_ahead(self) -> int:
        """How many batches the DataLoader asks for before the loop gets them."""
        options = self._loader_options or {}
        if options.get("in_order", True) is False:
            raise ValueError("loader: in_order=False: with --budget=job batches have to come in their runs' order")
        ahead = int(options.get("num_workers", 0)) * int(options.get("prefetch_factor", None) or 2)
        if ahead > _AHEAD_MAX:
            raise ValueError(
                f"loader: num_workers times prefetch_factor is {ahead}; with --budget=job a worker may take "
                f"{_AHEAD_MAX} runs of samples ahead"
            )
        return ahead

    def _batch_of(self, step: int) -> int:
        local = self._job.get("local_steps", None)
        resized_step, samples = self._job.get("resized", (0, 0))
        epochs, in_epoch = divmod(samples, len(self._dataset))
        # Batches that were not used as a whole are used again.
        origin = epochs * self.steps_per_epoch + int(in_epoch / len(self._dataset) * self.steps_per_epoch)
        besides = int(self._job.get("batches_besides", lambda step: 0)(step))
        sizes = (self.steps_per_epoch, self.total)
        return _first_batch(step, local, self._accumulate, *sizes, (resized_step, origin), besides)

    def _batch_now(self) -> int:
        """The batch that the worker's next step begins with."""
        return self._batch_of(int(self._job.get("step_number", None) or self._job.get("start_step", 0)))

    def _follow_rollback(self) -> None:
        rollbacks = self._job.rollbacks
        if rollbacks == self._rollbacks:
            return
        self._rollbacks = rollbacks
        self._source.go_back_to(self._batch_now())
        self._taken = 0
        self._peeked = None
        self._loaded = None
        self._spent = False
        if self._hands_out_runs:
            self._use_runs(0)
        if self._ahead is not None:
            self._ahead.end()

    def _peek(self) -> Plan | None:
        """The share that comes next. The loop is through with all before it."""
        self._follow_rollback()
        if self._job.get("asked_to_leave", False) and self._job.get("local_step", 0) == 0:
            _log.info("an operator asks this worker to leave: leaving the job after this step")
            if not self._job.empty_contributions:  # Nobody waits for this worker, and its last push may be under way.
                self._job.get("settle", lambda: None)()
            self._job.get("leave", lambda reason: None)("asked to")
            raise Drained
        if self._peeked is None and not self._spent:
            if self._hands_out_runs and self._job.get("awaits_step", False):
                raise RuntimeError(
                    "the last batch has been through backward(), and had no step(): where the chief hands out the "
                    "samples (--budget=job), it counts as used once the next one is asked for, so each batch needs "
                    "a step of its own; opt.empty_step() drops it"
                )
            self._skip_what_others_have_passed()
            self._peeked = self._take()
            self._taken += self._peeked is not None
            if self._peeked is None:
                self._spent = True
                self._loaded = None  # Ends its processes.
        return self._peeked

    def _take(self) -> Plan | None:
        if self._ahead is None:
            return self._take_next()
        plan = self._ahead.next()
        if plan is not None:
            return plan
        plan = self._take_next()
        if plan is None or not plan.indices:
            return plan
        self._ahead.begin(plan)
        return self._ahead.next()

    def _use_runs(self, count: int) -> None:
        """Pushes are made with so many of the runs that were taken."""
        self._used_runs = count
        self._job.get("use_runs", lambda count: None)(count)

    def _take_ahead(self, runs: _HandedOutRuns) -> Plan | None:
        if self._job.rollbacks != self._rollbacks:  # What is taken now would be of another generation.
            return None
        return runs.take_ahead(self._taken - int(self._job.get("open_batches", 0)))

    def _take_next(self) -> Plan | None:
        while True:
            rollbacks = self._rollbacks
            try:
                plan = self._source.take(self._taken - int(self._job.get("open_batches", 0)))
            except psgrad.RolledBack:
                rejoin = self._job.get("rejoin", None)
                if rejoin is None:
                    # Only the loop's next push can bring the weights, as they are its own. It ends without an answer,
                    # whatever it is of; then there are runs of the new generation.
                    return self.plan or self._sampler.plan(0)
                rejoin()
            self._follow_rollback()
            if rollbacks == self._rollbacks:
                return plan

    def _part(self, epoch: int) -> Iterator[Any]:
        rollbacks = self._rollbacks
        while (plan := self._peek()) is not None and plan.epoch <= epoch:
            if rollbacks != self._rollbacks and plan.epoch < epoch:  # That one's part comes again.
                return
            self._peeked = None
            if plan.indices:
                batch = self._load(plan)
                self.plan = plan
                if self._hands_out_runs:
                    self._use_runs(self._used_runs + 1)
                self._job.get("set_samples", lambda samples: None)(len(plan.indices))
                yield batch
            elif self._job.empty_contributions and self._accumulate == 1:  # Else it has one batch less to add up.
                assert self._empty_step is not None
                self._empty_step()

    def _skip_what_others_have_passed(self) -> None:
        """In a synchronous mode that does not wait for everyone (backup), each step has its batch."""
        step_number = self._job.get("step_number", None)
        waits_for_all = self._job.get("exact_versions", True) or self._job.get("local_steps", None) is not None
        if step_number is None or waits_for_all or not self._job.get("synchronous", False):
            return
        jumped_over = self._source.skip_to(self._batch_of(int(step_number)))
        if jumped_over:
            self._job.get("add_passed", lambda samples: None)(jumped_over)

    def _load(self, plan: Plan) -> Any:
        if self._ahead is not None:
            return self._ahead.batch()
        if self._loader_options is not None:
            return self._load_ahead(plan)
        if hasattr(self._dataset, "__getitems__"):
            samples = self._dataset.__getitems__(plan.indices)
        else:
            samples = [self._dataset[index] for index in plan.indices]
        return (self._collate or _default_collate())(samples)

    def _load_ahead(self, plan: Plan) -> Any:
        step = plan.epoch * self.steps_per_epoch + plan.epoch_step
        if self._loaded is None:
            self._loaded = self._start_loader(step)
        for loaded_step, batch in self._loaded:
            if loaded_step == step:
                return batch
        raise AssertionError("the loader has each step that has samples")

    def _start_loader(self, first: int) -> Iterator[tuple[int, Any]]:
        """Each step from this one on that has samples, and its batch."""
        data: Any = importlib.import_module("torch.utils.data")
        # A sampler of its own: it is some steps ahead, and may be in another epoch.
        sampler = copy.copy(self._sampler)
        steps = [step for step in range(first, self.total) if sampler.samples_of(step) > 0]
        options = {"collate_fn": self._collate} if self._collate else {}
        loader = data.DataLoader(
            self._dataset, batch_sampler=_LazyBatches(sampler, steps), **options, **(self._loader_options or {})
        )
        return zip(steps, loader, strict=True)


class _LazyBatches:
    """The indices of these steps; each epoch's permutation is made when it is needed."""

    def __init__(self, sampler: Sampler, steps: Sequence[int]) -> None:
        self._sampler = sampler
        self._steps = steps

    def __iter__(self) -> Iterator[list[int]]:
        return (self._sampler.plan(step).indices for step in self._steps)

    def __len__(self) -> int:
        return len(self._steps)


def _default_collate() -> Callable[[list[Any]], Any]:
    if "torch" in sys.modules:
        data: Any = importlib.import_module("torch.utils.data")
        collate: Callable[[list[Any]], Any] = data.default_collate
        return collate
    return _as_lists


def _as_lists(samples: list[Any]) -> Any:
    """A tuple of lists, if a sample is a tuple."""
    if isinstance(samples[0], tuple):
        return tuple(list(column) for column in zip(*samples, strict=True))
    return samples
