"""What a torch.optim object says to the servers: its class and hyperparameters, in the servers' names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import psgrad

_CLASSES = "SGD, Adam, AdamW, Adagrad and RMSprop"

# Of each class, what must be the same in all groups and stay as it is: hyperparameters of the servers that have no
# factor by tensor, and choices of the class.
_FIXED: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.SGD: ("momentum", "dampening", "nesterov", "maximize"),
    torch.optim.Adam: ("betas", "eps", "amsgrad", "maximize", "decoupled_weight_decay"),
    torch.optim.AdamW: ("betas", "eps", "amsgrad", "maximize"),
    torch.optim.Adagrad: ("lr_decay", "eps", "initial_accumulator_value", "maximize"),
    torch.optim.RMSprop: ("alpha", "eps", "momentum", "centered", "maximize"),
}

# The servers' optimizers have none of these.
_REFUSED: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.SGD: ("dampening", "maximize"),
    torch.optim.Adam: ("amsgrad", "maximize"),
    torch.optim.AdamW: ("amsgrad", "maximize"),
    torch.optim.Adagrad: ("maximize",),
    torch.optim.RMSprop: ("momentum", "centered", "maximize"),
}


def fixed_keys(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """The keys of a parameter group that all groups must agree in, and that stay as they are after the join.

    ValueError if the servers have no such class.
    """
    keys = _FIXED.get(type(optimizer))
    if keys is None:
        kind = type(optimizer)
        raise ValueError(
            f"the servers have no {kind.__module__}.{kind.__qualname__}: they have torch.optim's {_CLASSES}"
        )
    return keys


def optimizer_settings(
    optimizer: torch.optim.Optimizer, learning_rate: float, weight_decay: float, clip_norm: float | None
) -> psgrad.OptimizerSettings:
    """The servers' optimizer that steps as this one does, with these as its base learning rate and weight decay.

    ValueError if there is none: the class, or an option of it, by name.
    """
    fixed_keys(optimizer)
    kind = type(optimizer)
    for index, group in enumerate(optimizer.param_groups):
        for key in _REFUSED[kind]:
            if group.get(key):
                raise ValueError(
                    f"{kind.__name__}({key}={group[key]!r}) in param_groups[{index}]: the servers' optimizers have no "
                    f"{key}"
                )
    group = optimizer.param_groups[0]
    values = {"learning_rate": learning_rate, "weight_decay": weight_decay}
    name = _name(kind, group)
    if name in ("momentum", "nesterov"):
        values["momentum"] = float(group["momentum"])
    elif name in ("adam", "adamw"):
        values["beta1"], values["beta2"] = (float(beta) for beta in group["betas"])
        values["eps"] = float(group["eps"])
    elif name == "adagrad":
        for key in ("lr_decay", "eps", "initial_accumulator_value"):
            values[key] = float(group[key])
    elif name == "rmsprop":
        values["alpha"] = float(group["alpha"])
        values["eps"] = float(group["eps"])
    return psgrad.OptimizerSettings(optimizer=name, hyperparameters=values, clip_norm=clip_norm)


def _name(kind: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> str:
    if kind is torch.optim.SGD:
        if not group["momentum"]:
            return "sgd"
        return "nesterov" if group["nesterov"] else "momentum"
    if kind is torch.optim.Adam:
        return "adamw" if group.get("decoupled_weight_decay") else "adam"
    return {torch.optim.AdamW: "adamw", torch.optim.Adagrad: "adagrad", torch.optim.RMSprop: "rmsprop"}[kind]
