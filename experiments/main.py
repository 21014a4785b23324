"""Runs the experiments that are named, one after another, and writes their pages."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from experiments import REPOSITORY
from experiments.lab import ExperimentFailed, Lab, Skipped
from experiments.page import mark_earlier, write_index, write_page
from experiments.shared.processes import Stop

# In the order in which `all` runs them, and the pages are listed.
NAMES = (
    "digits",
    "hidden_layers",
    "function",
    "scaling",
    "processes",
    "products",
    "own_data",
    "links",
    "wire",
    "slow_links",
    "slow_worker",
    "elastic",
    "gaussians",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 one failed, after which the others have run, 2 wrong flags, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="deploy/experiments.sh", description=__doc__, allow_abbrev=False)
    parser.add_argument("names", nargs="+", choices=[*NAMES, "all"], metavar="NAME", help=f"{', '.join(NAMES)}, or all")
    parser.add_argument("--quick", action="store_true", help="all parts, so short that no figure is worth quoting")
    parser.add_argument("--fresh", action="store_true", help="run again what earlier runs have left there")
    parser.add_argument("--output", type=Path, default=Path("runs/experiments"), help="folder for logs and metrics")
    parser.add_argument("--pages", type=Path, help="folder for the pages (default: OUTPUT/pages)")
    parser.add_argument("--bin", type=Path, default=REPOSITORY / "build/bin", help="folder of the programs")
    data_dir = os.environ.get("PS_DATA_DIR", "")
    parser.add_argument("--data_dir", default=data_dir, help="folder that holds mnist/, as of ps_worker")
    parser.add_argument("--python", default=sys.executable, help="an interpreter with PyTorch, for runs beside ours")
    options = parser.parse_args(arguments)
    names = NAMES if "all" in options.names else tuple(dict.fromkeys(options.names))
    for program in ("ps_server", "ps_worker", "ps_bench"):
        if not (options.bin / program).exists():
            parser.error(f"--bin={options.bin}: there is no program {program}; without --no-build it is built")
    output = options.output / ("quick" if options.quick else "full")
    pages = options.pages or output / "pages"
    stop = Stop()
    stop.watch()
    try:
        done = [_run(_lab(name, options, output, stop), pages) for name in names]
        print(f"experiments: the list of all: {write_index(pages, NAMES)}", file=sys.stderr)
        _check(stop)
    except KeyboardInterrupt:
        print("experiments: stopped; jobs that were done are kept, and the same command goes on", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0 if all(done) else 1


def _lab(name: str, options: argparse.Namespace, output: Path, stop: Stop) -> Lab:
    folder = (output / name).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    same = {key: getattr(options, key) for key in ("quick", "data_dir", "python", "fresh")}
    return Lab(name, folder, options.bin.resolve(), stop=stop, **same)


def _check(stop: Stop) -> None:
    """KeyboardInterrupt if a signal has asked to stop: while pages are drawn, nobody else looks."""
    if stop.requested:
        raise KeyboardInterrupt


def _run(lab: Lab, pages: Path) -> bool:
    """Whether it was done, or skipped. If not done, an earlier page is marked as such."""
    began = time.monotonic()
    try:
        page = importlib.import_module(f"experiments.{lab.name}").run(lab)
        _check(lab.stop)
        path = write_page(page, lab, pages, time.monotonic() - began)
        _check(lab.stop)
    except Skipped as skipped:
        said, outcome = f"SKIPPED: {skipped}", "was skipped"
    except ExperimentFailed as failed:
        said, outcome = f"FAILED: {failed}", "failed"
    except Exception:  # A mistake in one of them must not take the others' results.
        said, outcome = f"FAILED:\n{traceback.format_exc()}", "failed"
    else:
        lab.say(f"done in {time.monotonic() - began:.0f} s: {path}")
        return True
    _check(lab.stop)
    lab.say(said)
    mark_earlier(pages, lab.name, outcome)
    return outcome != "failed"
