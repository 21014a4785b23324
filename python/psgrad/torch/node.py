"""NodeOptimizer: the processes of a node, which average their gradients by themselves, as one worker of a job."""

from __future__ import annotations

import builtins
import json
import logging
import os
import secrets
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo

import psgrad
from psgrad.torch import life
from psgrad.torch.optimizer import DistributedOptimizer, WrappingOptimizer
from psgrad.torch.tensors import _bump, _is_counter, _persistent_buffers

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger("psgrad")

_MESSAGE_BYTES_MAX = 16384
_REASON_MAX = 4000  # Characters, of which JSON makes up to 6 bytes each, but seldom.
_CONNECT_S = 60.0
# A process that fails gives the node's worker so long to tell the servers why.
_LEAVES_S = 10.0
# Tensors from this size on are sent as they are, smaller ones together.
_ALONE_BYTES = 1 << 20
_STATE = ("rank", "num_workers", "mode", "step_number", "version", "dropped", "skipped", "rollbacks", "rolled_back_to")


class NodeOptimizer(WrappingOptimizer):
    """Trains a DistributedDataParallel with the other nodes of a job: a node is one worker, however many processes.

        model = torch.nn.parallel.DistributedDataParallel(model)
        opt = psgrad.torch.NodeOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)

    Each process of the model's process group makes one. After `backward()` all have the mean gradient of the node.
    Process 0 of the group has a DistributedOptimizer over `model.module`, with overlap="none" (gradients are means only
    when backward has ended); `step()` in it exchanges with the servers, and hands the weights that come to the node's
    others. These have no connection to the servers.

    What changes weights is to be called by all processes of the node, in the same order: making it, `step()`,
    `empty_step()`, `pull()` and `finish()`. They return with the same weights, BatchNorm's statistics included (unless
    buffers="local"), and what such a call raises in process 0 it raises in all. A process that ends by an exception
    tells process 0, which leaves the job with that as its reason, and raises where it is; one that is killed is noticed
    by its connection. A process whose process 0 is gone raises.

    Args:
        optimizer: as of DistributedOptimizer. Process 0's counts: of the others' only the groups are looked at.
        model: the DistributedDataParallel, which holds the optimizer's parameters.
        timeout_s: process 0 is waited for so long until it comes to the same call. From then on it is waited for as
            long as it lives, as it has deadlines of its own for the servers.
        options: all others are DistributedOptimizer's, but overlap and start. `samples` are the node's.

    Raises: as DistributedOptimizer. TimeoutError: process 0 did not come to this call. RuntimeError: it is gone, or
        came to another one; another process of the node has failed.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.parallel.DistributedDataParallel,
        *,
        timeout_s: float = 1800.0,
        **options: Any,
    ) -> None:
        if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
            raise TypeError(f"model: a DistributedDataParallel is expected, not {type(model).__name__}")
        if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, WrappingOptimizer):
            raise TypeError(f"optimizer: one of torch.optim is expected, not {type(optimizer).__name__}")
        if options.get("start", "now") != "now":
            raise TypeError("start: the node's processes begin with process 0's weights at once")
        if "overlap" in options:
            raise TypeError('overlap: gradients are the node\'s mean after backward() only; it is always "none" here')
        super().__init__(optimizer)
        self._group = model.process_group
        self._process = dist.get_rank(self._group)
        self._processes = dist.get_world_size(self._group)
        self._pid = os.getpid()
        self._ended = ""
        self._state: dict[str, Any] = {}
        self._inner: DistributedOptimizer | None = None
        self._weights = _Weights(model.module, optimizer, self._group, with_buffers=options.get("buffers") != "local")
        self._channel = _channel(self._group, timeout_s)
        life.watch(self)
        try:
            self._together("NodeOptimizer", lambda: self._join(optimizer, model.module, options))
        except BaseException as error:
            self.leave(life.reason_of(type(error), error))
            raise

    def _join(self, optimizer: torch.optim.Optimizer, module: torch.nn.Module, options: dict[str, Any]) -> None:
        """In process 0."""
        inner = DistributedOptimizer(optimizer, module, overlap="none", **options)
        self._inner = inner
        if inner.client.hands_out_runs:
            raise ValueError(
                "the chief hands out the samples (--budget=job), to each worker: a node's processes cannot share them"
            )
        self._steps_here = inner._steps_here
        assert isinstance(self._channel, _Hub)
        self._channel.watch(inner.client)

    # ---- What it is

    @property
    def rank(self) -> int:
        """This node's number in the job, from 0."""
        return int(self._state["rank"])

    @property
    def num_workers(self) -> int:
        """How many nodes the job has when it starts."""
        return int(self._state["num_workers"])

    @property
    def replica(self) -> int:
        """This process's number among those of all nodes, where each node has as many: a sampler's `rank`."""
        return self.rank * self._processes + self._process

    @property
    def num_replicas(self) -> int:
        """The processes of all nodes, where each node has as many as this one: a sampler's `num_replicas`."""
        return self.num_workers * self._processes

    @property
    def lead(self) -> bool:
        """Whether this is process 0 of the lowest live node: the one to print, evaluate and save."""
        return self._inner is not None and self._inner.lead

    @property
    def mode(self) -> str:
        """As of DistributedOptimizer; so are the following, which are process 0's after the last call of all."""
        return str(self._state["mode"])

    @property
    def step_number(self) -> int:
        return int(self._state["step_number"])

    @property
    def version(self) -> int:
        return int(self._state["version"])

    @property
    def dropped(self) -> int:
        return int(self._state["dropped"])

    @property
    def skipped(self) -> int:
        return int(self._state["skipped"])

    @property
    def rollbacks(self) -> int:
        return int(self._state["rollbacks"])

    @property
    def rolled_back_to(self) -> int | None:
        step = self._state["rolled_back_to"]
        return None if step is None else int(step)

    # ---- Training

    @_disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As DistributedOptimizer.step, in all processes of the node. `closure` is called in each."""
        scaler: dict[str, Any] = {
            name: self.__dict__[name] for name in ("grad_scale", "found_inf") if name in self.__dict__
        }
        self._wrapped._opt_called = True  # type: ignore[attr-defined]  # For a scheduler of the wrapped optimizer.
        try:
            loss = None
            if closure is not None:
                if scaler:
                    raise RuntimeError(
                        "step(closure): GradScaler takes no closure; call it first, and then scaler.step(opt)"
                    )
                with torch.enable_grad():
                    loss = closure()
            self._together("step", lambda: self._step(scaler))
            return loss
        except BaseException:
            for name in scaler:
                self.__dict__.pop(name, None)
            raise

    def _step(self, scaler: dict[str, Any]) -> None:
        assert self._inner is not None
        self._inner.__dict__.update(scaler)
        try:
            self._inner.step()
        finally:
            for name in scaler:
                self._inner.__dict__.pop(name, None)

    def empty_step(self) -> None:
        """As of DistributedOptimizer: the node has no samples for this step."""
        self._together("empty_step", lambda: self._worker().empty_step())

    def pull(self) -> None:
        """As of DistributedOptimizer."""
        self._together("pull", lambda: self._worker().pull())

    def set_samples(self, samples: int) -> None:
        """As of DistributedOptimizer, of all the node's samples of the step; what process 0 says counts."""
        if self._inner is not None:
            self._inner.set_samples(samples)

    def report(
        self,
        loss: float | torch.Tensor | None = None,
        accuracy: float | torch.Tensor | None = None,
        split: str | None = None,
    ) -> None:
        """As of DistributedOptimizer; what process 0 says counts."""
        if self._inner is not None:
            self._inner.report(loss, accuracy, split)

    def record(self, **values: float | torch.Tensor) -> None:
        """As of DistributedOptimizer; what process 0 says counts."""
        if self._inner is not None:
            self._inner.record(**values)

    def evaluated(self, split: str = "test", **values: float | torch.Tensor) -> None:
        """As of DistributedOptimizer; what process 0 says counts."""
        if self._inner is not None:
            self._inner.evaluated(split, **values)

    @contextmanager
    def idle(self, what: str = "evaluating") -> Iterator[None]:
        """As of DistributedOptimizer; what process 0 says counts."""
        if self._inner is None:
            yield
            return
        with self._inner.idle(what):
            yield

    def _worker(self) -> DistributedOptimizer:
        assert self._inner is not None
        return self._inner

    def _together(self, what: str, act: Callable[[], None]) -> None:
        """Process 0 acts, and all have its weights and state, or raise what it raises."""
        if self._ended:
            raise RuntimeError(self._ended)
        if isinstance(self._channel, _Hub):
            self._act(self._channel, what, act)
        else:
            self._follow(self._channel, what)

    def _act(self, hub: _Hub, what: str, act: Callable[[], None]) -> None:
        hub.check()
        hub.tell({"begins": what})
        try:
            act()
        except BaseException as error:
            hub.check(error)  # Why a wait was cancelled.
            self._note_state()
            has_weights = isinstance(error, psgrad.RolledBack)
            hub.tell({"ends": what, "state": self._state, "raises": _described(error), "weights": has_weights})
            if has_weights:
                self._weights.send()
            raise
        self._note_state()
        hub.tell({"ends": what, "state": self._state, "raises": None, "weights": True})
        self._weights.send()

    def _follow(self, link: _Link, what: str) -> None:
        link.expect("begins", what, bounded=True)
        ended = link.expect("ends", what, bounded=False)
        self._state = ended["state"]
        if ended["weights"]:
            self._weights.receive()
        if ended["raises"] is not None:
            raise _as_here(*ended["raises"])

    def _note_state(self) -> None:
        if self._inner is not None and hasattr(self._inner, "_progress"):
            self._state = {name: getattr(self._inner, name) for name in _STATE}

    def _servers_state(self) -> dict[int, dict[str, Any]]:
        if self._inner is None:
            raise RuntimeError("state_dict(full=True): process 0 of a node fetches the servers' state: call it there")
        return self._inner._servers_state()

    # ---- Ending

    def finish(self) -> None:
        """As of DistributedOptimizer: the node has no more batches. All its processes then have the last weights.

        To be called before destroy_process_group(). It is called by `with opt:` and at the interpreter's exit.
        """
        if self._ended or os.getpid() != self._pid:
            return
        if not dist.is_initialized():
            log.warning(
                "the process group was destroyed before finish(): this process keeps the weights of its last step"
            )
            if self._inner is not None:
                self._inner.finish()
        else:
            try:
                self._together("finish", lambda: self._worker().finish())
            except psgrad.RolledBack:
                raise
            except BaseException as error:
                self.leave(life.reason_of(type(error), error))
                raise
        self._end("finish() was called: this node has left the job")

    def leave(self, reason: str) -> None:
        """The node leaves the job at once, for this reason, whichever of its processes says so. Never raises."""
        if self._ended or os.getpid() != self._pid:
            return
        if self._inner is not None:
            self._inner.leave(reason)
        self._channel.fail(reason)
        self._end(f"this node has left the job: {reason}")

    def _end(self, why: str) -> None:
        self._ended = why
        self._channel.close()
        life.unwatch(self)

    def forked(self) -> None:
        """In a child of the process: the connections belong to the parent."""
        self._ended = f"this process was forked from the worker's (pid {self._pid}), which alone can train"
        self._channel.close_here()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if value is None or life.ends_well(value):
            try:
                self.finish()
            except psgrad.RolledBack as error:
                self.leave(life.reason_of(type(error), error))
                raise
        else:
            self.leave(life.reason_of(type(value), value))


def _described(error: BaseException) -> tuple[str, str]:
    return type(error).__name__, str(error)[:_REASON_MAX]


def _as_here(kind: str, text: str) -> Exception:
    """What process 0 has raised, as an exception of the same class where that is psgrad's or Python's own."""
    found = getattr(psgrad, kind, None) or getattr(builtins, kind, None)
    text = f"process 0 of this node: {text}"
    if isinstance(found, type) and issubclass(found, Exception):
        with suppress(TypeError):  # Some want more than a text.
            return found(text)
    return RuntimeError(f"{kind}: {text}")


class _Weights:
    """Brings process 0's weights to the others, through their process group."""

    def __init__(
        self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, group: Any, *, with_buffers: bool
    ) -> None:
        stepped = {id(tensor) for each in optimizer.param_groups for tensor in each["params"] if tensor.requires_grad}
        self._group = group
        self._source = dist.get_global_rank(group, 0)
        self._all: list[torch.Tensor] | None = list(module.parameters())  # For the first time, None afterwards.
        self._parameters = [parameter for parameter in module.parameters() if id(parameter) in stepped]
        self._buffers = [
            (place, (buffer.is_floating_point() or _is_counter(buffer)) and with_buffers)
            for _, buffer, place in _persistent_buffers(module)
        ]

    def send(self) -> None:
        alone, together = self._divided()
        flat = [torch.cat([tensor.reshape(-1) for tensor in tensors]) for tensors in together]
        self._broadcast([*alone, *flat])

    def receive(self) -> None:
        alone, together = self._divided()
        flat = [
            torch.empty(sum(tensor.numel() for tensor in tensors), dtype=tensors[0].dtype, device=tensors[0].device)
            for tensors in together
        ]
        self._broadcast([*alone, *flat])
        for tensors, values in zip(together, flat, strict=True):
            pieces = torch.split(values, [tensor.numel() for tensor in tensors])
            for tensor, piece in zip(tensors, pieces, strict=True):
                tensor.copy_(piece.view(tensor.shape))
        # A backward pass through them would be computed on the wrong weights, silently; so it raises.
        _bump(list(self._parameters))

    def _divided(self) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
        """Large tensors, and lists of small ones of one type and device. All processes have the same."""
        first, self._all = self._all, None
        tensors: list[torch.Tensor] = list(self._parameters if first is None else first)
        for (module, name), follows in self._buffers:
            buffer = module._buffers.get(name)
            if buffer is not None and (follows or first is not None):
                tensors.append(buffer)
        alone: list[torch.Tensor] = []
        together: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for tensor in tensors:
            data = tensor.data  # It has a version counter of its own: process 0's weights do not count as written to.
            if data.nbytes >= _ALONE_BYTES and data.is_contiguous():
                alone.append(data)
            elif data.numel() > 0:
                together.setdefault((data.dtype, data.device), []).append(data)
        return alone, list(together.values())

    def _broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        works = [dist.broadcast(tensor, self._source, group=self._group, async_op=True) for tensor in tensors]
        for work in works:
            if work is not None:  # None: this process is not in the group.
                work.wait()


# ---- Between the processes of a node
#
# The process group has no word for "process 2 has failed, for this reason", and its waits end after minutes that are
# counted while servers are waited for as well. So each process has a connection to process 0, which knows at once when
# the other end is gone.


def _channel(group: Any, timeout_s: float) -> _Hub | _Link:
    """The process's connections. All processes of the group call it together."""
    source = dist.get_global_rank(group, 0)
    if dist.get_rank(group) > 0:
        names: list[Any] = [None]
        dist.broadcast_object_list(names, source, group=group)
        return _Link(names[0], dist.get_rank(group), timeout_s)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        name = f"psgrad-node-{secrets.token_hex(16)}"
        listener.bind(f"\0{name}")  # In Linux's abstract space: no file to clean up.
        listener.listen(dist.get_world_size(group))
        dist.broadcast_object_list([name], source, group=group)
        return _Hub(listener, dist.get_world_size(group) - 1)


def _read(connection: socket.socket) -> dict[str, Any] | None:
    """None: the other end is gone."""
    try:
        message = connection.recv(_MESSAGE_BYTES_MAX * 2)
    except ConnectionError:
        return None
    return json.loads(message) if message else None


def _write(connection: socket.socket, message: dict[str, Any]) -> None:
    """Whoever waits for what is gone will know by itself."""
    with suppress(OSError):
        connection.send(json.dumps(message).encode())


class _Link:
    """The connection of a process to process 0."""

    def __init__(self, name: str, process: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(_CONNECT_S)
        try:
            self._socket.connect(f"\0{name}")
        except OSError as error:
            self._socket.close()
            raise RuntimeError(
                f"process {process} cannot connect to process 0 of its group ({error}): are they on one machine? The "
                "processes of a DistributedDataParallel that NodeOptimizer trains must be"
            ) from None
        _write(self._socket, {"process": process})

    def expect(self, key: str, what: str, *, bounded: bool) -> dict[str, Any]:
        """Process 0's next message. RuntimeError if it is gone, has failed, or is in another call."""
        self._socket.settimeout(self._timeout_s if bounded else None)
        try:
            message = _read(self._socket)
        except TimeoutError:
            raise TimeoutError(
                f"{what}(): process 0 of this node has not come to it within {self._timeout_s:g} s"
            ) from None
        if message is None:
            raise RuntimeError(f"{what}(): process 0 of this node is gone")
        if "failed" in message:
            raise RuntimeError(f"{what}(): this node has failed: {message['failed']}")
        if message.get(key) != what:
            raise RuntimeError(
                f"{what}(): process 0 of this node is in {message.get('begins') or message.get('ends')}(): all "
                "processes of a node must make the same calls"
            )
        return message

    def fail(self, reason: str) -> None:
        """Tells process 0, and waits until it has left the job, or is gone."""
        _write(self._socket, {"failed": reason[:_REASON_MAX]})
        self._socket.settimeout(_LEAVES_S)
        with suppress(OSError):
            while (message := _read(self._socket)) is not None and "left" not in message:
                pass

    def close(self) -> None:
        """This process has ended well, or has told how it has not."""
        _write(self._socket, {"done": True})
        self._socket.close()

    def close_here(self) -> None:
        self._socket.close()


class _Hub:
    """Process 0's connections to the others, and a thread that reads them."""

    def __init__(self, listener: socket.socket, others: int) -> None:
        self._connections: dict[int, socket.socket] = {}
        self._failure = ""
        self._left = threading.Event()
        self._client: psgrad.Client | None = None
        self._closed = False
        listener.settimeout(_CONNECT_S)
        while len(self._connections) < others:
            try:
                connection, _ = listener.accept()
                connection.settimeout(_CONNECT_S)
                self._greet(connection)
            except TimeoutError:
                raise TimeoutError(
                    f"{others - len(self._connections)} of {others} other processes of this node have not come within "
                    f"{_CONNECT_S:g} s"
                ) from None
        self._wake, self._wakes = os.pipe()
        self._thread = threading.Thread(target=self._read, name="psgrad node", daemon=True)
        self._thread.start()

    def _greet(self, connection: socket.socket) -> None:
        """Takes only processes of the same user, which know the name."""
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _, user, _ = struct.unpack("3i", credentials)
        message = _read(connection) if user == os.getuid() else None
        if message is None or "process" not in message:
            connection.close()
            return
        connection.settimeout(None)
        self._connections[int(message["process"])] = connection

    def watch(self, client: psgrad.Client) -> None:
        """The job that is to be left when a process fails."""
        self._client = client
        self.check()

    def check(self, error: BaseException | None = None) -> None:
        """RuntimeError if a process of the node has failed."""
        if self._failure:
            raise RuntimeError(self._failure) from error

    def tell(self, message: dict[str, Any]) -> None:
        for connection in self._connections.values():
            _write(connection, message)

    def fail(self, reason: str) -> None:
        if self._failure:
            self._left.wait(_LEAVES_S)  # The thread tells the servers, and the others.
        else:
            self.tell({"failed": f"process 0: {reason[:_REASON_MAX]}"})

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        os.write(self._wakes, b"x")
        self._thread.join()
        self.close_here()

    def close_here(self) -> None:
        for connection in self._connections.values():
            connection.close()
        for end in (self._wake, self._wakes):
            os.close(end)

    def _read(self) -> None:
        by_number = {connection.fileno(): process for process, connection in self._connections.items()}
        poll = select.poll()
        for number in (*by_number, self._wake):
            poll.register(number, select.POLLIN)
        while not self._closed:
            for number, _ in poll.poll():
                if number == self._wake:
                    return
                process = by_number[number]
                message = _read(self._connections[process])
                if message is not None and "done" in message:
                    poll.unregister(number)
                elif message is None:
                    poll.unregister(number)
                    self._failed(f"process {process} of this node ended")
                elif "failed" in message:
                    self._failed(f"process {process} of this node: {message['failed']}")
                    _write(self._connections[process], {"left": True})

    def _failed(self, reason: str) -> None:
        if self._failure or self._closed:
            return
        self._failure = reason
        if self._client is not None:
            self._client.stop()
            try:
                self._client.leave(reason)
            except Exception as error:  # The job may be gone by now.
                log.debug("leave: %s", error)
        self._left.set()
        self.tell({"failed": reason})
