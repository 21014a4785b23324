"""What DistributedOptimizer is given, checked as a whole before anything is joined."""

from __future__ import annotations

import os
from typing import Any

_SAMPLES_MAX = 2**32 - 1


def check_arguments(
    *, overlap: str, accumulate: int, samples: int | None, clip_norm: float | None, unused: str, buffers: str
) -> None:
    """ValueError or TypeError, naming the argument; DistributedOptimizer says what each is."""
    _one_of("overlap", overlap, ("backward", "none"))
    _one_of("unused", unused, ("skip", "error"))
    _one_of("buffers", buffers, ("rank0", "average", "local"))
    check_whole("accumulate", accumulate, 1)
    if samples is not None:
        check_whole("samples", samples, 0)
    if clip_norm is not None and not 0 < clip_norm < float("inf"):
        raise ValueError(f"clip_norm={clip_norm!r}: a number above 0 is expected")


def server_of(server: str | None) -> str:
    """The one that was given, or $PS_SERVER; ValueError if there is none."""
    server = server if server is not None else os.environ.get("PS_SERVER")
    if not server:
        raise ValueError("server: none was given, and $PS_SERVER is not set; psrun sets it, or server='HOST:PORT'")
    return server


def environment() -> dict[str, Any]:
    """What psrun (or torchrun) says of this worker."""
    options: dict[str, Any] = {}
    rank = os.environ.get("RANK")
    if rank:
        if not rank.isdecimal():
            raise ValueError(f"$RANK is {rank!r}: a number from 0 is expected")
        options["rank"] = int(rank)
    job = os.environ.get("PS_JOB")
    if job:
        options["job"] = job
    return options


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r}: one of {', '.join(map(repr, choices))} is expected")


def check_whole(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r}: a whole number is expected")
    if not least <= value <= _SAMPLES_MAX:
        raise ValueError(f"{name}={value}: a number from {least} to {_SAMPLES_MAX} is expected")
