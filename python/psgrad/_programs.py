"""ps_server and ps_ctl as commands of an installed package, beside psrun."""

import os
import sys
from pathlib import Path
from typing import NoReturn


def ps_server() -> NoReturn:
    """Becomes the program, with the same arguments."""
    _become("ps_server")


def ps_ctl() -> NoReturn:
    """Becomes the program, with the same arguments."""
    _become("ps_ctl")


def _become(name: str) -> NoReturn:
    program = str(Path(__file__).absolute().parent / "bin" / name)
    try:
        os.execv(program, [name, *sys.argv[1:]])
    except OSError as error:
        sys.exit(f"{name}: {program}: {error.strerror}")
