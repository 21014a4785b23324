"""The command lines of a run's processes."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from flags import REPOSITORY
from plan import RunSpec, experiment_flags
from settings import Settings

# For workers to wait for each other before the training; reading the data takes a second.
_START_TIMEOUT = "2m"


def server_flags(spec: RunSpec, settings: Settings) -> list[str]:
    """What all servers of the run are given."""
    if settings.command:
        return spec.mode.server_flags
    flags = [*spec.mode.server_flags, "--budget=job", f"--learning_rate={spec.rate.learning_rate:.9g}"]
    if spec.rate.momentum > 0:
        return [*flags, "--optimizer=momentum", f"--momentum={spec.rate.momentum:.9g}"]
    return [*flags, "--optimizer=sgd"]


def server_command(spec: RunSpec, settings: Settings, folder: Path, shard: int, chief: str | None) -> list[str]:
    """Of ps_server number `shard`; `chief` is the address of number 0, for the others."""
    flags = ["--listen=127.0.0.1:0", f"--num_workers={spec.workers}"]
    if settings.servers > 1:
        flags += [f"--num_shards={settings.servers}", f"--shard={shard}"]
    if chief is not None:
        flags.append(f"--chief={chief}")
    metrics = f"--metrics_file={folder / f'server{shard}.jsonl'}"
    return [str(settings.bin / "ps_server"), *flags, *server_flags(spec, settings), metrics]


def worker_flags(spec: RunSpec, settings: Settings) -> list[str]:
    """What all workers of the run are given."""
    if settings.command:
        return list(settings.command)
    budget = f"--steps={spec.steps}" if spec.steps else f"--epochs={spec.epochs:.9g}"
    flags = [
        f"--model={settings.model}",
        f"--activation={settings.activation}",
        f"--dataset={settings.dataset}",
        f"--batch_size={spec.batch_size}",
        budget,
        f"--seed={spec.seed}",
        f"--eval_every={spec.eval_every:.9g}",
        f"--start_timeout={_START_TIMEOUT}",
    ]
    if settings.data_dir:
        flags.append(f"--data_dir={settings.data_dir}")
    if spec.validation_split > 0:
        flags.append(f"--validation_split={spec.validation_split:.9g}")
    return flags + experiment_flags(spec)


def worker_command(spec: RunSpec, settings: Settings, folder: Path, rank: int, server: str) -> list[str]:
    """Of ps_worker."""
    own = [f"--server={server}", f"--rank={rank}", f"--metrics_file={folder / f'worker{rank}.jsonl'}"]
    return [str(settings.bin / "ps_worker"), *own, *worker_flags(spec, settings)]


def script_command(spec: RunSpec, settings: Settings, folder: Path) -> list[str]:
    """psrun with the user's script."""
    words = list(settings.command)
    # psrun runs scripts with the interpreter that it runs in itself.
    interpreter = sys.executable
    if os.path.basename(words[0]).startswith("python"):
        interpreter = words.pop(0)
    own = [
        f"--workers={spec.workers}",
        f"--servers={settings.servers}",
        f"--metrics_file={folder / 'server.jsonl'}",
    ]
    return [interpreter, "-m", "psgrad.run", *own, *server_flags(spec, settings), *words]


def script_environment(spec: RunSpec, settings: Settings, folder: Path) -> dict[str, str]:
    """What the user's script and psrun find in their environment."""
    environment = {"PS_METRICS_FILE": str(folder / "worker{rank}.jsonl"), "PS_SEED": str(spec.seed)}
    if "PSGRAD_BIN" not in os.environ and (settings.bin / "ps_server").exists():
        environment["PSGRAD_BIN"] = str(settings.bin)
    return environment


def name_script_metrics(folder: Path) -> None:
    """psrun's names of the servers' metrics files become those of other runs: server.jsonl is of the only one,
    server.1.jsonl of number 1.
    """
    for path in folder.glob("server*.jsonl"):
        number = path.name.removeprefix("server").removesuffix(".jsonl").strip(".")
        path.rename(folder / f"server{number or 0}.jsonl")


def script_problem(settings: Settings) -> str | None:
    """Why the user's script cannot be started by psrun, if it cannot."""
    words = settings.command
    python = os.path.basename(words[0]).startswith("python")
    if python and shutil.which(words[0]) is None:
        return f"--command: there is no program {words[0]}"
    rest = words[1:] if python else words
    if not rest:
        return "--command: the script is missing, as in 'python train.py'"
    if rest[0].startswith("-") and rest[0] != "-m":
        return f"--command: {rest[0]}: flags of Python cannot be passed on; expected a script or -m MODULE"
    if rest[0] != "-m" and not Path(rest[0]).exists():
        return f"--command: there is no script {rest[0]}"
    if not (python or shutil.which("psrun")) and not (REPOSITORY / "python/psgrad").exists():
        return "--command: psgrad is not installed (pip install .)"
    return None
