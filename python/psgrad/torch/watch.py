"""Notices writes that no version counter counts, through `.data` and NumPy.

In the first steps all tensors are looked at. Later it is one a step, in turn, and of a large one a part that moves on:
so what a script does in each step is noticed soon, and looking costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

_ALL_STEPS = 2
_PART = 1 << 20  # Elements.
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Watch:
    """Of tensors in the host's memory: with those on a card the host would have to wait for it.

    Used by the thread that trains, and by autograd's in its hooks.
    """

    def __init__(self, turn: Sequence[int]) -> None:
        """`turn`: which tensors are looked at in turn, by index of the layout."""
        self._turn = list(turn)
        self._looks: dict[int, int] = {}  # What its values were like.
        self._steps = 0
        self.every = True  # All are looked at in this step;
        self.one = -1  # else the one with this index.

    def next_step(self) -> None:
        """What was seen is forgotten; others are looked at."""
        self._looks.clear()
        self._steps += 1
        later = self._steps - _ALL_STEPS
        self.every = later < 0
        if later >= 0 and self._turn:
            self.one = self._turn[later % len(self._turn)]

    def forget(self) -> None:
        """The tensors may change from now on."""
        self._looks.clear()

    def look_at(self) -> Sequence[int]:
        """Those that are looked at in this step."""
        return self._turn if self.every else [self.one] if self._turn else []

    def saw(self, index: int, values: torch.Tensor) -> None:
        """The tensor is to stay as it is, if it is one of those that are looked at."""
        if (self.every or index == self.one) and values.device.type == "cpu":
            self._looks[index] = self._look(values)

    def changed(self, values: Callable[[int], torch.Tensor]) -> list[int]:
        """Those that have not, by what they are now."""
        return [index for index, look in self._looks.items() if look != self._look(values(index))]

    @torch.no_grad()
    def _look(self, values: torch.Tensor) -> int:
        """The sum of the values' bits, which does not depend on the order in which they are added."""
        if values.is_sparse:
            values = values.coalesce().values()
        if not self.every and values.numel() > _PART:
            parts = -(-values.numel() // _PART)
            begin = self._steps // len(self._turn) % parts * _PART
            values = values.reshape(-1)[begin : begin + _PART]
        return int(values.detach().view(_BITS[values.element_size()]).sum(dtype=torch.int64))
