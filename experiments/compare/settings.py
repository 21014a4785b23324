"""The flags of a comparison, as --help has them, read and checked."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from experiments import REPOSITORY
from experiments.compare.modes import Mode, parse_mode
from experiments.shared.data import DATASETS, TRAINING_SAMPLES

CONDITIONS = ("even", "straggler", "transient")
SEEDS_MAX = 1000  # Those above it are for tuning.
_MOMENTUM_MAX = 0.9999  # Below 1 in float32 too.
_STEP_TIME_S_MAX = 60
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
# What --command does without.
_OF_PS_WORKER = (
    *("epochs", "batch_size", "learning_rate", "momentum", "model", "activation", "dataset", "data_dir"),
    *("eval_every", "staleness", "step_time", "python"),
)

T = TypeVar("T")


class UsageError(Exception):
    """What is wrong with the flags, in one line."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def make_parser() -> argparse.ArgumentParser:
    """Its errors are UsageError. Values are text, but for those that are true or false."""
    parser = _Parser(
        prog="deploy/compare.sh",
        usage="deploy/compare.sh [--no-build] [--FLAG=VALUE …]\n       deploy/compare.sh report OUTPUT",
        description="Trains one job under several modes and conditions and writes a report that compares them. Stop it "
        "with Ctrl-C; the same command goes on where it stopped, and makes runs that failed again. "
        "The second form writes a comparison's report anew.",
        epilog="--no-build takes the programs as they are. Exit status: 0 all runs are made (one that diverged or "
        "did not learn is a result); 1 a run failed or timed out, or nothing could be run; 2 wrong flags; 130 stopped "
        "by Ctrl-C, 143 by SIGTERM.",
        allow_abbrev=False,
    )
    for name, (default, text, _) in _FLAGS.items():
        more: dict[str, Any] = {"action": "store_true"} if default is False else {}
        more |= {"action": argparse.BooleanOptionalAction} if default is True else {}
        parser.add_argument(f"--{name}", default=default, help=text, **more)
    return parser


# ---- Values: each function reads one from text, or raises ValueError with what is wrong.


def _parts_of(text: str) -> list[str]:
    """What is between commas, but for what is empty."""
    return [part.strip() for part in text.split(",") if part.strip()]


def _whole(least: int, most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if re.fullmatch("[0-9]{1,9}", text) is None or not least <= int(text) <= most:
            raise ValueError(f"expected a whole number from {least} to {most}")
        return int(text)

    return read


def _number(least: float, most: float, above: bool = False) -> Callable[[str], float]:
    """From `least`, or above it, to `most`."""

    def read(text: str) -> float:
        with contextlib.suppress(ValueError):
            if least < float(text) <= most or (not above and float(text) == least):
                return float(text)
        raise ValueError(f"expected a number {f'above {least:g}, at most' if above else f'from {least:g} to'} {most:g}")

    return read


_positive = _number(0, 10_000, above=True)
# Such that in float32 an N-th of it is not 0, nor is any update too large to add.
_learning_rate = _number(1e-12, 1e6)


def _duration_s(text: str, most_s: float = math.inf) -> float | None:
    """None of nothing."""
    if not text:
        return None
    parts = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ms|s|m|h)", text)
    if parts is None or float(parts[1]) == 0:
        raise ValueError("expected a duration above 0, as in 8ms or 10m")
    value = float(parts[1]) * _UNITS_S[parts[2]]
    if value > most_s:
        raise ValueError(f"expected at most {most_s:g} s")
    return value


def _several(read: Callable[[str], T], expected: str = "") -> Callable[[str], tuple[T, ...]]:
    """Values between commas, each once; with `expected` there must be one."""

    def read_all(text: str) -> tuple[T, ...]:
        values = [read(part) for part in _parts_of(text)]
        if expected and not values:
            raise ValueError(f"expected {expected}")
        for at, value in enumerate(values):
            if value in values[:at]:
                raise ValueError(f"'{value}' is there twice")
        return tuple(values)

    return read_all


def _condition(text: str) -> str:
    if text not in CONDITIONS:
        raise ValueError(f"unknown condition '{text}'; the conditions are {', '.join(CONDITIONS)}")
    return text


def _rates(text: str) -> tuple[float, dict[str, float]]:
    """Bsp's, and those of modes, as in "0.05,asp=0.01"."""
    base, rates = [], {}
    for part in _parts_of(text):
        mode, equals, value = part.rpartition("=")
        if equals:
            rates[str(parse_mode(mode))] = _learning_rate(value)
        else:
            base.append(_learning_rate(value))
    if len(base) > 1:
        raise ValueError("there are two rates without a mode")
    return base[0] if base else 0.05, rates


def _command(text: str) -> tuple[str, ...]:
    words = shlex.split(text)
    if text and not words:
        raise ValueError("expected a command, as in 'python train.py'")
    return tuple(words)


def _absolute(text: str) -> Path:
    return Path(text).absolute()


# By name: the default, what --help says, and what reads it; None: it is as it is.
_FLAGS: dict[str, tuple[str | bool | None, str, Callable[[str], Any] | None]] = {
    "modes": (
        "bsp,ssp:2,asp,backup:1,local_sgd:8,easgd:8",
        "modes, with their numbers (%(default)s)",
        _several(parse_mode, "modes, as in bsp,asp"),
    ),
    "workers": ("4", "worker processes (%(default)s)", _whole(2, 256)),
    "conditions": (
        None,
        "even: all workers are alike; straggler: the last one takes four times as long; transient: 5 %% of all batches "
        "take ten times as long (all three; with --real or --command only even)",
        _several(_condition, f"some of {', '.join(CONDITIONS)}"),
    ),
    "seeds": ("2", "how many runs of each, with seeds 1, 2, … (%(default)s)", _whole(1, SEEDS_MAX)),
    "staleness": (
        "0,1,2,4,8,16,32",
        "enforced staleness of the runs that show its price; empty: none (%(default)s)",
        _several(_whole(0, 10_000)),
    ),
    "references": (
        True,
        "one worker with batches of the same size, and of the size of all workers' together; the latter by plain "
        "PyTorch too, where --python has it",
        None,
    ),
    "python": ("python3", "program with PyTorch, for its reference curve (%(default)s)", None),
    "tune": (False, "first give each mode equally many trials over learning rate and momentum", None),
    "epochs": ("4", "passes over the training samples in each run (%(default)s)", _positive),
    "batch_size": ("64", "samples of a worker's batch (%(default)s)", _whole(1, 1_000_000)),
    "learning_rate": (
        "0.05",
        "bsp's (%(default)s). Without --tune, backup:B gets (N - B) N-ths of it for N workers; asp and ssp, which "
        "apply each worker's batch by itself, have no momentum, and get an N-th of learning rate / (1 - momentum), and "
        "for N > 2 of that 2/N; others by name, as in 0.05,asp=0.01, and then with --momentum",
        _rates,
    ),
    "momentum": ("0.9", "bsp's momentum; 0: none (%(default)s)", _number(0, _MOMENTUM_MAX)),
    "model": ("mlp:784,128,10", "as ps_worker has it (%(default)s)", None),
    "activation": ("relu", "as ps_worker has it (%(default)s)", None),
    "dataset": ("fashion-mnist", "as ps_worker has it (%(default)s)", None),
    "data_dir": ("", "as ps_worker has it", lambda text: text and os.path.abspath(text)),
    "eval_every": ("0.25", "epochs between two evaluations (%(default)s)", _positive),
    "servers": ("1", "server processes that the model is spread over (%(default)s)", _whole(1, 64)),
    "command": (
        "",
        "compare the modes on a psgrad script, as in 'python train.py', that psrun starts. Its metrics are read "
        "(PS_METRICS_FILE is set for it), and it may seed itself with PS_SEED; rates, data and epochs are its own, and "
        "the flags for them are refused; so are other conditions than even",
        _command,
    ),
    "output": (str(REPOSITORY / "runs/compare"), "folder of the runs and the report (%(default)s)", _absolute),
    "bin": (str(REPOSITORY / "build/bin"), "folder of ps_server and ps_worker (%(default)s)", _absolute),
    "step_time": (
        "",
        "how long each batch lasts at least: workers are idle for the rest, so that modes are compared and not the "
        "scheduler (four times the measured compute)",
        lambda text: _duration_s(text, _STEP_TIME_S_MAX),
    ),
    "real": (
        False,
        "without idle time, where the machine has a core for each process; the only condition is then even",
        None,
    ),
    "run_timeout": (
        "",
        "after so long a run counts as timed out (by the estimate)",
        _duration_s,
    ),
}


@dataclass(frozen=True)
class Settings:
    """What a comparison is made with. Durations in seconds."""

    modes: tuple[Mode, ...]
    workers: int
    conditions: tuple[str, ...]
    seeds: int
    epochs: float
    output: Path
    batch_size: int
    model: str
    activation: str
    dataset: str
    data_dir: str
    learning_rate: float  # bsp's; the others' follow from it, unless `rates` has them.
    rates: dict[str, float]  # By mode, as written; they are with this momentum:
    momentum: float  # bsp's; asp and ssp have none, unless their rate is written.
    servers: int
    step_time_s: float | None  # None: measured.
    eval_every: float  # Epochs.
    real: bool
    tune: bool
    staleness: tuple[int, ...]
    references: bool
    python: str  # For PyTorch's reference.
    bin: Path
    run_timeout_s: float | None  # None: by the estimate.
    command: tuple[str, ...]  # The user's script; empty: ps_worker.

    def rate_of(self, mode: Mode, staleness: int | None = None) -> tuple[float, float]:
        """The learning rate and momentum without --tune; of one worker if a staleness is enforced."""
        if staleness is None and str(mode) in self.rates:
            return self.rates[str(mode)], self.momentum
        return mode.untuned(self.learning_rate, self.momentum, self.workers, staleness)

    def as_json(self) -> dict[str, Any]:
        """What makes a comparison the one that it is: all but where it is written and when it gives up."""
        left_out = ("output", "bin", "run_timeout_s", "step_time_s")
        shown = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in left_out}
        return shown | {
            "modes": list(map(str, self.modes)),
            "conditions": list(self.conditions),
            "rates": {str(mode): self.rate_of(mode)[0] for mode in self.modes},
            "momentums": {str(mode): self.rate_of(mode)[1] for mode in self.modes},
            "step_time": "measured" if self.step_time_s is None else f"{self.step_time_s * 1000:g}ms",
            "staleness": list(self.staleness),
            "command": shlex.join(self.command),
        }


def parse(arguments: Sequence[str]) -> Settings:
    """UsageError. Exits for --help."""
    parser = make_parser()
    given = vars(parser.parse_args(arguments))
    for flag in _OF_PS_WORKER if given["command"] else ():
        if given[flag] != parser.get_default(flag):
            raise UsageError(f"--{flag} is ps_worker's: with --command the script has its own")
    if given["conditions"] is None:
        given["conditions"] = "even" if given["real"] or given["command"] else ",".join(CONDITIONS)
    if given["command"]:
        given |= {"staleness": "", "references": False}
    for flag, (_, _, read) in _FLAGS.items():
        try:
            given[flag] = read(given[flag]) if read else given[flag]
        except ValueError as error:
            raise UsageError(f"--{flag}={given[flag]}: {error}") from None
    base, rates = given.pop("learning_rate")
    durations = {f"{name}_s": given.pop(name) for name in ("step_time", "run_timeout")}
    settings = Settings(**given, **durations, learning_rate=base, rates=rates)
    _check_relations(settings)
    return settings


def check_batch(settings: Settings, samples: int) -> None:
    """UsageError if a batch of each worker is more than so many samples of the training split."""
    if settings.batch_size * settings.workers > samples:
        raise UsageError(
            f"--batch_size={settings.batch_size}: batches of {settings.workers} workers are more than the {samples} "
            f"training samples of --dataset={settings.dataset}"
        )


def _check_relations(settings: Settings) -> None:
    if settings.dataset in DATASETS and not settings.command:
        check_batch(settings, TRAINING_SAMPLES)
    for mode in settings.modes:
        if mode.name == "backup" and (mode.number or 0) >= settings.workers:
            raise UsageError(f"--modes: {mode} with --workers={settings.workers} leaves no worker to wait for")
    for name in settings.rates:
        if name not in map(str, settings.modes):
            raise UsageError(f"--learning_rate: '{name}' is none of --modes")
    uneven = [condition for condition in settings.conditions if condition != "even"]
    if settings.real and uneven:
        raise UsageError(f"--conditions={uneven[0]} is made with idle time, which --real does without")
    if settings.real and settings.step_time_s is not None:
        raise UsageError("--step_time is idle time, which --real does without")
    if settings.command and uneven:
        raise UsageError(f"--conditions={uneven[0]}: only ps_worker makes idle time; --command knows only even")
    if settings.command and settings.tune:
        raise UsageError("--tune: the rates of --command are the script's own")
