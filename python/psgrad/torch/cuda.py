"""CUDA cards, as staging.py needs them: streams, events and pinned memory. Imported where there is such a tensor."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from psgrad.torch.staging import Device, Pair, page_ranges

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all cards.
# Before it, pages that are pinned may become a forked child's (a DataLoader's worker's), and the parent has others.
_LINUX = (5, 9)

_cuda: Any = torch.cuda  # In part without types.


class Cuda(Device):
    """One card."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.copies = _cuda.Stream(device)

    def __str__(self) -> str:
        return str(self._device)

    def current(self) -> Any:
        return _cuda.current_stream(self._device)

    def record(self, stream: Any) -> Any:
        event = _cuda.Event()
        event.record(stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)

    def happened(self, event: Any) -> bool:
        return bool(event.query())

    # Values are converted on the card, so that the host's CPU has nothing to do with them: it is the servers' as well.
    # What is needed for it meanwhile is allocated on the stream of the copies, and so is used again after them.

    @torch.no_grad()
    def copy_out(self, pairs: Sequence[Pair]) -> None:
        with _cuda.stream(self.copies):
            for tensor, host in pairs:
                host.copy_(tensor.detach().to(torch.float32).contiguous(), non_blocking=True)

    @torch.no_grad()
    def copy_in(self, pairs: Sequence[Pair]) -> None:
        with _cuda.stream(self.copies):
            for tensor, host in pairs:
                plain = tensor.dtype is torch.float32 and tensor.is_contiguous()
                # Else copy_() would convert on the host.
                tensor.copy_(host if plain else host.to(self._device, non_blocking=True), non_blocking=True)

    def pin(self, memory: Sequence[torch.Tensor]) -> Callable[[], None]:
        if _linux() < _LINUX:
            raise RuntimeError(f"this is Linux {os.uname().release}, and before 5.9 no process may pin memory and fork")
        runtime = _cuda.cudart()
        pinned: list[int] = []
        kept = list(memory)

        def unpin() -> None:
            for begin in pinned:
                runtime.cudaHostUnregister(begin)
            pinned.clear()
            kept.clear()

        for begin, end in page_ranges(memory, mmap.PAGESIZE):
            error = int(runtime.cudaHostRegister(begin, end - begin, _PORTABLE))
            if error != 0:
                unpin()
                # The CUDA runtime has the error once more, for the next kernel; that is to be none of the model's.
                with contextlib.suppress(RuntimeError):
                    torch.zeros(1, device=self._device)
                raise RuntimeError(f"cudaHostRegister of {end - begin} bytes: CUDA error {error}")
            pinned.append(begin)
        return unpin


def _linux() -> tuple[int, ...]:
    """(6, 1) for "6.1.0-13-amd64"."""
    return tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])
