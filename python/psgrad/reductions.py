"""Numbers of all workers: a metric, or a flag that ends the training."""

from __future__ import annotations

import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any


class Reductions(ABC):
    """What a client and an optimizer have of them. Where the numbers go is the subclass's to say.

    All workers that are not done have to make the same calls in the same order, with values of the same number and the
    same ``name``: the last one ends the others' wait. They are added up, in double, in the order of the ranks, so each
    worker gets the same, bit for bit, and can decide by it. A worker that is lost, leaves or is done is not waited for
    any more, and what it had brought does not count. Where workers come and go, a newcomer takes part once it has made
    a step by itself; in modes in which ranks go on by themselves, from its first call on.

    ``x`` is a number, which gives a float; a sequence of numbers, which gives a list of floats; or a tensor or array
    (torch's, on any device, or NumPy's), which gives another one like it, of float64 if it is not of floats (whole
    numbers are exact up to 2^53). At most 4096 numbers. NaN and infinity are
    numbers like others: the mean with a NaN is NaN, and so are the smallest and the largest. ``name`` is what messages
    call it: "all_mean 'accuracy': waiting for rank 1 …".

    Raises:
        Refused: another worker has brought something else; the text names both.
        RolledBack: the servers went back to a checkpoint meanwhile; the steps since then, and this call, come again.
        ValueError, TypeError: too many values, a name that is too long, or what is not a number.
        Error: what ends any wait (JobFailed, Cancelled, Unavailable).
    """

    @abstractmethod
    def reduce(self, operation: str, name: str, values: list[float]) -> tuple[list[float], int]:
        """The values of all workers, by this operation (sum, min or max), and how many have brought theirs."""

    def all_sum(self, x: Any, name: str = "") -> Any:
        """The sum over all workers."""
        return self._reduce_like(x, "sum", _named("all_sum", name))

    def all_mean(self, x: Any, name: str = "") -> Any:
        """The mean over all workers, each of which counts the same.

        A mean over samples, of which workers have different numbers, is that of sums: ``hits, count =
        opt.all_sum([hits, count])``.
        """
        return self._reduce_like(x, "sum", _named("all_mean", name), mean=True)

    def all_min(self, x: Any, name: str = "") -> Any:
        """The smallest of all workers', of each number by itself."""
        return self._reduce_like(x, "min", _named("all_min", name))

    def all_max(self, x: Any, name: str = "") -> Any:
        """The largest of all workers', of each number by itself."""
        return self._reduce_like(x, "max", _named("all_max", name))

    def any(self, flag: object, name: str = "") -> bool:
        """Whether the flag is true on any worker."""
        return self.reduce("max", _named("any", name), [float(bool(flag))])[0][0] != 0

    def all(self, flag: object, name: str = "") -> bool:
        """Whether the flag is true on all workers."""
        return self.reduce("min", _named("all", name), [float(bool(flag))])[0][0] != 0

    def _reduce_like(self, x: Any, operation: str, name: str, mean: bool = False) -> Any:
        values, like = _unpacked(x)
        reduced, workers = self.reduce(operation, name, values)
        return like([value / workers for value in reduced] if mean else reduced)


def _named(call: str, name: str) -> str:
    return f"{call} {name!r}" if name else call


def _unpacked(x: Any) -> tuple[list[float], Callable[[list[float]], Any]]:
    """Its numbers, and what makes the like of it of others."""
    if isinstance(x, numbers.Real):
        return [float(x)], lambda values: values[0]
    if hasattr(x, "detach"):
        return _unpacked_tensor(x)
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        return _unpacked_array(x)
    if isinstance(x, Sequence) and not isinstance(x, (str, bytes)):
        return [_number(each) for each in x], list
    raise TypeError(f"{type(x).__name__}: a number, a sequence of numbers or a tensor is expected")


def _number(x: Any) -> float:
    """One of a sequence: a tensor of one element will do."""
    if isinstance(x, (str, bytes)):
        raise TypeError(f"{x!r} is not a number")
    return float(x.detach() if hasattr(x, "detach") else x)


def _unpacked_tensor(x: Any) -> tuple[list[float], Callable[[list[float]], Any]]:
    import torch

    if x.is_complex():
        raise TypeError(f"{x.dtype}: complex numbers are not reduced")
    kept = x.dtype if x.is_floating_point() else torch.float64  # A sum may be beyond what the type holds.

    def like(values: list[float]) -> Any:
        return torch.tensor(values, dtype=torch.float64).reshape(x.shape).to(device=x.device, dtype=kept)

    return x.detach().to(device="cpu", dtype=torch.float64).flatten().tolist(), like


def _unpacked_array(x: Any) -> tuple[list[float], Callable[[list[float]], Any]]:
    import numpy as np

    if np.issubdtype(x.dtype, np.complexfloating):
        raise TypeError(f"{x.dtype}: complex numbers are not reduced")
    kept = x.dtype if np.issubdtype(x.dtype, np.floating) else np.float64

    def like(values: list[float]) -> Any:
        return np.array(values, np.float64).reshape(x.shape).astype(kept)

    return np.asarray(x, np.float64).ravel().tolist(), like
