"""Values of flags: each function reads one from text, or raises ValueError with what is wrong."""

from __future__ import annotations

import contextlib
import math
import re
import shlex
from collections.abc import Callable
from typing import TypeVar

from modes import Mode, parse_mode

CONDITIONS = ("even", "straggler", "transient")
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ms|s|m|h)")
_STEP_TIME_S_MAX = 60
_MOMENTUM_MAX = 0.9999  # Below 1 in float32 too.
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}

T = TypeVar("T")


def parts_of(text: str) -> list[str]:
    """Between commas, without those that are empty."""
    return [part.strip() for part in text.split(",") if part.strip()]


def whole(least: int, most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if re.fullmatch("[0-9]{1,9}", text) is None or not least <= int(text) <= most:
            raise ValueError(f"expected a whole number from {least} to {most}")
        return int(text)

    return read


def number(text: str, *, most: float, least: float = 0) -> float:
    """Above 0, and of at least `least`."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value) or value <= 0 or not least <= value <= most:
        raise ValueError(f"expected a number {f'from {least:g} to' if least else 'above 0, at most'} {most:g}")
    return value


def epochs(text: str) -> float:
    return number(text, most=10_000)


def duration_s(text: str) -> float:
    parts = _DURATION.fullmatch(text)
    if parts is None or float(parts[1]) == 0:
        raise ValueError("expected a duration above 0, as in 8ms or 10m")
    return float(parts[1]) * _UNITS_S[parts[2]]


def step_time_s(text: str) -> float:
    value = duration_s(text)
    if value > _STEP_TIME_S_MAX:
        raise ValueError(f"expected at most {_STEP_TIME_S_MAX} s")
    return value


def learning_rate(text: str) -> float:
    """In float32, an N-th of it is not 0, nor is any update too large to add."""
    return number(text, least=1e-12, most=1e6)


def momentum(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= float(text) <= _MOMENTUM_MAX:
            return float(text)
    raise ValueError(f"expected a number from 0 to {_MOMENTUM_MAX}")


def distinct(values: list[T]) -> tuple[T, ...]:
    for at, value in enumerate(values):
        if value in values[:at]:
            raise ValueError(f"'{value}' is there twice")
    return tuple(values)


def modes(text: str) -> tuple[Mode, ...]:
    if not parts_of(text):
        raise ValueError("expected modes, as in bsp,asp")
    return distinct([parse_mode(part) for part in parts_of(text)])


def conditions(text: str) -> tuple[str, ...]:
    for part in parts_of(text):
        if part not in CONDITIONS:
            raise ValueError(f"unknown condition '{part}'; the conditions are {', '.join(CONDITIONS)}")
    if not parts_of(text):
        raise ValueError(f"expected some of {', '.join(CONDITIONS)}")
    return distinct(parts_of(text))


def staleness(text: str) -> tuple[int, ...]:
    return distinct([whole(0, 10_000)(part) for part in parts_of(text)])


def rates(text: str) -> tuple[float | None, dict[str, float]]:
    """Of "0.05,asp=0.01": bsp's, and those of modes."""
    base, rates = None, {}
    for part in parts_of(text):
        mode, equals, value = part.rpartition("=")
        if equals:
            rates[str(parse_mode(mode))] = learning_rate(value)
        elif base is None:
            base = learning_rate(value)
        else:
            raise ValueError("there are two rates without a mode")
    return base, rates


def command(text: str) -> tuple[str, ...]:
    words = shlex.split(text)
    if text and not words:
        raise ValueError("expected a command, as in 'python train.py'")
    return tuple(words)
