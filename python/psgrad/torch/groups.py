"""What a torch.optim object says to the servers: at the join its class, and the hyperparameters of its groups of
tensors; afterwards what schedulers move of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import psgrad

_NEEDED = ("lr", "weight_decay")
# Servers know so many by their numbers; of more they know the factors of their tensors only.
_GROUPS_MAX = 1024
# Schedulers multiply and divide in double; what differs by less than this is rounding.
_TOLERANCE = 1e-6

# What must be the same in all groups and stay as it is: the servers have no such hyperparameter, or only one that a job
# begins with.
_FIXED: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.SGD: ("dampening", "nesterov", "maximize"),
    torch.optim.Adam: ("amsgrad", "maximize", "decoupled_weight_decay"),
    torch.optim.AdamW: ("amsgrad", "maximize"),
    torch.optim.Adagrad: ("initial_accumulator_value", "maximize"),
    torch.optim.RMSprop: ("momentum", "centered", "maximize"),
}

# The servers' optimizers have none of these, and RMSprop has no momentum.
_REFUSED = ("dampening", "maximize", "amsgrad", "centered")

# What may differ by group and move, besides lr and weight_decay. Servers have the same, by the same names; betas are
# beta1 and beta2 there.
_MOVING: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.SGD: ("momentum",),
    torch.optim.Adam: ("betas", "eps"),
    torch.optim.AdamW: ("betas", "eps"),
    torch.optim.Adagrad: ("lr_decay", "eps"),
    torch.optim.RMSprop: ("alpha", "eps"),
}


@dataclass(frozen=True)
class Hyperparameters:
    """What the groups have at some time, by the servers' names."""

    learning_rate: float | None = None  # The base learning rate; None: servers are told nothing.
    #: What holds for all but the learning rate, where there is one group.
    of_all: Mapping[str, float] = field(default_factory=dict)
    #: Where there are several: what each has of its own.
    of_groups: tuple[Mapping[str, float], ...] = ()


class Groups:
    """The groups of a torch optimizer, as the servers see them.

    There is one base rate and one base decay, which factors by tensor multiply. They are fixed at the join, and say all
    as long as schedulers scale the rates of all groups alike. Whatever else differs by group, or comes to do so, a
    group has of its own. The base learning rate is that of the first group whose rate is not 0: its `initial_lr`, which
    schedulers leave there, or else its `lr`. The base weight decay is the first that is not 0; of what else there is
    the first group's values are the base.
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
        first = self._groups[0]
        for index, group in enumerate(self._groups):
            if missing := [key for key in (*_MOVING[kind], *_NEEDED) if key not in group]:
                raise ValueError(
                    f"param_groups[{index}] has no {missing[0]}, which {kind.__name__} has: what was loaded into it is "
                    "another optimizer's"
                )
            for key in _FIXED[kind]:
                if _plain(group.get(key)) != _plain(first.get(key)):
                    raise ValueError(
                        f"param_groups[{index}] has {key}={group.get(key)!r} and param_groups[0] {first.get(key)!r}: "
                        "on the servers it is the same for all groups"
                    )
        self._rates = [float(group.get("initial_lr", group["lr"])) for group in self._groups]
        self._decays = [float(group["weight_decay"]) for group in self._groups]
        self._reference = next((index for index, rate in enumerate(self._rates) if rate > 0), -1)
        if self._reference < 0:
            raise ValueError("lr is 0 in all param_groups: the servers need a base learning rate above 0")
        self.base_learning_rate = self._rates[self._reference]
        self.base_weight_decay = next((decay for decay in self._decays if decay > 0), 0.0)
        self._name = self._servers_name()
        self._numbered = 1 < len(self._groups) <= _GROUPS_MAX
        self._keys = ("lr", "weight_decay", *_MOVING[kind], *_FIXED[kind])
        self._at_join = self._seen = self._look()
        self._base = self._own(0)
        #: At the join.
        self.initial = self._now = self._hyperparameters()

    def factors(self, group: int) -> tuple[float, float]:
        """What the base learning rate and the base weight decay are multiplied by for the tensors of a group."""
        decay = self._decays[group] / self.base_weight_decay if self.base_weight_decay > 0 else 1.0
        return self._rates[group] / self.base_learning_rate, decay

    def number(self, group: int) -> int:
        """The servers' number of a group. A single one is no group to them: it has what holds for all."""
        return group + 1 if self._numbered else 0

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
        values = {"learning_rate": self.base_learning_rate, "weight_decay": self.base_weight_decay, **self._base}
        if self._kind is torch.optim.Adagrad:
            values["initial_accumulator_value"] = float(self._groups[0]["initial_accumulator_value"])
        own = [self._differing(index) for index in range(len(self._groups))] if self._numbered else []
        return psgrad.OptimizerSettings(
            optimizer=self._name, hyperparameters=values, clip_norm=clip_norm, groups=own if any(own) else ()
        )

    def _servers_name(self) -> str:
        group = self._groups[0]
        if self._kind is torch.optim.SGD:
            if not any(each["momentum"] for each in self._groups):
                return "sgd"
            return "nesterov" if group["nesterov"] else "momentum"
        if self._kind is torch.optim.Adam:
            return "adamw" if group.get("decoupled_weight_decay") else "adam"
        return {torch.optim.AdamW: "adamw", torch.optim.Adagrad: "adagrad", torch.optim.RMSprop: "rmsprop"}[self._kind]

    def now(self) -> Hyperparameters:
        """What the groups have now. ValueError, naming group and key, if servers cannot follow."""
        seen = self._look()
        if seen != self._seen:
            for index in range(len(self._groups)):
                self._check_fixed(index)
            self._seen, self._now = seen, self._hyperparameters()
        return self._now

    def _look(self) -> tuple[tuple[Any, ...], ...]:
        return tuple(tuple(_plain(group.get(key)) for key in self._keys) for group in self._groups)

    def _hyperparameters(self) -> Hyperparameters:
        current = float(self._groups[self._reference]["lr"])
        if len(self._groups) == 1:
            return Hyperparameters(current, {"weight_decay": float(self._groups[0]["weight_decay"]), **self._own(0)})
        scale = current / self.base_learning_rate
        own: list[dict[str, float]] = []
        for index, group in enumerate(self._groups):
            values = self._differing(index)
            rate_factor, decay_factor = self.factors(index)
            rate, decay = float(group["lr"]), float(group["weight_decay"])
            if not math.isclose(rate, self._rates[index] * scale, rel_tol=_TOLERANCE, abs_tol=1e-30):
                values["learning_rate"] = self._over(rate, rate_factor, index, "lr")
            if decay != self._decays[index]:
                values["weight_decay"] = self._over(decay, decay_factor, index, "weight_decay")
            own.append(values)
        if not self._numbered and any(own):
            raise ValueError(
                f"there are {len(self._groups)} param_groups: of more than {_GROUPS_MAX} only lr and weight_decay may "
                "differ, and all learning rates must move alike"
            )
        return Hyperparameters(current, {}, tuple(own) if self._numbered else ())

    @staticmethod
    def _over(value: float, factor: float, index: int, key: str) -> float:
        """What servers have to be told, since they multiply it by the tensors' factor."""
        if factor == 0:
            raise ValueError(
                f"param_groups[{index}]: {key} has changed from 0 to {value:g} after the join, and the servers "
                "multiply it by a factor that was fixed then, which is 0: begin with a small value above 0, or change "
                "it before DistributedOptimizer is made"
            )
        return value / factor

    def _differing(self, index: int) -> dict[str, float]:
        return {name: value for name, value in self._own(index).items() if value != self._base[name]}

    def _own(self, index: int) -> dict[str, float]:
        """What may differ by group besides rate and decay, by the servers' names."""
        values: dict[str, float] = {}
        for key in _MOVING[self._kind]:
            value = self._groups[index][key]
            if key == "betas":
                values["beta1"], values["beta2"] = (float(beta) for beta in value)
            elif key != "momentum" or self._name != "sgd":
                values[key] = float(value)
        return values

    def _check_fixed(self, index: int) -> None:
        told = dict(zip(self._keys, self._at_join[index], strict=True))
        group = self._groups[index]
        for key in _FIXED[self._kind]:
            if _plain(group.get(key)) != told[key]:
                raise ValueError(
                    f"param_groups[{index}]: {key} has changed from {told[key]!r} to {group.get(key)!r} after the "
                    "join, and the servers cannot follow it (a scheduler that cycles momentum: cycle_momentum=False)"
                )
        momentum = _plain(group["momentum"]) if self._kind is torch.optim.SGD else None
        if momentum is not None and bool(momentum) != bool(told["momentum"]):
            raise ValueError(
                f"param_groups[{index}]: momentum has changed from {told['momentum']!r} to {momentum!r} after the "
                "join, and where it is 0 torch.optim.SGD leaves its velocity as it is, but the servers do not: "
                "begin with a small value above 0"
            )


class OwnGroups:
    """The groups of an optimizer that servers are told nothing of: they leave all to the worker (--optimizer=local)."""

    def __init__(self) -> None:
        self.initial = Hyperparameters()

    def factors(self, group: int) -> tuple[float, float]:
        return 1.0, 1.0

    def number(self, group: int) -> int:
        return 0

    def now(self) -> Hyperparameters:
        return self.initial


@dataclass(frozen=True)
class Telling:
    """What a push tells the servers of hyperparameters."""

    now: Hyperparameters  # What the groups had when it began.
    learning_rate: float | None = None
    groups: list[Mapping[str, float]] | None = None  # As Client.begin takes them.


class LearningRate:
    """What a push has to tell the servers of hyperparameters, if anything: what is new since the last that was told."""

    def __init__(self, groups: Groups | OwnGroups, told: float | None) -> None:
        """`told`: the learning rate that the servers have; None: not known, in a job that was already training."""
        self._groups = groups
        self._told = told
        self._lead = True
        self._ever_told = False
        # What they have of groups; None: not known. They have what all bring to the join, until a worker tells it.
        self._told_groups = groups.initial if told is not None else None
        self._ever_told_groups = False

    def to_tell(self, lead: bool) -> Telling:
        """What to send with the next push. ValueError as of Groups.now.

        All tell; of those that still train the lowest rank's counts. One that has become the lead tells what it has,
        whatever was told before; but for what groups have been as they are now ever since the join.
        """
        now = self._groups.now()
        if lead and not self._lead:
            self._told = self._told_groups = None
        self._lead = lead
        rate = None if now.learning_rate == self._told else now.learning_rate
        return Telling(now, rate, self._groups_to_tell(now))

    def _groups_to_tell(self, now: Hyperparameters) -> list[Mapping[str, float]] | None:
        told = self._told_groups
        if told is None and not self._ever_told_groups and _same_groups(now, self._groups.initial):
            return None
        if told is None:
            return [now.of_all, *now.of_groups]
        if _same_groups(now, told):
            return None
        # What has not moved may have been set on the servers (ps_ctl).
        moved = {name: value for name, value in now.of_all.items() if value != told.of_all.get(name)}
        return [moved, *now.of_groups]

    def was_told(self, telling: Telling, result: psgrad.Result) -> None:
        """A push with this has ended so: all servers have it if all have applied it."""
        if not result.answers or any(answer not in ("applied", "duplicate") for answer in result.answers):
            return
        if telling.learning_rate is not None:
            self._told = telling.learning_rate
            self._ever_told = True
        if telling.groups is not None:
            self._told_groups = telling.now
            self._ever_told_groups = True

    def went_back(self) -> None:
        """The servers have what a checkpoint has: it is told anew, unless it is theirs alone."""
        if self._ever_told:
            self._told = None
        if self._ever_told_groups:
            self._told_groups = None

    def changed_since(self, telling: Telling) -> str:
        """What the groups have otherwise than when a push under way began, in words; empty: nothing."""
        now = self._groups.now()
        if now.learning_rate != telling.now.learning_rate:
            return "lr"
        return "" if now == telling.now else "a hyperparameter of param_groups"


def _same_groups(one: Hyperparameters, other: Hyperparameters) -> bool:
    return one.of_all == other.of_all and one.of_groups == other.of_groups


def _plain(value: Any) -> Any:
    """Rates and betas may be tensors, which compare to tensors."""
    if isinstance(value, torch.Tensor):
        return value.item()
    if isinstance(value, (tuple, list)):
        return tuple(_plain(part) for part in value)
    return value
