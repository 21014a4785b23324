"""Where the C++ programs are."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def find(name: str) -> str:
    """The path of ps_server or ps_ctl: the wheel's own, else $PSGRAD_BIN's, else PATH's.

    FileNotFoundError, with the places that were looked at.
    """
    folders = [Path(__file__).absolute().parent / "bin"]
    if given := os.environ.get("PSGRAD_BIN"):
        folders.append(Path(given))
    for folder in folders:
        program = folder / name
        if program.is_file() and os.access(program, os.X_OK):
            return str(program)
    if on_path := shutil.which(name):
        return on_path
    places = ", ".join(str(folder) for folder in folders)
    hint = "" if given else "; $PSGRAD_BIN, which may name the folder of a build (build/bin), is not set"
    raise FileNotFoundError(f"{name}: there is no such program in {places} or on PATH{hint}")
