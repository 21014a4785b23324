"""DistributedOptimizer: a torch optimizer whose steps the servers take."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Literal, NoReturn

import torch

import psgrad
from psgrad.torch import life
from psgrad.torch.arguments import check_arguments, check_whole, environment, server_of
from psgrad.torch.groups import Groups, LearningRate
from psgrad.torch.local import local_steps
from psgrad.torch.memory import Memory
from psgrad.torch.progress import Progress, WentBack
from psgrad.torch.records import Records
from psgrad.torch.rollback import Rollbacks
from psgrad.torch.sending import Sender
from psgrad.torch.settings import optimizer_settings
from psgrad.torch.steps import PushGradients, Steps, Unused
from psgrad.torch.tensors import Buffers, Entry, entries_of

log = logging.getLogger("psgrad")


class DistributedOptimizer(torch.optim.Optimizer):
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

        self._joined = False
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups = optimizer.param_groups  # The same list: schedulers of either move both.
        self.state = optimizer.state
        self._wrapped = optimizer
        self._joined = True

        self.accumulate = accumulate
        self._samples = samples
        self._next_samples: int | None = None
        self._adds_up = False  # Several backward passes make the coming step, by no_sync().
        self._pid = os.getpid()
        self._ended = ""  # Why it cannot be used any more.
        self._state_said = False
        self._rollbacks = Rollbacks()
        self._entries = entries
        self._client = psgrad.Client.join(
            address,
            [entry.spec() for entry in entries],
            optimizer=settings,
            samples_per_epoch=samples_per_epoch,
            counts_steps=samples is None,
            **environment(),
        )
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
        self._steps: Steps
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

    # ---- What it is

    @property
    def client(self) -> psgrad.Client:
        """The connection to the job, for what is not here: the weights' hash, runs of a job's budget."""
        return self._client

    @property
    def rank(self) -> int:
        """Of this worker, from 0."""
        return self._client.rank

    @property
    def num_workers(self) -> int:
        """That the job has when it starts; what a sampler divides the data by."""
        return self._client.num_workers

    @property
    def mode(self) -> str:
        """Of the servers: "bsp", "asp", "ssp", "backup", "local_sgd", "easgd"."""
        return self._client.mode

    @property
    def lead(self) -> bool:
        """Whether this worker is the lowest live rank: the one to print, evaluate and save."""
        return self._client.lead

    @property
    def step_number(self) -> int:
        """Of the next push; steps of a job count from 0."""
        return self._progress.step

    @property
    def version(self) -> int:
        """Of the weights: the updates that have been made to them (the lowest of all servers')."""
        return self._progress.version

    @property
    def dropped(self) -> int:
        """Pushes of this worker that a server refused as too old (stale)."""
        return self._progress.dropped

    @property
    def rolled_back_to(self) -> int | None:
        """The step that the servers went back to in the last step() or empty_step(); None: they did not."""
        return self._rollbacks.to

    @property
    def rollbacks(self) -> int:
        """How often the servers went back to a checkpoint since this worker joined."""
        return self._client.rollbacks

    @property
    def skipped(self) -> int:
        """Steps of this worker (with local steps: batches) that did not count, as a gradient was not finite."""
        return self._progress.skipped

    # ---- Training

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
            log.warning("step %d: the gradient of %s is not finite: the step was skipped", step, result.skipped)
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

    def idle(self, what: str = "evaluating") -> AbstractContextManager[None]:
        """Says that this worker makes no step for a while and nothing is wrong: `with opt.idle("evaluating"): …`.

        Servers wait for a worker as long as it lives; with this, those who wait for it are told what it does, and the
        servers' --progress_timeout does not count meanwhile.
        """
        self._check_usable()
        log.info("rank %d: %s; its next step is %d", self.rank, what, self.step_number)
        return _Idle(self._client, what)

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
        step = self._progress.step + (self._steps.open_batches > 0)
        try:
            while not self._try_to_finish(step):
                pass
        except psgrad.RolledBack:
            raise
        except BaseException as error:
            self._say_left(life.reason_of(type(error), error))
            self._end("finish() was called: this worker has left the job")
            raise
        self._end("finish() was called: this worker has left the job")

    def _try_to_finish(self, step: int) -> bool:
        """False: the servers have gone back, but to no step before this one. RolledBack: they have."""
        try:
            self._steps.settle()
            self._client.done(counts_as_empty=self._client.synchronous)
            self._progress.pull(self._memory.weight_buffers)
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

    def _end(self, why: str) -> None:
        self._ended = why
        self._steps.close(why)
        self._let_go()

    def leave(self, reason: str) -> None:
        """Leaves the job at once, for this reason, which the servers and the other workers are told. Never raises."""
        if self._ended or os.getpid() != self._pid:
            return
        self._ended = f"this worker has left the job: {reason}"
        steps = getattr(self, "_steps", None)
        self._client.stop()
        if steps is not None:
            steps.close(self._ended)
            steps.give_up()
        self._say_left(reason)
        self._let_go()

    def _say_left(self, reason: str) -> None:
        try:
            self._client.leave(reason)
        except Exception as error:  # The job may be gone by now, and there is another exception to be seen.
            log.debug("leave: %s", error)

    def _let_go(self) -> None:
        life.unwatch(self)
        steps = getattr(self, "_steps", None)
        if steps is not None:
            steps.remove_hooks()
        records = getattr(self, "_records", None)
        if records is not None:
            records.end(self.dropped, self.skipped)

    def forked(self) -> None:
        """Of a child of the process: the client, its threads and connections belong to the parent."""
        self._ended = (
            f"this process was forked from the worker's (pid {self._pid}), which alone can train: keep backward() and "
            "step() out of DataLoader workers and other children"
        )
        steps = getattr(self, "_steps", None)
        if steps is not None:
            steps.close(self._ended)

    def __enter__(self) -> DistributedOptimizer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or (isinstance(value, SystemExit) and not value.code):
            try:
                self.finish()
            except psgrad.RolledBack as error:  # No loop follows that could make the steps again.
                self.leave(life.reason_of(type(error), error))
                raise
        else:
            self.leave(life.reason_of(kind, value))

    def _check_usable(self) -> None:
        if self._ended:
            raise RuntimeError(self._ended)

    # ---- Of torch.optim.Optimizer

    def state_dict(self) -> dict[str, Any]:
        """The groups' hyperparameters. The optimizer's state is on the servers (their checkpoints have it), not in it.

        In modes in which this worker takes steps of its own (local_sgd, easgd) its state is there.
        """
        packed = self._wrapped.state_dict()
        if self._client.local_steps is not None:
            return packed
        if not self._state_said:
            self._state_said = True
            log.warning(
                "state_dict(): the optimizer's state (momentum and the like) is on the servers, so it is not in it; "
                "their checkpoints have it (ps_server --checkpoint_dir)"
            )
        return {"state": {}, "param_groups": packed["param_groups"]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes the hyperparameters of the groups: lr follows, and the others must be what they are.

        ValueError if the groups are others, or there is state, which the servers hold.
        """
        if state_dict["state"] and self._client.local_steps is None:
            raise ValueError(
                "load_state_dict: this has an optimizer's state (momentum and the like), which the servers hold: "
                "restore it with them (ps_server --restore), and load only {'state': {}, 'param_groups': …} here"
            )
        saved = state_dict["param_groups"]
        if [len(group["params"]) for group in saved] != [len(group["params"]) for group in self.param_groups]:
            raise ValueError("load_state_dict: the parameter groups are others than this optimizer's")
        if state_dict["state"]:
            self._load_local_state(state_dict)
        for group, values in zip(
            self.param_groups, saved, strict=True
        ):  # In place: the wrapped optimizer has them too.
            group.update((key, value) for key, value in values.items() if key not in ("params", "param_names"))

    def _load_local_state(self, state_dict: Mapping[str, Any]) -> None:
        groups = list(self.param_groups)
        self._wrapped.load_state_dict(dict(state_dict))  # It makes groups of its own of them.
        self._wrapped.param_groups = self.param_groups
        self.param_groups[:] = groups
        self.state = self._wrapped.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """RuntimeError: the groups were told to the servers when this worker joined."""
        if self._joined:
            raise RuntimeError(
                "add_param_group: the servers were told the groups at the join; add it to the optimizer before "
                "DistributedOptimizer is made"
            )
        super().add_param_group(param_group)

    def __getstate__(self) -> NoReturn:
        raise TypeError("a DistributedOptimizer belongs to its process: copy or save the model, or state_dict()")

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.__getstate__()


class _Idle(AbstractContextManager[None]):
    """Says that it is so, and when it is over."""

    def __init__(self, client: psgrad.Client, what: str) -> None:
        self._client = client
        self._what = what
        self._began = time.monotonic()
        client.set_busy(what)

    def __exit__(self, *_: object) -> None:
        log.info("rank %d: %s took %.1f s", self._client.rank, self._what, time.monotonic() - self._began)
        if not self._client.closed:
            self._client.set_busy("")


def _refuse_second(entries: Iterable[Entry]) -> None:
    """The hooks of two would both send."""
    mine = {id(entry.tensor) for entry in entries}
    for other in life.live():
        if isinstance(other, DistributedOptimizer) and any(id(entry.tensor) in mine for entry in other._entries):
            raise RuntimeError("the model is being trained by another DistributedOptimizer: call its finish() first")
