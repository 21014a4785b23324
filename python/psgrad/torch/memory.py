"""The memory that weights are pulled to, and how it becomes the model's own.

                    client's memory (float32, contiguous)        the model's tensor
  float32           weights[i]  ────────── the same memory ─────  parameter.data
  other dtype,      weights[i]  ── copied after every pull ────▶  parameter.data, in its dtype and strides
  channels last

Every tensor has a storage of its own, so that torch.save of one does not write all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

import psgrad
from psgrad.torch.tensors import Entry, shortened


class Memory:
    """The client's weights and gradients as tensors, by index of the layout."""

    def __init__(self, client: psgrad.Client, entries: Sequence[Entry]) -> None:
        self.entries = list(entries)
        # As the client takes them: it knows its own list again, and has nothing to check.
        self.weight_buffers: list[Any] = client.weight_buffers()
        self._client = client
        self.weights: list[torch.Tensor] = [from_dlpack(buffer) for buffer in self.weight_buffers]
        self._gradients: list[torch.Tensor] | None = None
        self._gradient_buffers: list[Any] = []
        self._zeros: torch.Tensor | None = None
        self._addresses: list[tuple[Entry, int]] = []
        self._copied = [
            (entry.tensor, self.weights[entry.index]) for entry in entries if entry.shared and not entry.in_place
        ]
        self._buffers = [entry for entry in entries if entry.kind in ("buffer_lowest", "buffer_mean")]
        # What a pull writes: autograd is to know.
        self._written = [entry.tensor for entry in entries if entry.shared]
        self._weights = [entry for entry in entries if entry.kind == "weight"]
        self._frozen = [entry for entry in entries if entry.place is None and not entry.tensor.requires_grad]
        self._versions: list[int] = []  # Of their tensors, as weights came last.

    @property
    def gradients(self) -> list[torch.Tensor]:
        """Memory for what is not sent from where it lies. Made when it is first needed: a float32 model needs none."""
        if self._gradients is None:
            self._gradient_buffers = self._client.gradient_buffers()
            self._gradients = [from_dlpack(buffer) for buffer in self._gradient_buffers]
        return self._gradients

    @property
    def gradient_buffers(self) -> list[Any]:
        """The same, as the client takes them."""
        assert self.gradients
        return self._gradient_buffers

    def zeros_address(self) -> int:
        """Of as many zeros as the largest tensor has."""
        if self._zeros is None:
            self._zeros = torch.zeros(max(entry.tensor.numel() for entry in self.entries))
        return self._zeros.data_ptr()

    @torch.no_grad()
    def take_values(self) -> None:
        """The model's values to the client's memory: what the servers are given if this worker is asked for them."""
        for entry in self.entries:
            self.weights[entry.index].copy_(entry.tensor)

    @torch.no_grad()
    def bind(self) -> None:
        """Gives the model's tensors the client's memory, or copies what has come to them. After Client.start."""
        for entry in self.entries:
            if entry.in_place:
                entry.tensor.data = self.weights[entry.index]
            else:
                entry.tensor.copy_(self.weights[entry.index])
        self._versions = [entry.tensor._version for entry in self._weights]
        self._addresses = [
            (entry, entry.tensor.data_ptr()) for entry in self.entries if entry.in_place and entry.shared
        ]

    @torch.no_grad()
    def collect(self) -> None:
        """The model's values that servers have a say over, to the client's memory, where they are not in it."""
        for tensor, weights in self._copied:
            weights.copy_(tensor)
        for entry in self._buffers:
            current = _current(entry)
            if current is not entry.tensor:
                self.weights[entry.index].copy_(current)

    def check_bound(self) -> None:
        """RuntimeError, naming the tensor, if a parameter has been given other memory or another type, or unfrozen."""
        for entry in self._frozen:
            if entry.tensor.requires_grad:
                raise RuntimeError(
                    f"{entry.name} was frozen when this worker joined the job, so no server steps it, but it requires "
                    "a gradient now. To train it: opt.finish(), and a new DistributedOptimizer in a new job"
                )
        for entry, address in self._addresses:
            if entry.tensor.data_ptr() != address:
                raise RuntimeError(
                    f"{entry.name}: its memory is not the one that weights are pulled to any more. Something gave it "
                    "other memory after DistributedOptimizer was made (model.to(…), .half(), .data = …): do that before"
                )

    def check_unwritten(self, step: int) -> None:
        """RuntimeError, naming them, if weights were written to since they came: that would be lost."""
        written = [
            entry.name
            for entry, version in zip(self._weights, self._versions, strict=True)
            if entry.tensor._version != version
        ]
        if written:
            raise RuntimeError(
                f"step {step}: {shortened(written)} was written to since the last step(), and would be lost with this "
                "one: the servers hold the weights. Load a checkpoint before DistributedOptimizer is made; after a "
                "change for a while, such as an average for an evaluation, opt.pull() brings the servers' weights back"
            )

    @torch.no_grad()
    def publish(self) -> None:
        """New weights have come: also for tensors that hold copies, and for graphs that were made of the old ones."""
        for tensor, weights in self._copied:
            tensor.copy_(weights)
        for entry in self._buffers:
            current = _current(entry)
            if current is not entry.tensor:
                current.copy_(self.weights[entry.index])
        # A backward pass through them would be computed on the wrong weights, silently; so it raises.
        _bump(self._written)
        self._versions = [entry.tensor._version for entry in self._weights]

    @torch.no_grad()
    def take_buffers(self) -> list[Entry]:
        """BatchNorm's statistics and the like, to the gradient memory: their values are what is pushed of them."""
        for entry in self._buffers:
            self.gradients[entry.index].copy_(_current(entry))
        return self._buffers


def _current(entry: Entry) -> torch.Tensor:
    """A buffer as the model has it now: some modules assign a new tensor instead of writing to the old one."""
    if entry.place is None:
        return entry.tensor
    module, name = entry.place
    buffer = module._buffers.get(name)
    return entry.tensor if buffer is None else buffer


def _bump_one_by_one(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        torch.autograd.graph.increment_version(tensor)


def _choose_bump() -> Callable[[list[torch.Tensor]], None]:
    """One call for all is 0.1 µs a tensor. Older versions of PyTorch, as 2.1, take one tensor."""
    increment: Callable[[list[torch.Tensor]], None] = torch.autograd.graph.increment_version
    try:
        increment([torch.zeros(1)])
    except (RuntimeError, TypeError):
        return _bump_one_by_one
    return increment


_bump = _choose_bump()
