"""A model's tensors as the job knows them, and the memory that their weights are pulled to.

The layout has parameters in the model's order, then buffers, named as in state_dict. Memory becomes the model's own:

                    client's memory (float32, contiguous)        the model's tensor
  float32           weights[i]  ────────── the same memory ─────  parameter.data
  other dtype,      weights[i]  ── copied after every pull ────▶  parameter.data, in its dtype and strides, where it is
  channels last,
  on a card (staging.py)

Every tensor has a storage of its own, so that torch.save of one does not write all of them.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils.dlpack import from_dlpack

import psgrad
from psgrad.torch.groups import Groups, OwnGroups
from psgrad.torch.staging import Pair, Staging, check_device, device_of
from psgrad.torch.watch import Watch

log = logging.getLogger("psgrad")

Buffers = Literal["rank0", "average", "local"]
Kind = Literal["weight", "constant", "buffer_lowest", "buffer_mean"]

_BUFFER_KINDS: dict[str, Kind] = {"rank0": "buffer_lowest", "average": "buffer_mean", "local": "constant"}
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_WHOLE = (
    "Give it the plain model: servers share its tensors out by themselves. Within a node DistributedDataParallel or "
    'FSDP may stay, with one worker a node, which puts whole gradients into .grad of a plain model (overlap="none")'
)
# float32 holds every whole number up to this one.
_LARGEST_WHOLE = 2**24


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the layout."""

    index: int  # In the layout.
    name: str
    kind: Kind
    tensor: torch.Tensor  # The model's own: a parameter or a buffer.
    # Its memory becomes the client's: float32, contiguous, in the host's memory, and the servers have the say over it.
    in_place: bool
    shared: bool  # Its values come from the servers after each step; else only at the start.
    learning_rate_factor: float = 1.0
    weight_decay_factor: float = 1.0
    group: int = 0  # The servers' number of it.
    # Where the model keeps a buffer: modules may put another tensor in its place.
    place: tuple[torch.nn.Module, str] | None = None
    device: torch.device | None = None  # The card that it is on; None: it is in the host's memory.

    @property
    def pushed(self) -> bool:
        return self.kind != "constant"

    def spec(self) -> psgrad.Tensor:
        return psgrad.Tensor(
            self.name,
            tuple(self.tensor.shape),
            learning_rate_factor=self.learning_rate_factor,
            weight_decay_factor=self.weight_decay_factor,
            kind=self.kind,
            group=self.group,
        )


def entries_of(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, groups: Groups | OwnGroups, buffers: Buffers
) -> list[Entry]:
    """The layout. ValueError, naming the tensor, for what the servers cannot hold."""
    _refuse_model(model)
    group_of = {id(each): index for index, group in enumerate(optimizer.param_groups) for each in group["params"]}
    entries: list[Entry] = []
    left_out: list[str] = []
    for name, parameter in _named_parameters(model):
        group = group_of.pop(id(parameter), None)
        _check_parameter(name, parameter)
        if parameter.numel() == 0:
            continue
        if parameter.requires_grad and group is None:
            left_out.append(name)
        weight = parameter.requires_grad and group is not None
        kind: Kind = "weight" if weight else "constant"
        of_group: tuple[float, float, int] = (1.0, 1.0, 0)
        if weight and group is not None:
            of_group = (*groups.factors(group), groups.number(group))
        device = device_of(parameter)
        entries.append(Entry(len(entries), name, kind, parameter, _fits(parameter), weight, *of_group, device=device))
    if group_of:
        raise ValueError(
            f"the optimizer has {len(group_of)} parameters that the model does not have: DistributedOptimizer needs "
            "the model that holds all of them"
        )
    if not any(entry.kind == "weight" for entry in entries):
        raise ValueError("the model has no parameter that is in the optimizer and requires a gradient")
    if left_out:
        log.warning("in no parameter group, so they stay as they are: %s", shortened(left_out))
    for name, buffer, place in _persistent_buffers(model):
        if buffer.numel() == 0:
            continue
        _check_buffer(name, buffer)
        counts = _is_counter(buffer)
        moves = (buffer.is_floating_point() or counts) and buffers != "local"
        kind = "constant" if not moves else "buffer_lowest" if counts else _BUFFER_KINDS[buffers]
        in_place = moves and _fits(buffer)
        device = device_of(buffer)
        entries.append(Entry(len(entries), name, kind, buffer, in_place, moves, place=place, device=device))
    _refuse_overlaps(entries)
    return entries


def _is_counter(buffer: torch.Tensor) -> bool:
    """As BatchNorm's num_batches_tracked; other whole numbers (masks, indices) stay as they are."""
    return buffer.numel() == 1 and not (buffer.is_floating_point() or buffer.is_complex() or buffer.dtype is torch.bool)


def shortened(names: Sequence[str], most: int = 8) -> str:
    """'a, b, c', and how many more there are."""
    text = ", ".join(names[:most])
    return text if len(names) <= most else f"{text} and {len(names) - most} more"


def _fits(tensor: torch.Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.is_contiguous() and device_of(tensor) is None


def _named_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for name, parameter in model.named_parameters():
        yield eager_name(name), parameter


def eager_name(name: str) -> str:
    """Without what torch.compile puts before the names of a module that it wraps: all workers have the same."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _persistent_buffers(
    model: torch.nn.Module,
) -> Iterator[tuple[str, torch.Tensor, tuple[torch.nn.Module, str]]]:
    """Those of state_dict, each once; what a module computes by itself (persistent=False) is its own affair."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            yield eager_name(f"{prefix}.{name}" if prefix else name), buffer, (module, name)


def _refuse_model(model: torch.nn.Module) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: a torch.nn.Module is expected, not {type(model).__name__}")
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise ValueError(
            "model: DistributedDataParallel averages gradients by itself; pass the module in it (model.module)"
        )
    for name, module in model.named_modules():
        # They are told by their names, as the classes are in modules that are slow to import.
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if kinds & {"FullyShardedDataParallel", "FSDPModule"}:
            raise ValueError(
                f"model{f' ({name})' if name else ''}: FSDP has cut its parameters into pieces, and psgrad needs whole "
                f"ones. {_WHOLE}"
            )
    for name, parameter in model.named_parameters():
        if _is_dtensor(parameter):
            raise ValueError(f"{name} is a DTensor, a piece of a tensor, and psgrad needs whole ones. {_WHOLE}")


def _is_dtensor(tensor: torch.Tensor) -> bool:
    return any(kind.__name__ == "DTensor" for kind in type(tensor).__mro__)


def _check_parameter(name: str, parameter: torch.nn.Parameter) -> None:
    if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
        raise ValueError(f"{name} has no shape yet: run a batch through the model's lazy modules first")
    _check_device(name, parameter)
    if parameter.dtype not in _FLOATS:
        raise ValueError(
            f"{name} is {_dtype(parameter)}: servers hold float32, and models of float32, bfloat16 and float16 can be "
            "trained with it; convert it (model.float())"
        )


def _check_buffer(name: str, buffer: torch.Tensor) -> None:
    _check_device(name, buffer)
    if buffer.is_complex():
        raise ValueError(f"{name} is {_dtype(buffer)}: servers hold float32; register it with persistent=False")
    whole = not buffer.is_floating_point() and buffer.dtype is not torch.bool
    if whole and int(buffer.abs().max()) > _LARGEST_WHOLE:
        raise ValueError(
            f"{name} holds whole numbers above {_LARGEST_WHOLE}, which float32 cannot carry to the other workers: "
            "register it with persistent=False"
        )


def _check_device(name: str, tensor: torch.Tensor) -> None:
    check_device(name, tensor)
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} is sparse ({tensor.layout}): only its gradient may be")


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _refuse_overlaps(entries: Sequence[Entry]) -> None:
    """Two parameters in one memory would part when each gets its own. (One that is used twice appears once.)"""
    by_storage: dict[int, list[Entry]] = {}
    for entry in entries:
        by_storage.setdefault(entry.tensor.untyped_storage().data_ptr(), []).append(entry)
    for sharing in by_storage.values():
        if len(sharing) == 1:
            continue
        spans = sorted(((_span(entry.tensor), entry.name) for entry in sharing), key=lambda item: item[0])
        for (former, one), (latter, other) in itertools.pairwise(spans):
            if latter[0] < former[1]:
                raise ValueError(
                    f"{one} and {other} are different tensors in the same memory; tie them by assigning one Parameter "
                    "to both places"
                )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes that it lies in, from and to, as addresses."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


class Memory:
    """The client's weights and gradients as tensors, by index of the layout."""

    def __init__(self, client: psgrad.Client, entries: Sequence[Entry]) -> None:
        self.entries = list(entries)
        # As the client takes them: it knows its own list again, and has nothing to check.
        self.weight_buffers_later: list[Any] = client.weight_buffers()
        self._client = client
        self.weights: list[torch.Tensor] = [from_dlpack(buffer) for buffer in self.weight_buffers_later]
        self._gradients: list[torch.Tensor] | None = None
        self._gradient_buffers: list[Any] = []
        self._zeros: torch.Tensor | None = None
        self._addresses: list[tuple[Entry, int]] = []
        self._copied = [
            (entry.tensor, self.weights[entry.index]) for entry in entries if entry.shared and not entry.in_place
        ]
        self._buffers = [entry for entry in entries if entry.kind in ("buffer_lowest", "buffer_mean")]
        #: Copies between the tensors that are on cards and this memory.
        self.staging = Staging(f"rank {client.rank}")
        self.on_cards = [entry for entry in entries if entry.device is not None]
        self._copied_to_cards = [entry for entry in self.on_cards if entry.shared]
        self._copied_here = [
            (entry.tensor, self.weights[entry.index])
            for entry in entries
            if entry.shared and not entry.in_place and entry.device is None
        ]
        self._pin(self.on_cards, self.weights)
        # What a pull writes: autograd is to know.
        self._written = [entry.tensor for entry in entries if entry.shared]
        self._weights = [entry for entry in entries if entry.kind == "weight"]
        self._frozen = [entry for entry in entries if entry.place is None and not entry.tensor.requires_grad]
        self._versions: list[int] = []  # The weights' version counters, as they came last.
        self._watch = Watch([entry.index for entry in self._weights if entry.device is None])

    @property
    def weight_buffers(self) -> list[Any]:
        """To pull to: it waits until nothing is copied from them to a card any more.

        weight_buffers_later are the same, for an exchange that writes them only after a settle() of the staging.
        """
        self.staging.settle()
        self.expect_weights()
        return self.weight_buffers_later

    def expect_weights(self) -> None:
        """Weights may come at any time from now on, until publish()."""
        self._watch.forget()

    def pin_gradients(self) -> None:
        """For copies from cards. The gradients must then be pushed one by one: memory that a push is given whole may be
        mapped anew when it fails.
        """
        self._pin([entry for entry in self.on_cards if entry.pushed], self.gradients if self.on_cards else [])

    def _pin(self, entries: Sequence[Entry], memory: Sequence[torch.Tensor]) -> None:
        if entries and entries[0].device is not None:
            self.staging.pin([memory[entry.index] for entry in entries], entries[0].device)

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
        """Where as many zeros are as the largest tensor has elements."""
        if self._zeros is None:
            self._zeros = torch.zeros(max(entry.tensor.numel() for entry in self.entries))
        return self._zeros.data_ptr()

    @torch.no_grad()
    def take_values(self) -> None:
        """The model's values to the client's memory: what the servers are given if this worker is asked for them."""
        self.staging.fetch((entry.tensor, self.weights[entry.index]) for entry in self.entries)

    @torch.no_grad()
    def bind(self) -> None:
        """Gives the model's tensors the client's memory, or copies what has come to them. After Client.start."""
        for entry in self.entries:
            if entry.in_place:
                entry.tensor.data = self.weights[entry.index]
        self.staging.put((entry.tensor, self.weights[entry.index]) for entry in self.entries if not entry.in_place)
        self._note_weights()
        self._addresses = [
            (entry, entry.tensor.data_ptr()) for entry in self.entries if entry.in_place and entry.shared
        ]

    @torch.no_grad()
    def collect(self) -> None:
        """The model's values that servers have a say over, to the client's memory, where they are not in it."""
        self.staging.fetch(itertools.chain(self._copied, self._replaced_buffers()))

    def check_bound(self) -> None:
        """RuntimeError, naming the tensor, if a parameter has been given other memory or another type, or unfrozen."""
        for entry in self._frozen:
            if entry.tensor.requires_grad:
                raise RuntimeError(
                    f"{entry.name} was frozen when this worker joined the job, so no server steps it, but it requires "
                    "a gradient now. To train it: opt.finish(), and a new DistributedOptimizer in a new job"
                )
        for entry in self.on_cards:
            device = device_of(entry.tensor)
            if device != entry.device:
                raise RuntimeError(
                    f"{entry.name} is on {device or 'cpu'}, and was on {entry.device} when DistributedOptimizer was "
                    "made: move the model before that"
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
        if not written:
            written = [self.entries[index].name for index in self._watch.changed(lambda i: self.entries[i].tensor)]
        if written:
            raise RuntimeError(
                f"step {step}: {shortened(written)} was written to since the last step(), and would be lost with this "
                "one: the servers hold the weights. Load a checkpoint before DistributedOptimizer is made, or after it "
                "with start='later'; after a change for a while, such as an average for an evaluation, opt.pull() "
                "brings the servers' weights back"
            )

    @torch.no_grad()
    def publish(self, followed: bool = False) -> None:
        """New weights have come: also for tensors that hold copies, and for graphs that were made of the old ones.

        `followed`: cards have got them already, by follow().
        """
        copied = self._copied_here if followed else self._copied
        self.staging.put(itertools.chain(copied, self._replaced_buffers()))
        # A backward pass through them would be computed on the wrong weights, silently; so it raises.
        _bump(self._written)
        self._note_weights()

    def _note_weights(self) -> None:
        """They are to stay as they are until others come."""
        self._versions = [entry.tensor._version for entry in self._weights]
        self._watch.next_step()
        for index in self._watch.look_at():
            self._watch.saw(index, self.entries[index].tensor)

    @torch.no_grad()
    def follow(self, exchange: psgrad.Exchange) -> None:
        """Copies the weights that an exchange brings to the cards as they come, layer by layer. Then publish()."""

        def coming() -> Iterator[Pair]:
            for entry in self._copied_to_cards:
                exchange.wait_tensor(entry.index)
                yield entry.tensor, self.weights[entry.index]

        self.staging.put(coming())

    @torch.no_grad()
    def take_buffers(self) -> list[Entry]:
        """BatchNorm's statistics and the like, to the gradient memory: their values are what is pushed of them."""
        if self._buffers:
            self.staging.fetch((_current(entry), self.gradients[entry.index]) for entry in self._buffers)
        return self._buffers

    def _replaced_buffers(self) -> Iterator[Pair]:
        for entry in self._buffers:
            current = _current(entry)
            if current is not entry.tensor:
                yield current, self.weights[entry.index]


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
