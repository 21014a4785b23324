"""What the comparison runs on and with."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from flags import REPOSITORY

_GIT_LIMIT_S = 30


def machine() -> dict[str, Any]:
    """host, cpu, cores (that this process may use), memory_gib, kernel, python."""
    return {
        "host": platform.node(),
        "cpu": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def _field(path: str, name: str) -> str:
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            key, colon, value = line.partition(":")
            if colon and key.strip() == name:
                return value.strip()
    return ""


def commit() -> tuple[str, bool]:
    """The commit of the sources, and whether they differ from it. ("unknown", False) where there is no git."""
    head = _git("rev-parse", "HEAD")
    return (head, bool(_git("status", "--porcelain"))) if head else ("unknown", False)


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(REPOSITORY), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_GIT_LIMIT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode(errors="replace").strip()


def hashes(programs: list[Path]) -> dict[str, str]:
    """Of the programs that there are, by name: so that a comparison is not continued with others."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in programs if path.exists()}
