"""What a torch.optim object says to the servers: at the join its class, its hyperparameters and factors of its groups'
tensors; afterwards the learning rate, as schedulers move it.
"""

from __future__ import annotations

import math
from typing import Any

import torch

import psgrad

# Schedulers multiply and divide in double; what differs by less than this is rounding.
_TOLERANCE = 1e-6

# What must be the same in all groups and stay as it is: hyperparameters of the servers that have no factor by tensor,
# and choices of the class.
_FIXED: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.SGD: ("momentum", "dampening", "nesterov", "maximize"),
    torch.optim.Adam: ("betas", "eps", "amsgrad", "maximize", "decoupled_weight_decay"),
    torch.optim.AdamW: ("betas", "eps", "amsgrad", "maximize"),
    torch.optim.Adagrad: ("lr_decay", "eps", "initial_accumulator_value", "maximize"),
    torch.optim.RMSprop: ("alpha", "eps", "momentum", "centered", "maximize"),
}

# The servers' optimizers have none of these, and RMSprop has no momentum.
_REFUSED = ("dampening", "maximize", "amsgrad", "centered")

# Hyperparameters of the servers' optimizers, which torch calls by the same names.
_HYPERPARAMETERS: dict[str, tuple[str, ...]] = {
    "sgd": (),
    "momentum": ("momentum",),
    "nesterov": ("momentum",),
    "adagrad": ("lr_decay", "eps", "initial_accumulator_value"),
    "rmsprop": ("alpha", "eps"),
    "adam": ("eps",),
    "adamw": ("eps",),
}


class Groups:
    """The groups of a torch optimizer, as the servers see them: one base rate and decay, and factors by tensor.

    The base learning rate is that of the first group whose rate is not 0: its `initial_lr`, which schedulers leave
    there, or else its `lr`. The base weight decay is the first that is not 0.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """ValueError, naming group and key, if groups differ in what servers have one of."""
        self._groups: list[dict[str, Any]] = optimizer.param_groups
        kind = type(optimizer)
        if kind not in _FIXED:
            raise ValueError(
                f"the servers have no {kind.__module__}.{kind.__qualname__}: they have torch.optim's SGD, Adam, AdamW, "
                "Adagrad and RMSprop"
            )
        self._kind = kind
        keys = _FIXED[kind]
        first = self._groups[0]
        for index, group in enumerate(self._groups):
            for key in keys:
                if _plain(group.get(key)) != _plain(first.get(key)):
                    raise ValueError(
                        f"param_groups[{index}] has {key}={group.get(key)!r} and param_groups[0] {first.get(key)!r}: "
                        "only lr and weight_decay may differ by group on the servers"
                    )
        self._fixed = [{key: _plain(group.get(key)) for key in (*keys, "weight_decay")} for group in self._groups]
        self._rates = [float(group.get("initial_lr", group["lr"])) for group in self._groups]
        self._decays = [float(group["weight_decay"]) for group in self._groups]
        self._reference = next((index for index, rate in enumerate(self._rates) if rate > 0), -1)
        if self._reference < 0:
            raise ValueError("lr is 0 in all param_groups: the servers need a base learning rate above 0")
        self.base_learning_rate = self._rates[self._reference]
        self.base_weight_decay = next((decay for decay in self._decays if decay > 0), 0.0)

    def factors(self, group: int) -> tuple[float, float]:
        """What the base learning rate and the base weight decay are multiplied by for the tensors of a group."""
        decay = self._decays[group] / self.base_weight_decay if self.base_weight_decay > 0 else 1.0
        return self._rates[group] / self.base_learning_rate, decay

    def settings(self, clip_norm: float | None) -> psgrad.OptimizerSettings:
        """The servers' optimizer that steps as this one does. ValueError, by name, for an option that they lack."""
        refused = (*_REFUSED, "momentum") if self._kind is torch.optim.RMSprop else _REFUSED
        for index, group in enumerate(self._groups):
            for key in refused:
                if group.get(key):
                    raise ValueError(
                        f"{self._kind.__name__}({key}={group[key]!r}) in param_groups[{index}]: the servers' "
                        f"optimizers have no {key}"
                    )
        group = self._groups[0]
        name = self._servers_name()
        values = {"learning_rate": self.base_learning_rate, "weight_decay": self.base_weight_decay}
        values.update((key, float(group[key])) for key in _HYPERPARAMETERS[name])
        if "betas" in group:
            values["beta1"], values["beta2"] = (float(beta) for beta in group["betas"])
        return psgrad.OptimizerSettings(optimizer=name, hyperparameters=values, clip_norm=clip_norm)

    def _servers_name(self) -> str:
        group = self._groups[0]
        if self._kind is torch.optim.SGD:
            if not group["momentum"]:
                return "sgd"
            return "nesterov" if group["nesterov"] else "momentum"
        if self._kind is torch.optim.Adam:
            return "adamw" if group.get("decoupled_weight_decay") else "adam"
        return {torch.optim.AdamW: "adamw", torch.optim.Adagrad: "adagrad", torch.optim.RMSprop: "rmsprop"}[self._kind]

    def learning_rate(self) -> float:
        """The base learning rate as the groups have it now.

        ValueError if a group's rate has moved otherwise than the others', or something has changed that servers were
        told once.
        """
        if len(self._groups) == 1:  # The common case, in a few microseconds.
            group = self._groups[0]
            self._check_fixed(0, group)
            return float(group["lr"])
        current = float(self._groups[self._reference]["lr"])
        scale = current / self.base_learning_rate
        for index, group in enumerate(self._groups):
            self._check_fixed(index, group)
            expected = self._rates[index] * scale
            if not math.isclose(float(group["lr"]), expected, rel_tol=_TOLERANCE, abs_tol=1e-30):
                raise ValueError(
                    f"param_groups[{index}] has lr={float(group['lr']):g}, but its rate at the join, scaled as that of "
                    f"param_groups[{self._reference}], is {expected:g}: the servers have one learning rate and a fixed "
                    "factor by group, so schedulers must scale all groups alike"
                )
        return current

    def _check_fixed(self, index: int, group: dict[str, Any]) -> None:
        for key, told in self._fixed[index].items():
            if group.get(key) != told and _plain(group.get(key)) != told:
                raise ValueError(
                    f"param_groups[{index}]: {key} has changed from {told!r} to {group.get(key)!r} after the join; of "
                    "the hyperparameters only lr follows the optimizer (for the others: ps_ctl set; a scheduler that "
                    "cycles momentum: cycle_momentum=False)"
                )


class OwnGroups:
    """The groups of an optimizer that servers are told nothing of: they leave all to the worker (--optimizer=local)."""

    def factors(self, group: int) -> tuple[float, float]:
        return 1.0, 1.0

    def learning_rate(self) -> None:
        return None


class LearningRate:
    """Which learning rate a push has to tell the servers, if any: what is new since the last that was told."""

    def __init__(self, groups: Groups | OwnGroups, told: float | None) -> None:
        """`told`: what the servers have; None: not known, in a job that was already training."""
        self._groups = groups
        self._told = told
        self._lead = True
        self._ever_told = False

    def to_tell(self, lead: bool) -> float | None:
        """The rate to send with the next push. ValueError as of Groups.learning_rate.

        All tell; of those that still train the lowest rank's counts. One that has become the lead tells what it has,
        whatever was told before.
        """
        rate = self._groups.learning_rate()
        if lead and not self._lead:
            self._told = None
        self._lead = lead
        return None if rate == self._told else rate

    def was_told(self, rate: float | None, result: psgrad.Result) -> None:
        """A push with this has ended so: all servers have the rate if all have applied it."""
        applied = bool(result.answers) and all(answer in ("applied", "duplicate") for answer in result.answers)
        if applied and rate is not None:
            self._told = rate
            self._ever_told = True

    def went_back(self) -> None:
        """The servers have the rate of a checkpoint: it is told anew, unless it is theirs alone."""
        if self._ever_told:
            self._told = None

    def differs(self, rate: float | None) -> bool:
        """Whether the groups' rate is another one than a push under way tells."""
        return self._groups.learning_rate() != (self._told if rate is None else rate)


def _plain(value: Any) -> Any:
    """Rates and betas may be tensors, which compare to tensors."""
    if isinstance(value, torch.Tensor):
        return value.item()
    if isinstance(value, (tuple, list)):
        return tuple(_plain(part) for part in value)
    return value
