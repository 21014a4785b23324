"""The command lines of a run's processes, and whether what they start is there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.compare.plan import RunSpec
from experiments.compare.settings import Settings, UsageError
from experiments.shared.data import DATASETS

# For workers to wait for each other before the training; reading the data takes a second.
_START_TIMEOUT = "2m"
_IMPORT_LIMIT_S = 120


def server_flags(spec: RunSpec, settings: Settings) -> list[str]:
    if spec.pytorch:
        return []
    if settings.command:
        return spec.mode.server_flags
    flags = [*spec.mode.server_flags, "--budget=job", f"--learning_rate={spec.rate.learning_rate:.9g}"]
    if spec.step_time_s > 0:
        # Who waits at shared memory looks again and again for a while: with idle time, half of all processor time.
        flags.append("--shared_memory=off")
    if spec.rate.momentum > 0:
        return [*flags, "--optimizer=momentum", f"--momentum={spec.rate.momentum:.9g}"]
    return [*flags, "--optimizer=sgd"]


def worker_flags(spec: RunSpec, settings: Settings) -> list[str]:
    if settings.command:
        return list(settings.command)
    flags = [
        f"--model={settings.model}",
        f"--dataset={settings.dataset}",
        f"--batch_size={spec.batch_size}",
        f"--steps={spec.steps}" if spec.steps else f"--epochs={spec.epochs:.9g}",
        f"--seed={spec.seed}",
        f"--eval_every={spec.eval_every:.9g}",
    ]
    if spec.pytorch or settings.model.count(",") != 1:  # Without a hidden layer ps_worker refuses it.
        flags.append(f"--activation={settings.activation}")
    if spec.pytorch or settings.data_dir:
        flags.append(f"--data_dir={settings.data_dir}")
    if spec.pytorch:
        return [*flags, f"--learning_rate={spec.rate.learning_rate:.9g}", f"--momentum={spec.rate.momentum:.9g}"]
    if spec.validation_split > 0:
        flags.append(f"--validation_split={spec.validation_split:.9g}")
    return [*flags, f"--start_timeout={_START_TIMEOUT}", *spec.experiment_flags]


def pytorch_command(spec: RunSpec, settings: Settings, folder: Path) -> list[str]:
    program = Path(__file__).with_name("pytorch_reference.py")
    return [settings.python, "-B", str(program), f"--folder={folder}", *worker_flags(spec, settings)]


def script_command(spec: RunSpec, settings: Settings, folder: Path) -> list[str]:
    words = list(settings.command)
    # psrun runs scripts with the interpreter that it runs in itself.
    interpreter = words.pop(0) if _is_python(words[0]) else sys.executable
    own = [f"--workers={spec.workers}", f"--servers={settings.servers}", f"--metrics_file={folder / 'server.jsonl'}"]
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


def why_no_pytorch(settings: Settings) -> str:
    """Why PyTorch's reference curve cannot be made; empty if it can."""
    if settings.dataset not in DATASETS:
        return f"it is made for {' and '.join(DATASETS)}, not for --dataset={settings.dataset}"
    why = _import_error(settings.python, "torch")
    return why and f"--python={settings.python}: {why}"


def _import_error(python: str, module: str) -> str:
    """Why it cannot be imported; empty if it can."""
    command = [python, "-c", f"import {module}"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_LIMIT_S, check=False)
    except OSError as error:
        return str(error.strerror)
    except subprocess.TimeoutExpired:
        return f"importing {module} took longer than {_IMPORT_LIMIT_S} s"
    return "" if found.returncode == 0 else (found.stderr.strip().splitlines() or ["it ended without a word"])[-1]


def check_programs(settings: Settings) -> None:
    """UsageError if a program that will be started is not there."""
    if settings.command:
        _check_script(settings.command)
        return
    for name in ("ps_server", "ps_worker"):
        if not os.access(settings.bin / name, os.X_OK):
            raise UsageError(f"--bin={settings.bin}: there is no program {name}; without --no-build it is built")


def _check_script(words: Sequence[str]) -> None:
    python = _is_python(words[0])
    if python and shutil.which(words[0]) is None:
        raise UsageError(f"--command: there is no program {words[0]}")
    rest = words[1:] if python else words
    if not rest:
        raise UsageError("--command: the script is missing, as in 'python train.py'")
    if rest[0].startswith("-") and rest[0] != "-m":
        raise UsageError(f"--command: {rest[0]}: Python's flags cannot be passed on; expected a script or -m MODULE")
    if rest[0] != "-m" and not Path(rest[0]).exists():
        raise UsageError(f"--command: there is no script {rest[0]}")
    interpreter = words[0] if python else sys.executable
    if why := _import_error(interpreter, "psgrad"):
        raise UsageError(f"--command: {interpreter} cannot import psgrad: {why}")


def _is_python(word: str) -> bool:
    return os.path.basename(word).startswith("python")
