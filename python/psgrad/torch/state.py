"""The state of an optimizer (momentum, moments, counts of steps): as torch.optim names it, and as the servers have it.

The servers have, for each weight, the number of its updates and tensors in an order of their own; torch.optim has a
dict by name for each parameter, and none before its first step, but for Adagrad, which has it from the beginning.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from psgrad.torch.tensors import Entry

#: What psgrad.Client gives and takes: for each tensor of the layout its updates and arrays, or None.
ServersState = Sequence[tuple[int, Sequence[Any]] | None]

# torch's names of the servers' tensors, in their order.
_TENSORS: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.SGD: ("momentum_buffer",),
    torch.optim.Adam: ("exp_avg", "exp_avg_sq"),
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq"),
    torch.optim.Adagrad: ("sum",),
    torch.optim.RMSprop: ("square_avg",),
}
_STEP = "step"  # Of all but SGD, which has none.
_UPDATES_MAX = 2**53
_SQUARES = ("exp_avg_sq", "sum", "square_avg")  # Of which roots are taken.


def to_give(optimizer: torch.optim.Optimizer, entries: Iterable[Entry]) -> ServersState | None:
    """The state that this optimizer has, for the servers; None: no parameter has had a step.

    ValueError, naming the parameter, if it is not what the optimizer's class has. Parameters that have had no step
    begin as new ones do.
    """
    given: list[tuple[int, list[Any]] | None] = []
    for entry in entries:
        state = optimizer.state.get(entry.tensor) if entry.kind == "weight" else None
        given.append(_given(optimizer, entry, state) if state else None)
    return given if any(each is not None for each in given) else None


def _given(optimizer: torch.optim.Optimizer, entry: Entry, state: dict[str, Any]) -> tuple[int, list[Any]] | None:
    names = _names(optimizer)
    found = {name for name, value in state.items() if value is not None}
    expected = {*names, *(() if isinstance(optimizer, torch.optim.SGD) else (_STEP,))}
    if not found:  # As SGD leaves it without momentum.
        return None
    if found != expected:
        raise ValueError(
            f"{entry.name}: the optimizer's state has {_listed(found)}, and {type(optimizer).__name__}, as it is set, "
            f"has {_listed(expected)}: it is another optimizer's, or another setting's"
        )
    updates = 1  # Servers do not look at the number where torch has none.
    if _STEP in expected:
        step = float(state[_STEP])
        updates = int(step) if 0 <= step <= _UPDATES_MAX and step.is_integer() else -1
        if updates < 0:
            raise ValueError(
                f"{entry.name}: the optimizer's state has step={state[_STEP]!r}: a whole number is expected"
            )
    if updates == 0:
        return None
    return updates, [_float32(entry, name, state[name]) for name in names]


def _float32(entry: Entry, name: str, value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.shape != entry.tensor.shape:
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise ValueError(
            f"{entry.name}: {name} of the optimizer's state is {shape}, and the parameter {tuple(entry.tensor.shape)}"
        )
    values = value.detach().to("cpu", torch.float32).contiguous()
    if not values.isfinite().all() or (name in _SQUARES and bool((values < 0).any())):
        raise ValueError(f"{entry.name}: {name} of the optimizer's state has values that cannot be (NaN, or below 0)")
    return values


def _names(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    names = _TENSORS[type(optimizer)]
    plain = isinstance(optimizer, torch.optim.SGD) and not any(group["momentum"] for group in optimizer.param_groups)
    return () if plain else names


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def in_torchs_form(
    optimizer: torch.optim.Optimizer, entries: Iterable[Entry], pulled: ServersState
) -> dict[int, dict[str, Any]]:
    """`state` of optimizer.state_dict(), of what Client.pull_state has brought: float32, in the host's memory.

    torch.optim's load_state_dict() brings it to the parameter's type and device.
    """
    by_tensor = {id(entry.tensor): entry for entry in entries if entry.kind == "weight"}
    packed: dict[int, dict[str, Any]] = {}
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    for index, parameter in enumerate(parameters):
        entry = by_tensor.get(id(parameter))
        brought = pulled[entry.index] if entry is not None else None
        state = _brought(optimizer, parameter, *brought) if brought is not None else {}
        if not state and isinstance(optimizer, torch.optim.Adagrad):
            begin = float(optimizer.param_groups[0]["initial_accumulator_value"])
            full = torch.full_like(parameter, begin, dtype=torch.float32, device="cpu", requires_grad=False)
            state = {_STEP: torch.tensor(0.0), "sum": full}
        if state:
            packed[index] = state
    return packed


def _brought(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, updates: int, arrays: Sequence[Any]
) -> dict[str, Any]:
    names = _names(optimizer)
    if updates == 0 or not names:
        return {}
    tensors = {name: _strided_as(parameter, from_dlpack(array)) for name, array in zip(names, arrays, strict=True)}
    if isinstance(optimizer, torch.optim.SGD):
        return tensors
    return {_STEP: torch.tensor(float(updates), dtype=torch.float32), **tensors}


@torch.no_grad()
def _strided_as(parameter: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """As torch.optim has it: in the parameter's memory format."""
    if parameter.is_contiguous():
        return values
    return torch.empty_like(parameter, dtype=torch.float32, device="cpu", requires_grad=False).copy_(values)
