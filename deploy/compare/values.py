"""Values of flags: each function reads one from text, or raises ValueError with what is wrong."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable
from typing import TypeVar

from modes import Mode, parse_mode

CONDITIONS = ("even", "straggler", "transient")
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ms|s|m|h)")
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


def number(text: str, *, zero: bool = False) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise ValueError(f"expected a number {'of at least' if zero else 'above'} 0")
    return value


def duration_s(text: str) -> float:
    parts = _DURATION.fullmatch(text)
    if parts is None or float(parts[1]) == 0:
        raise ValueError("expected a duration above 0, as in 8ms or 10m")
    return float(parts[1]) * _UNITS_S[parts[2]]


def momentum(text: str) -> float:
    value = number(text, zero=True)
    if value >= 1:
        raise ValueError("expected a number of at least 0 and below 1")
    return value


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
            rates[str(parse_mode(mode))] = number(value)
        elif base is None:
            base = number(value)
        else:
            raise ValueError("there are two rates without a mode")
    return base, rates


def command(text: str) -> tuple[str, ...]:
    words = shlex.split(text)
    if text and not words:
        raise ValueError("expected a command, as in 'python train.py'")
    return tuple(words)
