"""Runs the experiments that are named, one after another, and writes their pages."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from . import REPOSITORY
from .index import write_index
from .lab import ExperimentFailed, Lab, Skipped
from .page import write_page

# In the order in which `all` runs them, and the pages are listed.
NAMES = ("digits", "hidden_layers", "function", "scaling", "processes", "products", "own_data", "links")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 one failed, 2 wrong flags, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="deploy/experiments/NAME.sh", description=__doc__, allow_abbrev=False)
    parser.add_argument("names", nargs="+", choices=[*NAMES, "all"], metavar="NAME", help=f"{', '.join(NAMES)}, or all")
    parser.add_argument("--quick", action="store_true", help="all parts, so short that no figure is worth quoting")
    parser.add_argument("--output", type=Path, default=Path("runs/experiments"), help="folder for logs and metrics")
    parser.add_argument("--pages", type=Path, help="folder for the pages (default: OUTPUT/pages)")
    parser.add_argument("--bin", type=Path, default=REPOSITORY / "build/bin", help="folder of the programs")
    parser.add_argument("--data_dir", default=_shared_data(), help="folder that holds mnist/, as of ps_worker")
    parser.add_argument("--python", default=sys.executable, help="an interpreter with PyTorch, for runs beside ours")
    options = parser.parse_args(arguments)
    names = NAMES if "all" in options.names else tuple(dict.fromkeys(options.names))
    for program in ("ps_server", "ps_worker", "ps_bench"):
        if not (options.bin / program).exists():
            parser.error(f"--bin={options.bin}: there is no program {program}; without --no-build it is built")
    form = "quick" if options.quick else "full"
    output = options.output / form
    try:
        done = [_run(name, options, output) for name in names]
    except KeyboardInterrupt:
        print("experiments: stopped; jobs that were done are kept, and the same command goes on", file=sys.stderr)
        return 128 + signal.SIGINT
    pages = options.pages or output / "pages"
    print(f"experiments: the list of all: {write_index(pages, NAMES)}", file=sys.stderr)
    return 0 if all(done) else 1


def _shared_data() -> str:
    import os

    return os.environ.get("PS_DATA_DIR", "")


def _run(name: str, options: argparse.Namespace, output: Path) -> bool:
    """Whether it was done, or skipped."""
    lab = Lab(name, (output / name).resolve(), options.bin.resolve(), options.quick, options.data_dir, options.python)
    lab.folder.mkdir(parents=True, exist_ok=True)
    lab.stop.watch()
    began = time.monotonic()
    try:
        page = importlib.import_module(f".{name}", __package__).run(lab)
    except Skipped as skipped:
        lab.say(f"SKIPPED: {skipped}")
        return True
    except ExperimentFailed as failed:
        lab.say(f"FAILED: {failed}")
        return False
    took_s = time.monotonic() - began
    path = write_page(page, lab, options.pages or output / "pages", took_s)
    lab.say(f"done in {took_s:.0f} s: {path}")
    return True
