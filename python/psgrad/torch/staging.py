"""Copies between a model's tensors on cards and the client's memory, which is the host's.

      a card                                                              the host
  gradient   ── after the computation that makes it ──▶  the client's memory for gradients, sent once it is there
  parameter  ◀─ before the computation that reads it ──  the client's weights, as they come

A card has one stream for copies, which go on beside its computation; events say what waits for what. The host waits in
three places: before it sends, before it reads what it fetched, and before it writes over what may still be copied from.
What is different on each kind of card is a Device.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

log = logging.getLogger("psgrad")

# Small gradients wait until there are so many bytes of them (in float32): each copy that is waited for costs an event.
_BATCH_BYTES = 1 << 20
# A card that has not done by then what it was given is given up.
_CARD_S = 600.0
_CLOSE_S = 5.0
# Events are looked at so often.
_POLL_S = 50e-6

Pair = tuple[torch.Tensor, torch.Tensor]  # A tensor of the model's, and float32 of its shape in the host's memory.


class Device(ABC):
    """A card. A stream does one after the other what it is given; streams do not wait for each other by themselves."""

    copies: Any  # The stream that all copies are given to.

    @abstractmethod
    def current(self) -> Any:
        """The stream that the calling thread computes on."""

    @abstractmethod
    def record(self, stream: Any) -> Any:
        """An event: it happens when the stream has done all that it was given."""

    @abstractmethod
    def wait(self, stream: Any, event: Any) -> None:
        """What the stream is given from now on begins after the event. The host goes on."""

    @abstractmethod
    def happened(self, event: Any) -> bool:
        """Whether it has."""

    @abstractmethod
    def copy_out(self, pairs: Sequence[Pair]) -> None:
        """Each tensor to the host's memory, which is to be left alone, as is the tensor, until that has happened."""

    @abstractmethod
    def copy_in(self, pairs: Sequence[Pair]) -> None:
        """The other way."""

    @abstractmethod
    def pin(self, memory: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Keeps the host's memory where it is, which copies by the card itself need. Returns what ends it.

        RuntimeError if it cannot; then copies are slower.
        """


def _cuda(device: torch.device) -> Device:
    from psgrad.torch.cuda import Cuda

    return Cuda(device)


KINDS: dict[str, Callable[[torch.device], Device]] = {"cuda": _cuda}


def device_of(tensor: torch.Tensor) -> torch.device | None:
    """The card that it is on; None: it is in the host's memory."""
    device = tensor.device
    return None if device.type == "cpu" else device


def check_device(name: str, tensor: torch.Tensor) -> None:
    """ValueError, naming the tensor, if it is where nothing can be copied from."""
    device = device_of(tensor)
    if device is None or device.type in KINDS:
        return
    if device.type == "meta":
        raise ValueError(f"{name} has no values (it is on meta): give it some first (model.to_empty(device=…))")
    raise ValueError(
        f"{name} is on {device}: psgrad.torch trains models in the host's memory and on CUDA cards (model.cpu(), "
        "model.cuda())"
    )


def page_ranges(memory: Iterable[torch.Tensor], page: int) -> list[tuple[int, int]]:
    """The whole pages that tensors of the host lie in, as addresses from and to; none is in two of them."""
    spans = sorted((each.data_ptr(), each.data_ptr() + each.numel() * each.element_size()) for each in memory)
    ranges: list[tuple[int, int]] = []
    for first, last in spans:
        begin, end = first // page * page, -(-last // page) * page
        if ranges and begin < ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(end, ranges[-1][1]))
        elif end > begin:
            ranges.append((begin, end))
    return ranges


def _await(device: Device, event: Any, what: str, timeout_s: float | None = None) -> None:
    """TimeoutError, with `what`, if the event does not happen."""
    timeout_s = _CARD_S if timeout_s is None else timeout_s
    end = time.monotonic() + timeout_s
    while not device.happened(event):
        if time.monotonic() >= end:
            raise TimeoutError(f"{what}: {device} has not done so within {timeout_s:.0f} s")
        time.sleep(_POLL_S)


class _Lane:
    """A card's copies."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.stream: Any = None  # What has computed the gradients that wait to be copied,
        self.waiting: list[tuple[int, torch.Tensor, torch.Tensor]] = []  # by index of the layout, and where to.
        self.waiting_bytes = 0
        self.arriving: list[Pair] = []  # Weights that wait to be copied.
        self.arriving_bytes = 0
        self.arrived: Any = None  # An event after the last copy from the host's memory; None: nobody needs it.

    def follow_computation(self, stream: Any = None) -> None:
        """Copies that are given from now on begin when the computation has done what it was given."""
        device = self.device
        device.wait(device.copies, device.record(device.current() if stream is None else stream))

    def copy_in(self) -> None:
        arriving, self.arriving, self.arriving_bytes = self.arriving, [], 0
        if arriving:
            self.device.copy_in(arriving)

    def end_copies_in(self) -> None:
        """What is computed from now on sees what was copied."""
        self.copy_in()
        device = self.device
        self.arrived = device.record(device.copies)
        device.wait(device.current(), self.arrived)


@dataclass(frozen=True, slots=True)
class _Sending:
    """Gradients on their way to the host's memory."""

    device: Device
    event: Any  # They are there.
    gradients: list[tuple[int, torch.Tensor, torch.Tensor]]  # Kept until then.
    where: str
    ready_at: Callable[[int, int], None]

    def send(self) -> None:
        _await(self.device, self.event, f"{self.where}: {len(self.gradients)} gradients are to be copied")
        for index, _, host in self.gradients:
            self.ready_at(index, host.data_ptr())


class _Sender:
    """A thread that has gradients sent, in the order in which they come to the host's memory."""

    def __init__(self, name: str) -> None:
        self._changed = threading.Condition()
        self._sendings: deque[_Sending] = deque()  # The first of them is being waited for.
        self._failure: BaseException | None = None
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, sending: _Sending) -> None:
        with self._changed:
            if self._failure is None:
                self._sendings.append(sending)
                self._changed.notify_all()

    def drain(self, what: str) -> None:
        """Waits until all is sent. Raises what was raised meanwhile."""
        with self._changed:
            # Each is given up after _CARD_S, and then all.
            done = self._changed.wait_for(lambda: not self._sendings or self._failure is not None, _CARD_S + _CLOSE_S)
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        if not done:
            raise TimeoutError(f"{what}: gradients have not come to the host's memory within {_CARD_S:.0f} s")

    def give_up(self, what: str) -> list[_Sending]:
        """Waits until nothing is sent. Returns what has not been, nor will be. Raises what was raised meanwhile."""
        with self._changed:
            given_up = [self._sendings.pop() for _ in range(len(self._sendings) - 1)]  # All but the one at work.
        self.drain(what)
        return given_up

    def close(self) -> None:
        """TimeoutError, if the thread does not end."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            raise TimeoutError(f"{len(self._sendings)} times gradients have not been copied within {_CLOSE_S:.0f} s")

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._sendings or self._ended)
                if not self._sendings:
                    return
                sending = self._sendings[0]
            failure: BaseException | None = None
            try:
                sending.send()
            except BaseException as error:  # It is for the thread that trains.
                failure = error
            with self._changed:
                self._sendings.popleft()
                if failure is not None:
                    self._failure = failure
                    self._sendings.clear()
                self._changed.notify_all()
            del sending, failure


_stuck: list[Staging] = []  # A card may still copy to and from their memory.


class Staging:
    """A worker's copies. Where no tensor is on a card, it has nothing to do.

    Used by the thread that trains, and by autograd's threads one at a time.
    """

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._lanes: dict[torch.device, _Lane] = {}
        self._where = worker
        self._ready_at: Callable[[int, int], None] | None = None
        self._sender: _Sender | None = None
        self._pins: list[Callable[[], None]] = []
        self._said = False
        # The memory may be freed without close(). The process's end needs nothing.
        self._unpins = weakref.finalize(self, _call_all, self._pins)
        self._unpins.atexit = False

    def pin(self, memory: Sequence[torch.Tensor], device: torch.device) -> None:
        """Speeds up copies to and from this memory of the host, which must not be mapped anew until close()."""
        if self._unpins.alive and memory:
            try:
                self._pins.append(self._lane(device).device.pin(memory))
            except RuntimeError as error:
                if not self._said:
                    log.warning("gradients and weights are copied to and from %s more slowly: %s", device, error)
                self._said = True

    # ---- To the host

    def begin(self, where: str, ready_at: Callable[[int, int], None]) -> None:
        """Gradients are to be sent by `ready_at` from now on. `where` is for what goes wrong."""
        self.end()
        self._where = where
        self._ready_at = ready_at

    def end(self) -> None:
        """What still waits to be copied, as in a step that failed, is not sent any more."""
        self._ready_at = None
        for lane in self._lanes.values():
            lane.waiting, lane.waiting_bytes = [], 0

    def send(self, index: int, gradient: torch.Tensor, host: torch.Tensor) -> None:
        """Has the gradient, which its card may still be computing, sent from the host's memory once it is there.

        Small ones wait for others, or for fetch() or drain(). Never blocks. The gradient must not change until drain().
        """
        lane = self._lane_of(gradient)
        assert lane is not None
        stream = lane.device.current()
        if lane.waiting and stream != lane.stream:
            self._flush(lane)
        lane.stream = stream
        lane.waiting.append((index, gradient, host))
        lane.waiting_bytes += host.numel() * host.element_size()
        if lane.waiting_bytes >= _BATCH_BYTES:
            self._flush(lane)

    def drain(self) -> None:
        """Waits until all gradients are sent. TimeoutError; and what the sending raised."""
        self._flush_all()
        if self._sender is not None:
            self._sender.drain(self._where)

    def give_up(self) -> None:
        """Nothing is sent any more, nor are the gradients read, or the memory that they were to be copied to written.

        TimeoutError; and what the sending raised.
        """
        self.end()
        if self._sender is not None:
            for sending in self._sender.give_up(self._where):
                _await(sending.device, sending.event, f"{sending.where}: copies are to end, which are not to be sent")

    def fetch(self, pairs: Iterable[Pair]) -> None:
        """Copies the tensors' values to the host's memory, and waits until they are there."""
        by_lane: dict[_Lane, list[Pair]] = {}
        for tensor, host in pairs:
            lane = self._lane_of(tensor)
            if lane is None:
                host.copy_(tensor)
            else:
                by_lane.setdefault(lane, []).append((tensor, host))
        events = []
        self._flush_all()
        for lane, some in by_lane.items():
            lane.follow_computation()
            lane.device.copy_out(some)
            events.append((lane.device, lane.device.record(lane.device.copies)))
        for device, event in events:
            _await(device, event, f"{self._worker}: tensors are to be copied to the host")

    # ---- To the cards

    def put(self, pairs: Iterable[Pair]) -> None:
        """Copies the host's values to the tensors, as `pairs` comes to name them.

        The host does not wait for the cards. What is computed afterwards sees the new values; until settle() the host's
        memory must not be written.
        """
        begun: dict[_Lane, None] = {}
        try:
            for tensor, host in pairs:
                lane = self._lane_of(tensor)
                if lane is None:
                    tensor.copy_(host)
                    continue
                if lane not in begun:
                    begun[lane] = None
                    lane.follow_computation()  # It may still read the old values.
                lane.arriving.append((tensor, host))
                lane.arriving_bytes += host.numel() * host.element_size()
                if lane.arriving_bytes >= _BATCH_BYTES:
                    lane.copy_in()
        finally:
            for lane in begun:
                lane.end_copies_in()

    def settle(self) -> None:
        """Waits until nothing is copied from the host's memory any more."""
        for lane in self._lanes.values():
            if lane.arrived is not None:
                _await(lane.device, lane.arrived, f"{self._worker}: weights are to be copied from the host")
                lane.arrived = None

    def close(self) -> None:
        """Nothing is copied any more afterwards. Never raises: memory that a card may still copy is kept, and named."""
        if not self._unpins.alive:
            return
        self.end()
        sender, self._sender = self._sender, None
        try:
            if sender is not None:
                sender.close()
            for lane in self._lanes.values():
                _await(lane.device, lane.device.record(lane.device.copies), "the last copies are to end", _CLOSE_S)
        except (RuntimeError, TimeoutError) as error:  # CUDA's errors are of the former class.
            self._unpins.detach()
            _stuck.append(self)
            log.warning("%s: memory of gradients and weights is not freed: %s", self._worker, error)
            return
        self._unpins()

    def _flush_all(self) -> None:
        for lane in self._lanes.values():
            if lane.waiting:
                self._flush(lane)

    def _flush(self, lane: _Lane) -> None:
        waiting, lane.waiting, lane.waiting_bytes = lane.waiting, [], 0
        assert self._ready_at is not None
        device = lane.device
        lane.follow_computation(lane.stream)
        device.copy_out([(gradient, host) for _, gradient, host in waiting])
        if self._sender is None:
            self._sender = _Sender(f"psgrad: gradients of {self._worker}")
        self._sender.put(_Sending(device, device.record(device.copies), waiting, self._where, self._ready_at))

    def _lane_of(self, tensor: torch.Tensor) -> _Lane | None:
        device = device_of(tensor)
        return None if device is None else self._lane(device)

    def _lane(self, device: torch.device) -> _Lane:
        lane = self._lanes.get(device)
        if lane is None:
            lane = self._lanes[device] = _Lane(KINDS[device.type](device))
        return lane


def _call_all(functions: list[Callable[[], None]]) -> None:
    for function in functions:
        function()
    functions.clear()
