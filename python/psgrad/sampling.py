"""Which samples are in which step: the same as the C++ worker's, computed from (seed, epoch)."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

_SAMPLES_MAX = 2**31 - 1
_MASK = 2**64 - 1


# ---- Drawing, as in common/random.h


def _mix_bits(value: int) -> int:
    """SplitMix64."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _mersenne_twister_64(seed: int) -> Iterator[list[int]]:
    """The numbers of std::mt19937_64, in blocks of 312."""
    state = [seed]
    for i in range(1, 312):
        state.append((6364136223846793005 * (state[-1] ^ (state[-1] >> 62)) + i) & _MASK)

    def twist(high: list[int], low: list[int], other: list[int]) -> list[int]:
        mixed = [(h & 0xFFFFFFFF80000000) | (x & 0x7FFFFFFF) for h, x in zip(high, low, strict=True)]
        return [o ^ (m >> 1) ^ (0xB5026F5AA96619E9 if m & 1 else 0) for o, m in zip(other, mixed, strict=True)]

    while True:
        first = twist(state[:156], state[1:157], state[156:])
        state = first + twist(state[156:], [*state[157:], first[0]], first)
        numbers = [x ^ ((x >> 29) & 0x5555555555555555) for x in state]
        numbers = [x ^ ((x << 17) & 0x71D67FFFEDA60000) for x in numbers]
        numbers = [x ^ ((x << 37) & 0xFFF7EEE000000000) for x in numbers]
        yield [x ^ (x >> 43) for x in numbers]


def permutation(samples: int, seed: int, epoch: int) -> array[int]:
    """The order of the samples in an epoch: that of the C++ worker. A million samples take a second or two."""
    order = array("i", range(samples))
    i = samples  # So many are still to be placed.
    for numbers in _mersenne_twister_64(_mix_bits(_mix_bits(seed) ^ epoch)):
        for number in numbers:
            if i <= 1:
                return order
            product = number * i
            # Some of the few products below would make their numbers more likely than others.
            if (product & _MASK) < i and (product & _MASK) < (2**64 - i) % i:
                continue
            i -= 1
            chosen = product >> 64
            order[i], order[chosen] = order[chosen], order[i]
    raise AssertionError("the numbers never end")


# ---- Shares, as in worker/data/sampler.h


@dataclass(frozen=True)
class Plan:
    """One step's share of one rank."""

    epoch: int
    epoch_step: int  # Below steps_per_epoch.
    indices: list[int]  # This rank's samples. Empty if the epoch's last batch leaves it none.


class Sampler:
    """Which samples each step of a rank uses. A pure function of its arguments: no two workers need to talk to agree.

    batch_size: this rank's samples of a step; "full": a rank's part of all samples.
    Keeps the permutation of one epoch, so steps are cheap in order.
    """

    def __init__(
        self,
        samples: int,
        *,
        num_workers: int,
        rank: int,
        batch_size: int | Literal["full"],
        seed: int = 1,
        shuffle: bool = True,
    ) -> None:
        if not 1 <= samples <= _SAMPLES_MAX:
            raise ValueError(f"the data set has {samples} samples; expected 1 to {_SAMPLES_MAX}")
        if batch_size != "full" and not (isinstance(batch_size, int) and 1 <= batch_size <= _SAMPLES_MAX):
            raise ValueError(f"batch_size is {batch_size!r}; expected 1 to {_SAMPLES_MAX}, or 'full'")
        if not 0 <= rank < num_workers:
            raise ValueError(f"rank is {rank} of {num_workers}")
        if not 0 <= seed <= _MASK:
            raise ValueError(f"seed is {seed}; expected 0 to 2**64 - 1")
        self.samples = samples
        self.batch_size = -(-samples // num_workers) if batch_size == "full" else batch_size
        self._rank = rank
        self._global_batch = num_workers * self.batch_size
        self.steps_per_epoch = -(-samples // self._global_batch)
        self._seed = seed
        self._shuffle = shuffle
        self._permuted_epoch = -1
        self._permutation: Sequence[int] = range(samples)  # File order, where it does not shuffle.

    def plan(self, step: int) -> Plan:
        """`step` counts from 0 over all epochs."""
        epoch, epoch_step = divmod(step, self.steps_per_epoch)
        begin, end = self._share(epoch_step)
        if begin < end and self._shuffle and epoch != self._permuted_epoch:
            self._permutation = permutation(self.samples, self._seed, epoch)
            self._permuted_epoch = epoch
        return Plan(epoch, epoch_step, list(self._permutation[begin:end]))

    def samples_of(self, step: int) -> int:
        begin, end = self._share(step % self.steps_per_epoch)
        return end - begin

    def _share(self, epoch_step: int) -> tuple[int, int]:
        start = epoch_step * self._global_batch
        global_end = min(start + self._global_batch, self.samples)
        begin = min(start + self._rank * self.batch_size, global_end)
        return begin, min(begin + self.batch_size, global_end)


def budget_of(epochs: float, batches_per_epoch: int) -> int:
    """Batches of so many epochs; at least 1."""
    return max(1, math.floor(epochs * batches_per_epoch + 0.5))
