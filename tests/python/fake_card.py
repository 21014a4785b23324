"""Cards without a card: their tensors are the host's, and what a stream may do late is done late.

A copy is done once something waits for it, or before, as a seed says. Until then its target holds POISON. Computation
is the host's own, and done at once. So that a copy which does not wait for it is noticed, the test says when something
is computed (`computes`): a copy that did not wait for all of that leaves POISON where it copies to. A copy to a card
that does not wait for what may still read the old value, and one whose source is written over before the host knows
that it is done, are noted in `faults`.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from torch_support import psgrad  # noqa: F401  (a stub, where psgrad is not built)

from psgrad.torch import staging  # isort: skip

POISON = 12345.0


@dataclass(eq=False)
class Stream:
    given: int = 0  # So many things,
    knows: int = 0  # after so many of the other stream's.
    copies: list[Copy] = field(default_factory=list)  # Those of them that are not done.


@dataclass
class Copy:
    number: int  # In its stream.
    source: torch.Tensor
    target: torch.Tensor
    sound: bool  # It began after what made its source.


@dataclass(frozen=True)
class Event:
    stream: Stream
    at: int


class Cards:
    """All cards of a test. `on_cards` says which tensors are on them."""

    def __init__(self, seed: int = 0, eager: float = 0.2) -> None:
        self.random = random.Random(seed)
        self.eager = eager  # How often something is done though nobody waits for it.
        self.lock = threading.RLock()
        self.cards: list[Card] = []
        self.faults: list[str] = []
        self.pinned: list[int] = []  # Addresses.
        self.asked: list[int] = []  # The threads that have asked whether an event happened.
        self.stuck = False  # No event happens.

    def make(self, device: torch.device) -> Card:
        with self.lock:
            card = Card(self, device)
            self.cards.append(card)
            return card

    def computes(self, *_: Any) -> None:
        """This thread's worker has made or read something on its cards."""
        with self.lock:
            for card in self.cards:
                card.computation.given += card.thread == threading.get_ident()

    def check(self) -> None:
        """AssertionError, if a copy was not waited for."""
        with self.lock:
            for card in self.cards:
                card.look()
        assert not self.faults, self.faults

    def release(self, memory: Sequence[torch.Tensor]) -> None:
        for each in memory:
            self.pinned.remove(each.data_ptr())


class Card(staging.Device):
    """One card, of the worker that this thread is."""

    def __init__(self, cards: Cards, device: torch.device) -> None:
        self.cards = cards
        self.device = device
        self.thread = threading.get_ident()
        self.batches: list[int] = []  # How many gradients, or the like, were copied to the host at a time.
        self.copies: Stream = Stream()
        self.computation = Stream()
        self.reading: list[tuple[int, torch.Tensor, torch.Tensor]] = []  # Copies in that the host may not know done.

    def __str__(self) -> str:
        return str(self.device)

    def current(self) -> Stream:
        return self.computation

    def record(self, stream: Stream) -> Event:
        with self.cards.lock:
            self._something()
            if stream is self.copies:
                stream.given += 1
            return Event(stream, stream.given)

    def wait(self, stream: Stream, event: Event) -> None:
        with self.cards.lock:
            stream.knows = max(stream.knows, event.at if event.stream is not stream else 0)
            if event.stream is self.copies:
                self._do(event.at)  # What is computed is computed at once, so what it waits for has to be done.
            self._something()

    def happened(self, event: Event) -> bool:
        with self.cards.lock:
            self.cards.asked.append(threading.get_ident())
            if self.cards.stuck or self.cards.random.random() < 0.5:
                return False
            if event.stream is self.copies:
                self._do(event.at)
                self.look()
                self.reading = [each for each in self.reading if each[0] > event.at]
            return True

    def copy_out(self, pairs: Sequence[staging.Pair]) -> None:
        with self.cards.lock:
            self.batches.append(len(pairs))
            for tensor, host in pairs:
                # The stream reads what it has to read of the old value before.
                self._do(max((each[0] for each in self.reading if each[1] is host), default=0))
                self.look()
                self.reading = [each for each in self.reading if each[1] is not host]
                self._give(tensor, host)

    def copy_in(self, pairs: Sequence[staging.Pair]) -> None:
        with self.cards.lock:
            for tensor, host in pairs:
                if self.copies.knows < self.computation.given:
                    self.cards.faults.append(f"{self}: a copy in does not wait for what may read the old value")
                self._give(host, tensor)
                self.reading.append((self.copies.given, host, host.clone()))

    def pin(self, memory: Sequence[torch.Tensor]) -> Callable[[], None]:
        self.cards.pinned.extend(each.data_ptr() for each in memory)
        return lambda: self.cards.release(memory)

    def look(self) -> None:
        """Notes what was written over while it may have been copied."""
        for at, host, before in self.reading:
            if not torch.equal(host, before):
                self.cards.faults.append(f"{self}: memory was written before copy {at} from it was done")
        self.reading = [each for each in self.reading if torch.equal(each[1], each[2])]

    def _give(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.look()
        self.copies.given += 1
        sound = self.copies.knows >= self.computation.given
        target.data.fill_(POISON)
        self.copies.copies.append(Copy(self.copies.given, source, target, sound))

    def _something(self) -> None:
        """Sometimes copies go on by themselves."""
        if self.cards.random.random() < self.cards.eager:
            self._do(min((copy.number for copy in self.copies.copies), default=0) + self.cards.random.randrange(3))

    def _do(self, to: int) -> None:
        stream = self.copies
        ready = [copy for copy in stream.copies if copy.number <= to]
        stream.copies = [copy for copy in stream.copies if copy.number > to]
        for copy in ready:
            if copy.sound:
                copy.target.data.copy_(copy.source.data)


@contextmanager
def on_cards(
    monkeypatch: pytest.MonkeyPatch,
    cards: Cards,
    where: Callable[[torch.Tensor], int | None] = lambda tensor: 0,
) -> Iterator[Cards]:
    """Within it, models' tensors are on fake cards: on the one whose number `where` says, or, with None, on none."""

    def device_of(tensor: torch.Tensor) -> torch.device | None:
        number = where(tensor)
        return None if number is None else torch.device("cuda", number)

    for module in ("staging", "tensors"):
        monkeypatch.setattr(f"psgrad.torch.{module}.device_of", device_of)
    monkeypatch.setitem(staging.KINDS, "cuda", cards.make)
    yield cards
    cards.check()


def watch(model: torch.nn.Module, cards: Cards) -> None:
    """Tells the cards when the model computes. Before DistributedOptimizer is made, whose hooks are to come later."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(cards.computes)
    model.register_forward_hook(lambda *_: cards.computes())
