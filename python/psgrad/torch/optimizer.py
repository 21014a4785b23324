"""DistributedOptimizer: a torch optimizer whose steps the servers take."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch

import psgrad
from psgrad.torch import life
from psgrad.torch._member import Member
from psgrad.torch._wrapping import WrappingOptimizer
from psgrad.torch.arguments import check_arguments, check_whole, environment, server_of
from psgrad.torch.groups import Groups, LearningRate
from psgrad.torch.local import local_steps
from psgrad.torch.memory import Memory
from psgrad.torch.progress import Progress, WentBack
from psgrad.torch.records import Records
from psgrad.torch.rollback import Rollbacks
from psgrad.torch.sending import Sender
from psgrad.torch.settings import optimizer_settings
from psgrad.torch.steps import PushGradients, Unused
from psgrad.torch.tensors import Buffers, Entry, entries_of

log = logging.getLogger("psgrad")


class DistributedOptimizer(Member, WrappingOptimizer):
    """Trains `model` with the other workers of a job, in place of `optimizer`, whose parameter groups it shares.

    Making it joins the job and waits until all workers have joined; the model then has the job's weights. After
    `loss.backward()`, `step()` returns with the next weights in the parameters' own memory. Weights change in `step()`,
    `empty_step()`, `pull()` and `finish()`, and nowhere else. To be used by one thread of one process.

    Args:
        optimizer: SGD (plain, with momentum, nesterov), Adam, AdamW, Adagrad or RMSprop of torch.optim. Servers started
            with --optimizer=from_worker do what it says. Groups may differ in lr and weight_decay.
        model: the module that holds the optimizer's parameters, in the host's memory: float32, or bfloat16 and float16,
            for which float32 masters are kept. Parameters in no group, or that require no gradient, stay as they are.
        server: HOST:PORT or unix:PATH of the first server; $PS_SERVER if None. ($RANK, if set, is the rank to claim,
            and $PS_JOB the job.)
        overlap: "backward" sends each gradient while backward goes on; "none" sends all in step().
        accumulate: so many backward passes make a step. Gradients add up, as in torch: divide the loss for a mean.
        samples: that this worker's mean gradient of a step stands for, which weights it among the workers'; see
            set_samples. None: all workers weigh the same.
        clip_norm: servers scale the mean gradient of all workers down to this L2 norm.
        unused: of parameters without a gradient in a step: "skip" counts zeros where another worker has one, and
            leaves them where none has; "error" raises in step().
        buffers: of BatchNorm's statistics and the like: "rank0": the lowest rank's are everybody's after each step,
            "average": the workers' mean is, "local": each worker has its own after the same start.
        metrics_file: JSON lines (`start`, `step`, `end`) are written to it; `{rank}` in the name is replaced.
            None: $PS_METRICS_FILE, if it is set.
        samples_per_epoch: of all the training data, for a schedule that was given to the servers in epochs.

    Raises:
        ValueError, TypeError: an argument, or something of the model or optimizer that servers do not have, by name.
        psgrad.Refused: the job is another one (model, optimizer, number of workers).
        psgrad.Unavailable: a server cannot be reached, or not all workers came in time.
        psgrad.JobFailed, psgrad.Cancelled: the job failed; a stop was requested.
    """

    # GradScaler then calls step() itself, with `grad_scale` set, instead of looking at gradients that have been sent.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        *,
        server: str | None = None,
        overlap: Literal["backward", "none"] = "backward",
        accumulate: int = 1,
        samples: int | None = None,
        clip_norm: float | None = None,
        unused: Literal["skip", "error"] = "skip",
        buffers: Buffers = "rank0",
        metrics_file: str | os.PathLike[str] | None = None,
        samples_per_epoch: int = 0,
    ) -> None:
        if isinstance(optimizer, DistributedOptimizer):
            raise TypeError("optimizer: this is a DistributedOptimizer already")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer: a torch.optim.Optimizer is expected, not {type(optimizer).__name__}")
        check_arguments(
            overlap=overlap, accumulate=accumulate, samples=samples, clip_norm=clip_norm, unused=unused, buffers=buffers
        )
        check_whole("samples_per_epoch", samples_per_epoch, 0)
        address = server_of(server)
        groups = Groups(optimizer)
        settings = optimizer_settings(optimizer, groups.base_learning_rate, groups.base_weight_decay, clip_norm)
        entries = entries_of(model, optimizer, groups, buffers)
        _refuse_second(entries)

        WrappingOptimizer.__init__(self, optimizer)
        self.accumulate = accumulate
        self._samples = samples
        self._next_samples: int | None = None
        self._adds_up = False  # Several backward passes make the coming step, by no_sync().
        self._rollbacks = Rollbacks()
        self._entries = entries
        client = psgrad.Client.join(
            address,
            [entry.spec() for entry in entries],
            optimizer=settings,
            samples_per_epoch=samples_per_epoch,
            counts_steps=samples is None,
            **environment(),
        )
        Member.__init__(self, client)
        self._steps_here = client.local_steps is not None
        life.watch(self)
        try:
            self._start(groups, settings, overlap, accumulate, unused, metrics_file)
        except BaseException as error:
            self.leave(life.reason_of(type(error), error))
            raise

    def _start(
        self,
        groups: Groups,
        settings: psgrad.OptimizerSettings,
        overlap: str,
        accumulate: int,
        unused: str,
        metrics_file: str | os.PathLike[str] | None,
    ) -> None:
        client = self._client
        memory = Memory(client, self._entries)
        memory.take_values()
        started = client.start(memory.weight_buffers, memory.weight_buffers)
        memory.bind()
        self._memory = memory
        self._progress = Progress(client, started)
        running = client.start_step > 0 or started.version > 0
        rate = LearningRate(groups, None if running else settings.hyperparameters["learning_rate"])
        told = {"optimizer": settings.optimizer, **settings.hyperparameters, "clip_norm": settings.clip_norm}
        path = os.environ.get("PS_METRICS_FILE") or None if metrics_file is None else os.fspath(metrics_file)
        self._records = Records(path, client, told, append=running)
        self._learning_rate = rate
        self._unused = Unused(unused)
        if client.local_steps is not None:
            self._steps = local_steps(client, memory, self._progress, self._wrapped, rate, self._unused)
        else:
            if self.state:
                log.warning(
                    "the optimizer's state (momentum and the like) stays here: the servers begin with their own"
                )
            sender = Sender(
                client,
                memory,
                self._progress,
                rate,
                overlap=overlap == "backward",
                accumulate=accumulate,
                samples=self._samples_now,
            )
            self._steps = PushGradients(client, memory, self._progress, sender, self._unused)
        self._step_ended = time.monotonic()

    # ---- Training

    @property
    def rolled_back_to(self) -> int | None:
        """The step that the servers went back to in the last step() or empty_step(); None: they did not."""
        return self._rollbacks.to

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Sends what has not been sent of the gradients in `.grad`, and waits for the next weights.

        If the servers went back to a checkpoint, it returns with the weights of that: `rolled_back_to` is the step
        that is to be made next, and psgrad.data.Batches goes on there.

        Raises:
            TypeError: a closure was given: gradients are averaged once a step.
            RuntimeError: no backward() ran, a gradient was changed after it was sent, a parameter has other memory, or
                (unused="error") has no gradient; the text names it. empty_step() then drops the step.
            ValueError: a group's hyperparameters changed in a way that servers cannot follow.
            psgrad.Error: as of psgrad.Client.push_pull.
        """
        self._check_usable()
        if closure is not None:
            raise TypeError(
                "step(closure): the closure would compute several gradients in a step, and servers take one; call "
                "backward() and then step()"
            )
        if "grad_scale" in self.__dict__:
            for attribute in ("grad_scale", "found_inf"):
                self.__dict__.pop(attribute, None)
            raise RuntimeError(
                "torch.amp.GradScaler is not supported: gradients are sent in backward(), before it has unscaled them. "
                "Train in bfloat16 (torch.autocast(dtype=torch.bfloat16)), which needs no scaling"
            )
        entered = time.monotonic()
        samples = self._samples_now()
        step = self._progress.step
        self._rollbacks.to = None
        self._wrapped._opt_called = True  # type: ignore[attr-defined]  # For a scheduler of the wrapped optimizer.
        try:
            result = self._steps.step(samples)
        except WentBack:
            self._go_back(step)
            return
        if result is not None and result.skipped:
            self._progress.skipped += 1
            log.warning(
                "step %d: the gradient of %s %s: the step was skipped", step, result.skipped, result.why_skipped
            )
        self._passed(step, samples, result, entered)

    def empty_step(self) -> None:
        """A step of a worker that has no samples for it, or drops what it has: others' gradients count without its own.

        After backward() it makes the push under way an empty contribution. Where the mode does not wait for this
        worker, it only brings the newest weights.

        Raises: psgrad.Error: as of psgrad.Client.push_pull.
        """
        self._check_usable()
        entered = time.monotonic()
        step = self._progress.step
        self._rollbacks.to = None
        try:
            result = self._steps.empty()
        except WentBack:
            self._go_back(step)
            return
        self._passed(step, 0, result, entered)

    def _go_back(self, at: int) -> None:
        """The client has joined the next generation of the job: all that is the worker's own begins anew there."""
        while True:
            try:
                self._progress.renew(self._memory.weight_buffers)
                break
            except WentBack:
                continue
        self._memory.publish()
        self._learning_rate.went_back()
        client = self._client
        if client.local_steps is not None:
            self._wrapped.state.clear()
            self._steps = local_steps(
                client, self._memory, self._progress, self._wrapped, self._learning_rate, self._unused
            )
        self._next_samples = None
        self._adds_up = False
        self._rollbacks.tell(at, self._progress.step)
        self._records.went_back(client.generation, self._progress.step, self._progress.version)
        self._step_ended = time.monotonic()

    def rejoin(self) -> None:
        """After RolledBack between two steps: joins again, and brings the checkpoint's weights.

        psgrad.data.Batches calls it.
        """
        self._check_usable()
        step = self._progress.step
        try:
            self._progress.renew(self._memory.weight_buffers)
        except WentBack:
            self._go_back(step)

    def rewinds_data(self) -> None:
        """Whoever feeds the loop says that its batches go back as the steps do. psgrad.data.Batches calls it."""
        self._rollbacks.data_rewinds = True

    def _passed(self, step: int, samples: int, result: psgrad.Result | None, entered: float) -> None:
        now = time.monotonic()
        self._next_samples = None
        self._adds_up = False
        began = self._steps.began
        first = began if self._step_ended < began < entered else self._step_ended
        forward_s, backward_s = first - self._step_ended, entered - first
        self._records.step(step, self._progress.version, samples, result, (forward_s, backward_s, now - entered))
        self._step_ended = now

    def set_samples(self, samples: int) -> None:
        """So many samples made the mean gradient of the coming step: a last, smaller batch, say. 0 makes it empty.

        With accumulate= or no_sync() it is told of each backward pass, and adds up. ValueError if it is not from 0 to
        2^32 - 1.
        """
        check_whole("samples", samples, 0)
        adds_up = self.accumulate > 1 or self._adds_up
        self._next_samples = samples + ((self._next_samples or 0) if adds_up else 0)

    def add_passed(self, samples: int) -> None:
        """So many samples of this worker's share were left out; schedules over samples are to count them, though."""
        check_whole("samples", samples, 0)
        self._progress.jumped_over += samples

    def settle(self) -> None:
        """In modes with local steps: exchanges now what is not exchanged yet. Elsewhere step() leaves nothing open."""
        self._check_usable()
        if self._client.local_steps is not None:
            step = self._progress.step
            try:
                self._steps.settle()
            except WentBack:
                self._go_back(step)

    @property
    def open_batches(self) -> int:
        """Steps that are not exchanged yet."""
        return self._steps.open_batches

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes in it add to `.grad` and send nothing; one outside of it, before step(), sends the sum."""
        self._check_usable()
        self._adds_up = True
        return self._steps.no_sync()

    def pull(self) -> None:
        """Brings the newest weights, between steps; what was written to them here is gone.

        In bsp they are those that step() has brought. RuntimeError where workers have weights of their own between
        exchanges.
        """
        self._check_usable()
        if self._client.local_steps is not None:
            raise RuntimeError(f"pull(): in {self.mode} this worker's weights are its own until the next exchange")
        step = self._progress.step
        try:
            self._progress.renew(self._memory.weight_buffers)
        except WentBack:
            self._go_back(step)
        self._memory.publish()

    def record(self, **values: float) -> None:
        """Adds values to the next step's line of the metrics file: opt.record(loss=loss.item())."""
        self._records.add(values)

    def evaluated(self, split: str = "test", **values: float) -> None:
        """Writes an `eval` line to the metrics file: opt.evaluated(accuracy=0.91, loss=0.3). Accuracy is 0 to 1."""
        self._records.evaluated(self.step_number, self.version, split, values)

    def _samples_now(self) -> int:
        if self._next_samples is not None:
            return self._next_samples
        return 1 if self._samples is None else self._samples


def _refuse_second(entries: Iterable[Entry]) -> None:
    """The hooks of two would both send."""
    mine = {id(entry.tensor) for entry in entries}
    for other in life.live():
        if isinstance(other, DistributedOptimizer) and any(id(entry.tensor) in mine for entry in other._entries):
            raise RuntimeError("the model is being trained by another DistributedOptimizer: call its finish() first")
