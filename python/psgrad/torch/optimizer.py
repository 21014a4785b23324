"""DistributedOptimizer: a torch optimizer whose steps the servers take."""

from __future__ import annotations

import inspect
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NoReturn

import torch
from torch._compile import _disable_dynamo

import psgrad
from psgrad._models import place_of
from psgrad.reductions import Reductions
from psgrad.torch import life
from psgrad.torch.groups import Groups, LearningRate, OwnGroups
from psgrad.torch.local import LocalTraining, local_steps
from psgrad.torch.records import Records
from psgrad.torch.reports import Reports
from psgrad.torch.state import ServersState, in_torchs_form, to_give
from psgrad.torch.steps import Progress, PushGradients, Steps, Unused, WentBack
from psgrad.torch.tensors import Buffers, Entry, Memory, entries_of, shortened

log = logging.getLogger("psgrad")

_SAMPLES_MAX = 2**32 - 1
# With which an optimizer that servers do not know is used as one that they do.
_STEPS_OF_ONE_BATCH = "--mode=diloco --local_steps=1 --outer_lr=1 --outer_momentum=0"


class WrappingOptimizer(torch.optim.Optimizer):
    """Shares its parameter groups and its state with the wrapped one. Who takes steps is the subclass's to say."""

    # The wrapped optimizer takes steps in this process, so its state is here.
    _steps_here = False
    # The servers have not been given any state yet.
    _takes_state = False

    def __init__(self, wrapped: torch.optim.Optimizer) -> None:
        self._complete = False
        super().__init__(wrapped.param_groups, wrapped.defaults)
        self.param_groups = wrapped.param_groups  # The same list: schedulers of either move both.
        self.state = wrapped.state
        self._wrapped = wrapped
        self._complete = True
        self._state_said = False

    def state_dict(self, full: bool = False) -> dict[str, Any]:
        """The groups' hyperparameters, and with `full` the optimizer's state, fetched from the servers.

        The state is of the model's version (in asp, ssp and backup: of the servers' newest), in torch.optim's own form:
        torch.optim can load it, and an optimizer that has loaded it gives it to the servers of the job that it is
        wrapped for. In modes in which this worker takes steps of its own (local_sgd, diloco, easgd) its state is always
        there.

        Raises: psgrad.Error, as of psgrad.Client.pull_state; RuntimeError once this worker has left (with `full`).
        """
        packed = self._wrapped.state_dict()
        if self._steps_here:
            return packed
        if full:
            return {"state": self._servers_state(), "param_groups": packed["param_groups"]}
        if not self._state_said:
            self._state_said = True
            log.warning(
                "state_dict(): the optimizer's state (momentum and the like) is on the servers, so it is not in it; "
                "state_dict(full=True) fetches it, and their checkpoints have it (ps_server --checkpoint_dir)"
            )
        return {"state": {}, "param_groups": packed["param_groups"]}

    def _servers_state(self) -> dict[int, dict[str, Any]]:
        """What the servers have, as torch.optim has it."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes the hyperparameters of the groups, which the servers are told with the next step.

        ValueError if the groups are others, or there is state, which the servers hold.
        """
        if state_dict["state"] and not (self._steps_here or self._takes_state):
            raise ValueError(
                "load_state_dict: this has an optimizer's state (momentum and the like), which the servers hold: load "
                "it into the torch optimizer before DistributedOptimizer is made, which then gives it to the servers, "
                "or here with start='later'; or restore it with them (ps_server --restore), and load only "
                "{'state': {}, 'param_groups': …} here"
            )
        saved = state_dict["param_groups"]
        if [len(group["params"]) for group in saved] != [len(group["params"]) for group in self.param_groups]:
            raise ValueError("load_state_dict: the parameter groups are others than this optimizer's")
        if state_dict["state"]:
            self._load_local_state(state_dict)
        # They are changed in place, as the wrapped optimizer has them too.
        for group, values in zip(self.param_groups, saved, strict=True):
            group.update((key, value) for key, value in values.items() if key not in ("params", "param_names"))

    def _load_local_state(self, state_dict: Mapping[str, Any]) -> None:
        groups = list(self.param_groups)
        self._wrapped.load_state_dict(dict(state_dict))  # It makes groups of its own of them.
        self._wrapped.param_groups = self.param_groups
        self.param_groups[:] = groups
        self.state = self._wrapped.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """RuntimeError: the groups were told to the servers when this worker joined."""
        if self._complete:
            raise RuntimeError(
                "add_param_group: the servers were told the groups at the join; add it to the optimizer before "
                "DistributedOptimizer is made"
            )
        super().add_param_group(param_group)

    def __getstate__(self) -> NoReturn:
        raise TypeError("a DistributedOptimizer belongs to its process: copy or save the model, or state_dict()")

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.__getstate__()


class DistributedOptimizer(life.Member, Reductions, WrappingOptimizer):
    """Trains `model` with the other workers of a job, in place of `optimizer`, whose parameter groups it shares.

    Making it joins the job and waits until all workers have joined; the model then has the job's weights. After
    `loss.backward()`, `step()` returns with the next weights in the parameters' own memory. Weights change in `step()`,
    `empty_step()`, `pull()` and `finish()`, and nowhere else, unless the servers go back to a checkpoint in
    `all_mean()` or its like. To be used by one thread of one process.

    Args:
        optimizer: SGD (plain, with momentum, nesterov), Adam, AdamW, Adagrad or RMSprop of torch.optim. Servers started
            with --optimizer=from_worker do what it says, also where groups differ and schedulers move them. In
            local_sgd, diloco and easgd it may be any: it stays the worker's own, as does each with servers'
            --optimizer=local. State that it has (load_state_dict) is what the servers' begins with, in a job that
            begins; all workers bring the same.
        model: the module that holds the optimizer's parameters, in the host's memory or on CUDA cards: float32, or
            bfloat16 and float16, for which float32 masters are kept. Parameters in no group, or that require no
            gradient, stay as they are.
        name: which of the script's models this is, if it has several, each with an optimizer like this one: psrun
            --models=NAME,NAME starts servers for each. Workers are to make them, and their steps, in the same order.
        server: HOST:PORT or unix:PATH of the first server; $PS_SERVER if None, or with a name that in $PS_SERVERS.
            ($PS_RANK, or else $RANK, is the rank to claim, if set, and $PS_JOB the job; with a name that in $PS_JOBS.)
        overlap: "backward" sends each gradient while backward goes on, and raises, there or in step(), if it is another
            one by then; "none" sends all in step(), whatever is in `.grad`. "auto" begins as "backward", and at the
            first step that it does not fit goes on as "none", from that step on.
        accumulate: so many backward passes make a step. Gradients add up, as in torch: divide the loss for a mean.
        samples: that this worker's mean gradient of a step stands for, which weights it among the workers'; see
            set_samples. None: all workers weigh the same.
        clip_norm: servers scale the mean gradient of all workers down to this L2 norm.
        unused: of parameters without a gradient in a step: "skip" counts zeros where another worker has one, and
            leaves them where none has; "error" raises in step().
        buffers: of BatchNorm's statistics and the like: "rank0": the lowest rank's are everybody's after each step,
            "average": the workers' mean is, "local": each worker has its own after the same start.
        start: "now": making it starts the job. "later": the first use does, and until then model.load_state_dict() and
            load_state_dict() say what a job begins with, as in frameworks that restore after they have made the
            optimizers; see start().
        metrics_file: JSON lines (`start`, `step`, `end`) are written to it; `{rank}` in the name is replaced.
            None: $PS_METRICS_FILE, if it is set.
        samples_per_epoch: of all the training data, for a schedule that was given to the servers in epochs.

    Raises:
        ValueError, TypeError: an argument, or something of the model or optimizer that servers do not have, by name.
        psgrad.Refused: the job is another one (model, optimizer, number of workers).
        psgrad.Unavailable: a server cannot be reached, or not all workers came in time.
        psgrad.JobFailed, psgrad.Cancelled: the job failed; a stop was requested.
    """

    # GradScaler then calls step() itself, with `grad_scale` set, also where it has found gradients not finite.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        *,
        name: str | None = None,
        server: str | None = None,
        overlap: Literal["auto", "backward", "none"] = "auto",
        accumulate: int = 1,
        samples: int | None = None,
        clip_norm: float | None = None,
        unused: Literal["skip", "error"] = "skip",
        buffers: Buffers = "rank0",
        start: Literal["now", "later"] = "now",
        metrics_file: str | os.PathLike[str] | None = None,
        samples_per_epoch: int = 0,
    ) -> None:
        if isinstance(optimizer, DistributedOptimizer):
            raise TypeError("optimizer: this is a DistributedOptimizer already")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer: a torch.optim.Optimizer is expected, not {type(optimizer).__name__}")
        _refuse_many_gradients_a_step(optimizer)
        _check_choice("overlap", overlap, ("auto", "backward", "none"))
        _check_choice("unused", unused, ("skip", "error"))
        _check_choice("buffers", buffers, ("rank0", "average", "local"))
        _check_choice("start", start, ("now", "later"))
        _check_whole("accumulate", accumulate, 1)
        if samples is not None:
            _check_whole("samples", samples, 0)
        if clip_norm is not None and not 0 < clip_norm < float("inf"):
            raise ValueError(f"clip_norm={clip_norm!r}: a number above 0 is expected")
        _check_whole("samples_per_epoch", samples_per_epoch, 0)
        server, job = place_of(name, server, os.environ)
        _refuse_same_name(name)
        _refuse_second_member(server, job)
        self._place = (server, job)
        groups: Groups | OwnGroups
        settings: psgrad.OptimizerSettings | None = None
        unknown: ValueError | None = None  # What servers lack for this optimizer, unless they leave it to the worker.
        try:
            groups = Groups(optimizer)
            settings = groups.settings(clip_norm)
        except ValueError as error:
            groups, unknown = OwnGroups(), error
            # Where workers take steps of their own, it stays this one's own; elsewhere servers refuse it.
            settings = psgrad.OptimizerSettings("local", clip_norm=clip_norm)
        self._entries = entries_of(model, optimizer, groups, buffers)
        _refuse_second(self._entries)
        given = to_give(optimizer, self._entries) if unknown is None else None

        WrappingOptimizer.__init__(self, optimizer)
        self.accumulate = accumulate
        self._overlap = overlap
        self._samples = 1 if samples is None else samples
        self._samples_told = False  # set_samples() was called for the coming step.
        self._adds_up = False  # no_sync() was used: several backward passes make the coming step.
        self._unused = Unused(unused)
        self._rolled_back_to: int | None = None
        self._data_rewinds = False
        self._rollback_said = False
        self._shows_global = False
        self._later: _Later | None = None
        try:
            client = psgrad.Client.join(
                server,
                [entry.spec() for entry in self._entries],
                optimizer=settings,
                samples_per_epoch=samples_per_epoch,
                counts_steps=samples is None,
                does_fragments=True,
                job=job or "default",
                **_rank_to_claim(),
            )
        except ValueError as refused:
            if unknown is None or "the worker's optimizer" not in str(refused):
                raise
            raise ValueError(
                f"{unknown}. In local_sgd, diloco and easgd workers step with any optimizer: psrun "
                f"{_STEPS_OF_ONE_BATCH} has the mean of their steps after each batch"
            ) from None
        life.Member.__init__(self, client, name)
        self._steps_here = client.local_steps is not None
        try:
            if client.local_steps is not None and client.local_steps.optimizer == "local":
                groups, settings = OwnGroups(), None
            self._check_goes_with_other_models()

            def begin(given: ServersState | None) -> None:
                self._start(groups, settings, None if self._steps_here else given, metrics_file)

            if start == "now":
                begin(given)
            else:
                self._takes_state = unknown is None
                self._later = _Later(
                    model, self.start, lambda: begin(to_give(optimizer, self._entries) if unknown is None else None)
                )
        except BaseException as error:
            self.leave(life.reason_of(type(error), error))
            raise

    @_disable_dynamo
    def start(self) -> None:
        """With start="later": the job gets this worker's weights and state, if it asks for them; the model the job's.

        The first forward pass of the model or of a module of it calls it, as do step() and what else needs a job that
        trains. A function that is compiled as a whole, or uses parameters by themselves, needs the call before it. It
        does nothing the second time.

        Raises:
            RuntimeError: there are gradients, which were not computed on the job's weights.
            ValueError: the optimizer's state cannot be the servers'; psgrad.Error: as of psgrad.Client.start.
        """
        later = self._later
        if later is None or os.getpid() != self._pid:
            return
        early = [entry.name for entry in self._entries if entry.kind == "weight" and entry.tensor.grad is not None]
        if early:
            raise RuntimeError(
                f"{shortened(early)} had a gradient before the job was started, which is not one on the job's weights: "
                "call opt.start() before the first forward pass, or zero_grad()"
            )
        self._end_later()
        try:
            later.begin()
        except BaseException as error:
            self.leave(life.reason_of(type(error), error))
            raise

    def _end_later(self) -> None:
        if self._later is not None:
            self._later.end()
        self._later, self._takes_state = None, False

    def leave(self, reason: str) -> None:
        self._end_later()
        super().leave(reason)

    leave.__doc__ = life.Member.leave.__doc__

    def _check_usable(self) -> None:
        super()._check_usable()
        self.start()

    def _check_goes_with_other_models(self) -> None:
        if self._name is None:
            return
        if self._client.hands_out_runs:
            raise ValueError(
                f"name={self._name!r}: the chief of its job hands out the samples (--budget=job, --min_workers, "
                "--max_workers), which does not go with several models: each batch is for all of them"
            )
        for other in self._others():
            if other.rank != self.rank:
                raise RuntimeError(
                    f"this worker is rank {self.rank} in the job of model {self._name}, and rank {other.rank} in that "
                    f"of {other.name}: it has to be the same in all. psrun says which (PS_RANK); in another launcher "
                    "each worker needs a PS_RANK or RANK of its own, and servers whose number of workers is fixed"
                )

    def _start(
        self,
        groups: Groups | OwnGroups,
        settings: psgrad.OptimizerSettings | None,
        given: ServersState | None,
        metrics_file: str | os.PathLike[str] | None,
    ) -> None:
        """`given`: the state that the servers' optimizer is to begin with."""
        client = self._client
        self._memory = memory = Memory(client, self._entries)
        memory.take_values()
        brought = [weights.clone() for weights in memory.weights] if given is not None else []
        state: dict[str, Any] = {} if given is None else {"state": given}
        started = client.start(memory.weight_buffers, memory.weight_buffers, **state)
        memory.bind()
        self._progress = Progress(client, started)
        self._progress.samples = self._samples
        running = client.start_step > 0 or started.version > 0
        if self._progress.step > 0:
            log.warning(
                "rank %d: the job runs already: this worker continues at step %d", self.rank, self._progress.step
            )
        told: dict[str, Any] = {"optimizer": type(self._wrapped).__name__}
        rate = None
        if settings is not None:
            told = {"optimizer": settings.optimizer, **settings.hyperparameters, "clip_norm": settings.clip_norm}
            rate = None if running else settings.hyperparameters["learning_rate"]
        self._learning_rate = LearningRate(groups, rate)
        path = os.environ.get("PS_METRICS_FILE") or None if metrics_file is None else os.fspath(metrics_file)
        self._records = Records(path, client, told, append=running)
        self._reports = Reports(client)
        client.report_device(str(self._entries[0].tensor.device))
        if given is not None and running:
            log.warning(
                "rank %d: the optimizer's state (momentum and the like) that this worker has is not used: the job runs "
                "already, with that of the worker that began it, or of a checkpoint",
                self.rank,
            )
        elif not all(map(_are_alike, brought, memory.weights)):
            log.warning(
                "rank %d: the job began with other weights than this worker has loaded, and so with another state of "
                "the optimizer: all workers are to load the same file before DistributedOptimizer is made",
                self.rank,
            )
        self._steps = self._make_steps()
        self._step_ended = time.monotonic()

    def _make_steps(self) -> Steps:
        local = self._client.local_steps
        shared = (self._client, self._memory, self._progress, self._learning_rate, self._unused)
        if local is not None:
            return local_steps(local, self._wrapped, *shared)
        return PushGradients(*shared, overlap=self._overlap, accumulate=self.accumulate)

    def _servers_state(self) -> dict[int, dict[str, Any]]:
        self._check_usable()
        client = self._client
        while True:
            try:
                pulled = client.pull_state(self._progress.version if client.exact_versions else None)
                return in_torchs_form(self._wrapped, self._entries, pulled)
            except psgrad.RolledBack:
                self.rejoin()

    # ---- Training

    @property
    def rolled_back_to(self) -> int | None:
        """The step that the servers went back to in the last step() or empty_step(); None: they did not."""
        return self._rolled_back_to

    @_disable_dynamo  # A function that is compiled calls it as it is. torch.optim's own are marked so, too.
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Sends what has not been sent of the gradients in `.grad`, and waits for the next weights.

        `closure` is called once before that, and what it returns is returned: it computes the loss and the gradients.

        If the servers went back to a checkpoint, it returns with the weights of that: `rolled_back_to` is the step
        that is to be made next, and psgrad.data.Batches goes on there.

        Raises:
            RuntimeError: no backward() ran, a gradient was changed after it was sent (overlap="backward"), a parameter
                has other memory, or (unused="error") has no gradient; the text names it. empty_step() then drops the
                step. Or the chief hands out the samples, and the loop takes none.
            ValueError: a group's hyperparameters changed in a way that servers cannot follow.
            psgrad.Error: as of psgrad.Client.push_pull.
        """
        with self._scalers_attributes():
            self._check_trains()
            loss = self._evaluate(closure) if closure is not None else None
            self._check_samples_are_its_own()
            self._step()
            return loss

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        if "grad_scale" in self.__dict__:
            raise RuntimeError("step(closure): GradScaler takes no closure; call it first, and then scaler.step(opt)")
        with torch.enable_grad():
            return closure()

    def _step(self) -> None:
        entered = time.monotonic()
        progress, samples = self._progress, self._progress.samples
        self._rolled_back_to = None
        self._wrapped._opt_called = True  # type: ignore[attr-defined]  # For a scheduler of the wrapped optimizer.
        with self._following_rollbacks() as step:
            result = (self._steps.overflow if self._unscale() else self._steps.step)(samples)
            if result is not None and result.skipped:
                progress.skipped += 1
                log.warning(
                    "step %d: the gradient of %s %s: the step was skipped", step, result.skipped, result.why_skipped
                )
            self._passed(step, samples, result, entered)

    def empty_step(self) -> None:
        """A step of a worker that has no samples for it, or drops what it has: others' gradients count without its own.

        After backward() it makes the push under way an empty contribution. Where the mode does not wait for this
        worker, it only brings the newest weights. Where the worker takes steps of its own, it is one without a batch.

        Raises: psgrad.Error: as of psgrad.Client.push_pull.
        """
        self._check_trains()
        entered = time.monotonic()
        self._rolled_back_to = None
        with self._following_rollbacks() as step:
            self._passed(step, 0, self._steps.empty(), entered)

    def _check_samples_are_its_own(self) -> None:
        """Nobody else counts samples that were not handed out: they would be trained again."""
        if self._client.hands_out_runs and not self._client.has_taken_runs and self._progress.samples > 0:
            raise RuntimeError(
                "the chief hands out the samples (--budget=job), and this loop takes none from it: feed it from "
                "psgrad.data.Batches. torch's DistributedSampler does not know which workers there are"
            )

    def _unscale(self) -> bool:
        """If a torch.amp.GradScaler calls step(), takes off its scale. Whether it has found gradients not finite.

        It decides for this worker alone: the others' gradients count, and their scales are their own.
        """
        if "grad_scale" not in self.__dict__:
            return False
        self._steps.unscale(self.__dict__["grad_scale"])
        return bool(self.__dict__["found_inf"] > 0)

    @contextmanager
    def _scalers_attributes(self) -> Iterator[None]:
        """A GradScaler has set them, and removes them itself if step() does not raise."""
        try:
            yield
        except BaseException:
            for attribute in ("grad_scale", "found_inf"):
                self.__dict__.pop(attribute, None)
            raise

    @contextmanager
    def _following_rollbacks(self) -> Iterator[int]:
        """Gives the step that the worker is at. If the servers go back to a checkpoint in it, so does the worker."""
        step = self._progress.step
        try:
            yield step
        except WentBack:
            self._go_back(step)

    def _go_back(self, at: int) -> None:
        progress = self._progress
        while True:
            try:
                progress.renew(self._memory.weight_buffers)
                break
            except WentBack:
                continue
        self._memory.publish()
        self._learning_rate.went_back()
        if self._steps_here:
            if self._steps.open_samples > 0:
                log.warning(
                    "step %d: what this worker had learnt from %d samples since its last exchange is dropped",
                    at,
                    self._steps.open_samples,
                )
            self._wrapped.state.clear()
            self._steps = self._make_steps()
        self._await_step()
        self._rolled_back_to = progress.step
        self._say_went_back(at, progress.step)
        self._records.went_back(self._client.generation, progress.step, progress.version)
        self._step_ended = time.monotonic()

    def _say_went_back(self, at: int, to: int) -> None:
        """A plain loop is told once that what it makes is not what it would have been."""
        if self._data_rewinds:
            log.warning("step %d: went back to step %d, and so do the batches", at, to)
            return
        log.warning("step %d: went back to step %d, and goes on with the loop's next batch", at, to)
        if not self._rollback_said:
            self._rollback_said = True
            log.warning(
                "the result is not exactly that of a run without the rollback: the batches of the steps that were lost "
                "are not trained again. psgrad.data.Batches goes back by itself; another loop can look at "
                "opt.rolled_back_to after each step()"
            )

    def rejoin(self) -> None:
        """After RolledBack between two steps: joins again, and brings the checkpoint's weights.

        psgrad.data.Batches calls it.
        """
        self._check_usable()
        with self._following_rollbacks():
            self._progress.renew(self._memory.weight_buffers)

    def rewinds_data(self) -> None:
        """Whoever feeds the loop says that its batches go back as the steps do. psgrad.data.Batches calls it."""
        self._data_rewinds = True

    def expects_steps(self, steps: int) -> None:
        """This worker is done after so many steps, as far as it knows. psgrad.data.Batches says it."""
        self._client.expects_steps(steps)

    def _await_step(self) -> None:
        """Nothing is known of the coming step."""
        self._progress.samples = self._samples
        self._samples_told = self._adds_up = False

    def _passed(self, step: int, samples: int, result: psgrad.Result | None, entered: float) -> None:
        now = time.monotonic()
        self._await_step()
        began = self._steps.began
        first = began if self._step_ended < began < entered else self._step_ended
        forward_s, backward_s = first - self._step_ended, entered - first
        times = (forward_s, backward_s, now - entered)
        self._records.step(step, self._progress.version, samples, result, times)
        self._reports.step(step, samples, result, times)
        self._step_ended = now

    def set_samples(self, samples: int) -> None:
        """So many samples made the mean gradient of the coming step: a last, smaller batch, say. 0 makes it empty.

        With accumulate= or no_sync() it is told of each backward pass, and adds up. ValueError if it is not from 0 to
        2^32 - 1.
        """
        _check_whole("samples", samples, 0)
        self.start()
        adds_up = self._samples_told and (self.accumulate > 1 or self._adds_up)
        self._progress.samples = samples + (self._progress.samples if adds_up else 0)
        self._samples_told = True

    def add_passed(self, samples: int) -> None:
        """So many samples of this worker's share were left out; schedules over samples are to count them, though."""
        _check_whole("samples", samples, 0)
        self.start()
        self._progress.jumped_over += samples

    def sync_now(self) -> None:
        """In modes with local steps: ends the round, and exchanges now what is not exchanged yet.

        Where all wait for each other, for a round of theirs. Elsewhere step() leaves nothing open.
        """
        self._check_trains()
        if self._steps_here:
            with self._following_rollbacks():
                self._steps.settle()

    settle = sync_now  # Its name in earlier releases.

    @property
    def open_batches(self) -> int:
        """Steps that are not exchanged yet."""
        self.start()
        return self._steps.open_batches

    @property
    def awaits_step(self) -> bool:
        """Whether a batch's gradients wait for step(), where that pushes them."""
        self.start()
        return self._steps.awaits_step

    @property
    def round(self) -> int:
        """The number of this worker's round: where workers take steps of their own, step_number by another name."""
        return self.step_number

    @property
    def local_step(self) -> int:
        """Steps of its own that this worker has taken in this round. 0 where step() exchanges each."""
        self.start()
        return self._steps.local_step

    @contextmanager
    def global_weights(self) -> Iterator[None]:
        """In it the model has the servers' weights, for an evaluation; after it this worker's own again.

        They are those that came last; in easgd the newest are brought. Where step() exchanges each step, they are the
        model's anyway. RuntimeError in it for a step, pull() and finish().
        """
        self._check_trains()
        weights: list[torch.Tensor] | None = None
        with self._following_rollbacks():
            weights = self._steps.servers_weights()
        shown = self._steps.showing(weights) if isinstance(self._steps, LocalTraining) and weights else nullcontext()
        with shown:
            self._shows_global = True
            try:
                yield
            finally:
                self._shows_global = False

    def finish(self) -> None:
        self._check_own_weights()
        self.start()
        super().finish()

    finish.__doc__ = life.Member.finish.__doc__

    def _check_own_weights(self) -> None:
        if self._shows_global:
            raise RuntimeError("in `with opt.global_weights()` the model has the servers' weights: no step is taken")

    def _check_trains(self) -> None:
        self._check_usable()
        self._check_own_weights()

    def batches_besides(self, step: int) -> int:
        """By how many batches the rounds before this step were longer than those of --local_steps, all together.

        As far as this process has seen; shorter ones count less than 0. psgrad.data.Batches asks for it.
        """
        return sum(count for of, count in self._progress.batches_besides.items() if of < step)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes in it add to `.grad` and send nothing; one outside of it, before step(), sends the sum."""
        self._check_trains()
        self._adds_up = True
        return self._steps.no_sync()

    def pull(self) -> None:
        """Brings the newest weights, between steps; what was written to them here is gone.

        In bsp they are those that step() has brought. RuntimeError where workers have weights of their own between
        exchanges.
        """
        self._check_usable()
        self._check_own_weights()
        if self._steps_here:
            raise RuntimeError(f"pull(): in {self.mode} this worker's weights are its own until the next exchange")
        with self._following_rollbacks():
            self._progress.renew(self._memory.weight_buffers)
            self._memory.publish()

    def reduce(self, operation: str, name: str, values: list[float]) -> tuple[list[float], int]:
        """RolledBack, if the servers went back to a checkpoint: the model has its weights, and the loop goes on there.

        A loop over psgrad.data.Batches goes on with its next batch, which is that of the checkpoint's step.
        """
        self._check_usable()
        try:
            return self._client.reduce(operation, name, values, self._lets_others_go_on())
        except psgrad.RolledBack:
            self.rejoin()
        raise psgrad.RolledBack(
            f"rank {self.rank}: {name}: the job was rolled back to step {self.step_number} meanwhile: the steps since "
            "then come again, and so does this (psgrad.data.Batches goes on there: continue its loop)"
        )

    def _lets_others_go_on(self) -> Callable[[], object] | None:
        """While it waits for others that may be waiting for its contribution to a step.

        Where all make the same steps and the chief hands out the samples, an epoch ends at another step for each; so it
        does in backup, where who is late leaves steps out.
        """
        client = self._client
        differ = client.hands_out_runs or not client.exact_versions
        if not (differ and client.synchronous and client.empty_contributions):
            return None
        return None if self._steps.awaits_step or self._shows_global else self.empty_step

    def report(
        self,
        loss: float | torch.Tensor | None = None,
        accuracy: float | torch.Tensor | None = None,
        split: str | None = None,
    ) -> None:
        """Says how training gets on, for whoever watches the job: opt.report(loss=loss), before step() or after it.

        Without `split` it is the loss of a batch. With it, `opt.report(split="test", loss=0.3, accuracy=0.91)` tells of
        an evaluation of the weights that the model has; accuracy is 0 to 1. Both are also written to the metrics file,
        if there is one. A loss on a CUDA card is fetched without waiting for the card, unless there is such a file.

        Raises: TypeError for what is no number; ValueError for an accuracy without a split, or neither of the two.
        """
        self._check_usable()
        if split is not None:
            values = {"loss": loss, "accuracy": accuracy}
            self.evaluated(split, **{name: value for name, value in values.items() if value is not None})
        elif accuracy is not None or loss is None:
            raise ValueError(
                "report: the loss of a batch is report(loss=…), and an evaluation report(split='test', loss=…, "
                "accuracy=…)"
            )
        else:
            self._records.add({"loss": loss})
            self._reports.train_loss(loss)

    def record(self, **values: float | torch.Tensor) -> None:
        """Adds values to the next step's line of the metrics file: opt.record(loss=loss.item()).

        A loss is told as report() does.
        """
        self._records.add(values)
        if "loss" in values:
            self._reports.train_loss(values["loss"])

    def evaluated(self, split: str = "test", **values: float | torch.Tensor) -> None:
        """Writes an `eval` line to the metrics file: opt.evaluated(accuracy=0.91, loss=0.3). Accuracy is 0 to 1.

        Loss and accuracy are told as report() does.
        """
        self._records.evaluated(self.step_number, self.version, split, values)
        self._reports.evaluated(self.step_number, self.version, split, values)


class _Later:
    """The start of a job that waits for the first use of the model."""

    def __init__(self, model: torch.nn.Module, start: Callable[[], None], begin: Callable[[], None]) -> None:
        self.begin = begin
        self._hooks = [module.register_forward_pre_hook(lambda *_: start()) for module in model.modules()]

    def end(self) -> None:
        for handle in self._hooks:
            handle.remove()


def _refuse_many_gradients_a_step(optimizer: torch.optim.Optimizer) -> None:
    """Its step() calls the closure when it likes: each time with weights that the others do not have."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__name__}: its step(closure) computes several gradients, each on weights of its own: "
            "in a step of the job each worker has one: use an optimizer whose step() needs no closure"
        )


def _refuse_same_name(name: str | None) -> None:
    for other in life.workers_of_this_thread():
        if name is not None and other.name == name:
            raise ValueError(f"name={name!r}: another DistributedOptimizer has it already")


def _are_alike(own: torch.Tensor, jobs: torch.Tensor) -> bool:
    """They may have been rounded on their way (--weights_wire_dtype)."""
    return torch.allclose(own, jobs, rtol=2**-7, atol=1e-6, equal_nan=True)


def _refuse_second_member(server: str, job: str | None) -> None:
    """It would claim the first one's rank."""
    for other in life.live():
        if isinstance(other, DistributedOptimizer) and other._place == (server, job) and os.environ.get("PS_RANK"):
            raise RuntimeError(
                f"this process is rank {other.rank} of the job at {server} already, by another DistributedOptimizer. "
                "One trains all parameters of a model; several models have a job each: DistributedOptimizer(…, "
                "name='g'), and psrun --models=g,d"
            )


def _refuse_second(entries: Iterable[Entry]) -> None:
    """The hooks of two would both send."""
    mine = {id(entry.tensor) for entry in entries}
    for other in life.live():
        if isinstance(other, DistributedOptimizer) and any(id(entry.tensor) in mine for entry in other._entries):
            raise RuntimeError("the model is being trained by another DistributedOptimizer: call its finish() first")


def _rank_to_claim() -> dict[str, Any]:
    """What psrun, or else torchrun, says of this worker."""
    options: dict[str, Any] = {}
    name = "PS_RANK" if os.environ.get("PS_RANK") else "RANK"
    rank = os.environ.get(name)
    if rank:
        if not rank.isdecimal():
            raise ValueError(f"${name} is {rank!r}: a number from 0 is expected")
        options["rank"] = int(rank)
    return options


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r}: one of {', '.join(map(repr, choices))} is expected")


def _check_whole(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r}: a whole number is expected")
    if not least <= value <= _SAMPLES_MAX:
        raise ValueError(f"{name}={value}: a number from {least} to {_SAMPLES_MAX} is expected")
