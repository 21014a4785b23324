"""What runs are made on and with, and which packages a report needs."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from experiments import REPOSITORY

_GIT_LIMIT_S = 30
_WHY_CHARACTERS = 200
_PACKAGES = ("jinja2", "matplotlib.backends.backend_agg", "matplotlib.figure", "pandas", "scipy.stats")


def cores() -> list[int]:
    """The processors that this process may use."""
    return sorted(os.sched_getaffinity(0))


def machine() -> dict[str, Any]:
    """host, cpu, cores (that this process may use), memory_gib, kernel, python."""
    return {
        "host": platform.node(),
        "cpu": _cpu_name() or platform.machine(),
        "cores": len(cores()),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def _cpu_name() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return ""


def commit() -> tuple[str, bool]:
    """The commit of the sources, and whether they differ from it. ("unknown", False) where there is no git."""
    head = _git("rev-parse", "HEAD")
    return (head, bool(_git("status", "--porcelain"))) if head else ("unknown", False)


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(REPOSITORY), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_GIT_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode(errors="replace").strip()


@functools.cache
def file_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def write_json(path: Path, value: object) -> None:
    write_text(path, json.dumps(value, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """All of it or nothing: whoever has the old file open sees all of that."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> dict[str, Any]:
    """The object that the file has; empty if it has none."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


def why_no_reports() -> str:
    """What a report lacks here, and what installs it; empty if it can be written."""
    import importlib

    why = ""
    for name in _PACKAGES:
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # A broken numpy says much before its exception.
                importlib.import_module(name)
        except ModuleNotFoundError as error:
            why = f"{error.name} is missing"
        except Exception as error:  # An installation can be broken in any way.
            said = " ".join(f"{type(error).__name__}: {error}".split())
            why = f"{name.partition('.')[0]} cannot be imported ({said[:_WHY_CHARACTERS]})"
        if why:
            return f"a report cannot be written, since {why}: deploy/install-deps.sh --plots installs what it needs"
    return ""
