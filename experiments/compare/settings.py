"""The flags of a comparison, checked."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import values
from flags import UsageError, make_parser
from idx_files import DATASETS, TRAINING_SAMPLES
from modes import Mode
from values import CONDITIONS

SEEDS_MAX = 1000  # Those above it are for tuning.
WORKERS_MAX = 256
# What --command does without.
_OF_PS_WORKER = (
    *("epochs", "batch_size", "learning_rate", "momentum", "model", "activation", "dataset", "data_dir"),
    *("eval_every", "staleness", "step_time", "python"),
)

T = TypeVar("T")


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
    python: str  # Of PyTorch's reference.
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
        return {
            "modes": [str(mode) for mode in self.modes],
            "workers": self.workers,
            "conditions": list(self.conditions),
            "seeds": self.seeds,
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "model": self.model,
            "activation": self.activation,
            "dataset": self.dataset,
            "data_dir": self.data_dir,
            "learning_rate": self.learning_rate,
            "rates": {str(mode): self.rate_of(mode)[0] for mode in self.modes},
            "momentum": self.momentum,
            "momentums": {str(mode): self.rate_of(mode)[1] for mode in self.modes},
            "servers": self.servers,
            "step_time": "measured" if self.step_time_s is None else f"{self.step_time_s * 1000:g}ms",
            "eval_every": self.eval_every,
            "real": self.real,
            "tune": self.tune,
            "staleness": list(self.staleness),
            "references": self.references,
            "python": self.python,
            "command": shlex.join(self.command),
        }


def _read(flag: str, text: str, read: Callable[[str], T]) -> T:
    """UsageError, with the flag's name."""
    try:
        return read(text)
    except ValueError as error:
        raise UsageError(f"--{flag}={text}: {error}") from None


def parse(arguments: Sequence[str]) -> Settings:
    """UsageError. Exits for --help."""
    parser = make_parser()
    given = vars(parser.parse_args(arguments))
    for flag in _OF_PS_WORKER if given["command"] else ():
        if given[flag] != parser.get_default(flag):
            raise UsageError(f"--{flag} is ps_worker's: with --command the script has its own")

    def read(flag: str, reader: Callable[[str], T]) -> T:
        return _read(flag, given[flag], reader)

    base, rates = read("learning_rate", values.rates)
    only_even = given["real"] or bool(given["command"])
    if given["conditions"] is None:
        given["conditions"] = "even" if only_even else ",".join(CONDITIONS)
    settings = Settings(
        modes=read("modes", values.modes),
        workers=read("workers", values.whole(2, WORKERS_MAX)),
        conditions=read("conditions", values.conditions),
        seeds=read("seeds", values.whole(1, SEEDS_MAX)),
        epochs=read("epochs", values.epochs),
        output=Path(given["output"]).absolute(),
        batch_size=read("batch_size", values.whole(1, 1_000_000)),
        model=given["model"],
        activation=given["activation"],
        dataset=given["dataset"],
        data_dir=given["data_dir"] and os.path.abspath(given["data_dir"]),
        learning_rate=0.05 if base is None else base,
        rates=rates,
        momentum=read("momentum", values.momentum),
        servers=read("servers", values.whole(1, 64)),
        step_time_s=read("step_time", values.step_time_s) if given["step_time"] else None,
        eval_every=read("eval_every", values.epochs),
        real=given["real"],
        tune=given["tune"],
        staleness=() if given["command"] else read("staleness", values.staleness),
        references=given["references"] and not given["command"],
        python=given["python"],
        bin=Path(given["bin"]).absolute(),
        run_timeout_s=read("run_timeout", values.duration_s) if given["run_timeout"] else None,
        command=read("command", values.command),
    )
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
    if settings.command:
        if uneven:
            raise UsageError(f"--conditions={uneven[0]}: only ps_worker makes idle time; --command knows only even")
        if settings.tune:
            raise UsageError("--tune: the rates of --command are the script's own")


def fail_usage(error: UsageError) -> int:
    """Says what is wrong; the exit status."""
    print(f"compare: {error} (--help lists the flags)", file=sys.stderr)
    return 2
