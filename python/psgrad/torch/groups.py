"""Parameter groups: factors of their tensors at the join, and the learning rate as schedulers move it afterwards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from psgrad.torch.settings import fixed_keys

# Schedulers multiply and divide in double; what differs by less than this is rounding.
_TOLERANCE = 1e-6


class Groups:
    """The groups of a torch optimizer, as the servers see them: one base rate and decay, and factors by tensor.

    The base learning rate is that of the first group whose rate is not 0: its `initial_lr`, which schedulers leave
    there, or else its `lr`. The base weight decay is the first that is not 0.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """ValueError, naming group and key, if groups differ in what servers have one of."""
        self._groups: list[dict[str, Any]] = optimizer.param_groups
        self._keys = fixed_keys(optimizer)
        first = self._groups[0]
        for index, group in enumerate(self._groups):
            for key in self._keys:
                if _plain(group.get(key)) != _plain(first.get(key)):
                    raise ValueError(
                        f"param_groups[{index}] has {key}={group.get(key)!r} and param_groups[0] {first.get(key)!r}: "
                        "only lr and weight_decay may differ by group on the servers"
                    )
        self._fixed = [{key: _plain(group.get(key)) for key in (*self._keys, "weight_decay")} for group in self._groups]
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


class LearningRate:
    """Which learning rate a push has to tell the servers, if any: what is new since the last that was told."""

    def __init__(self, groups: Groups, told: float | None) -> None:
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

    def was_told(self, rate: float | None) -> None:
        """A push with this has been applied."""
        if rate is not None:
            self._told = rate
            self._ever_told = True

    def went_back(self) -> None:
        """The servers have the rate of a checkpoint: it is told anew, unless it is theirs alone."""
        if self._ever_told:
            self._told = None

    def differs(self, rate: float | None) -> bool:
        """Whether the groups' rate is another one than a push under way tells."""
        return self._groups.learning_rate() != (self._told if rate is None else rate)


def group_of(groups: Sequence[dict[str, Any]]) -> dict[int, int]:
    """The group of each parameter, by id of the parameter."""
    return {id(parameter): index for index, group in enumerate(groups) for parameter in group["params"]}


def _plain(value: Any) -> Any:
    """Rates and betas may be tensors, which compare to tensors."""
    if isinstance(value, torch.Tensor):
        return value.item()
    if isinstance(value, (tuple, list)):
        return tuple(_plain(part) for part in value)
    return value
