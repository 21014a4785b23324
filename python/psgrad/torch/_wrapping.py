"""An optimizer around one of torch.optim: schedulers, groups and state_dict() see the wrapped one's."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NoReturn

import torch

log = logging.getLogger("psgrad")


class WrappingOptimizer(torch.optim.Optimizer):
    """Shares its parameter groups and its state with the wrapped one. Who takes steps is the subclass's to say."""

    # The wrapped optimizer takes steps in this process, so its state is here.
    _steps_here = False

    def __init__(self, wrapped: torch.optim.Optimizer) -> None:
        self._complete = False
        super().__init__(wrapped.param_groups, wrapped.defaults)
        self.param_groups = wrapped.param_groups  # The same list: schedulers of either move both.
        self.state = wrapped.state
        self._wrapped = wrapped
        self._complete = True
        self._state_said = False

    def state_dict(self) -> dict[str, Any]:
        """The groups' hyperparameters. The optimizer's state is on the servers (their checkpoints have it), not in it.

        In modes in which this worker takes steps of its own (local_sgd, easgd) its state is there.
        """
        packed = self._wrapped.state_dict()
        if self._steps_here:
            return packed
        if not self._state_said:
            self._state_said = True
            log.warning(
                "state_dict(): the optimizer's state (momentum and the like) is on the servers, so it is not in it; "
                "their checkpoints have it (ps_server --checkpoint_dir)"
            )
        return {"state": {}, "param_groups": packed["param_groups"]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes the hyperparameters of the groups: lr follows, and the others must be what they are.

        ValueError if the groups are others, or there is state, which the servers hold.
        """
        if state_dict["state"] and not self._steps_here:
            raise ValueError(
                "load_state_dict: this has an optimizer's state (momentum and the like), which the servers hold: "
                "restore it with them (ps_server --restore), and load only {'state': {}, 'param_groups': …} here"
            )
        saved = state_dict["param_groups"]
        if [len(group["params"]) for group in saved] != [len(group["params"]) for group in self.param_groups]:
            raise ValueError("load_state_dict: the parameter groups are others than this optimizer's")
        if state_dict["state"]:
            self._load_local_state(state_dict)
        for group, values in zip(
            self.param_groups, saved, strict=True
        ):  # In place: the wrapped optimizer has them too.
            group.update((key, value) for key, value in values.items() if key not in ("params", "param_names"))

    def _load_local_state(self, state_dict: Mapping[str, Any]) -> None:
        groups = list(self.param_groups)
        self._wrapped.load_state_dict(dict(state_dict))  # It makes groups of its own of them.
        self._wrapped.param_groups = self.param_groups
        self.param_groups[:] = groups
        self.state = self._wrapped.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """RuntimeError: the groups were told to the servers when this worker joined."""
        if self._complete:
            raise RuntimeError(
                "add_param_group: the servers were told the groups at the join; add it to the optimizer before "
                "DistributedOptimizer is made"
            )
        super().add_param_group(param_group)

    def __getstate__(self) -> NoReturn:
        raise TypeError("a DistributedOptimizer belongs to its process: copy or save the model, or state_dict()")

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.__getstate__()
