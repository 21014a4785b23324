"""A model's tensors as the job knows them: parameters in the model's order, then buffers, named as in state_dict."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

import psgrad
from psgrad.torch.groups import Groups, group_of

log = logging.getLogger("psgrad")

Buffers = Literal["rank0", "average", "local"]
Kind = Literal["weight", "constant", "buffer_lowest", "buffer_mean"]

_BUFFER_KINDS: dict[str, Kind] = {"rank0": "buffer_lowest", "average": "buffer_mean", "local": "constant"}
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# float32 holds every whole number up to here.
_LARGEST_WHOLE = 2**24


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the layout."""

    index: int  # In the layout.
    name: str
    kind: Kind
    tensor: torch.Tensor  # The model's own: a parameter or a buffer.
    in_place: bool  # Its memory becomes the client's: float32, contiguous, and the servers have the say over it.
    shared: bool  # Its values come from the servers after each step; else only at the start.
    learning_rate_factor: float = 1.0
    weight_decay_factor: float = 1.0
    # Of a buffer: where the model keeps it, as modules may put another tensor in its place.
    place: tuple[torch.nn.Module, str] | None = None

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
        )


def entries_of(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, groups: Groups, buffers: Buffers
) -> list[Entry]:
    """The layout. ValueError, naming the tensor, for what the servers cannot hold."""
    _refuse_model(model)
    of = group_of(optimizer.param_groups)
    entries: list[Entry] = []
    left_out: list[str] = []
    for name, parameter in model.named_parameters():
        group = of.pop(id(parameter), None)
        _check_parameter(name, parameter)
        if parameter.numel() == 0:
            continue
        if parameter.requires_grad and group is None:
            left_out.append(name)
        weight = parameter.requires_grad and group is not None
        factors = groups.factors(group) if weight and group is not None else (1.0, 1.0)
        in_place = _fits(parameter)
        entries.append(
            Entry(len(entries), name, "weight" if weight else "constant", parameter, in_place, weight, *factors)
        )
    if of:
        raise ValueError(
            f"the optimizer has {len(of)} parameters that the model does not have: DistributedOptimizer needs the "
            "model that holds all of them"
        )
    if not any(entry.kind == "weight" for entry in entries):
        raise ValueError("the model has no parameter that is in the optimizer and requires a gradient")
    if left_out:
        log.warning("in no parameter group, so they stay as they are: %s", shortened(left_out))
    for name, buffer, place in _persistent_buffers(model):
        if buffer.numel() == 0:
            continue
        _check_buffer(name, buffer)
        moves = buffer.is_floating_point() and buffers != "local"
        kind: Kind = _BUFFER_KINDS[buffers] if moves else "constant"
        in_place = moves and _fits(buffer)
        entries.append(Entry(len(entries), name, kind, buffer, in_place, moves, place=place))
    _refuse_overlaps(entries)
    return entries


def shortened(names: Sequence[str], most: int = 8) -> str:
    """'a, b, c', and how many more there are."""
    text = ", ".join(names[:most])
    return text if len(names) <= most else f"{text} and {len(names) - most} more"


def _fits(tensor: torch.Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.is_contiguous()


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
            yield f"{prefix}.{name}" if prefix else name, buffer, (module, name)


def _refuse_model(model: torch.nn.Module) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: a torch.nn.Module is expected, not {type(model).__name__}")
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise ValueError(
            "model: DistributedDataParallel averages gradients by itself; pass the module in it (model.module)"
        )
    for name, module in model.named_modules():
        # By name: the class is in a module that is slow to import.
        compiled = (
            type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
        )
        if compiled:
            where = f" ({name})" if name else ""
            raise ValueError(
                f"model{where}: torch.compile is not supported yet, as compiled code may read weights when it likes; "
                "pass the module that was compiled, and train that"
            )


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
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} is on {tensor.device}: psgrad.torch trains models in the host's memory (model.cpu())")
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
