"""The verdicts of the Compose demo: its metrics files as a comparison of sync and async beside a straggler."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flags import UsageError
from job import write_json
from machine import commit, machine

MODES = ("bsp", "asp")


def verdicts(arguments: Sequence[str]) -> int:
    """`verdicts FOLDER --hash=H --expected_hash=H --killed_hash=H`: of FOLDER, which has each mode's metrics files in a
    folder of its name.

    Makes a comparison in it, writes its report, and prints a line for each verdict. 0 if all are "yes", else 1.
    UsageError.
    """
    parser = argparse.ArgumentParser(prog="verdicts", add_help=False, exit_on_error=False)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hash", required=True)
    parser.add_argument("--expected_hash", required=True)
    parser.add_argument("--killed_hash", required=True)
    try:
        asked = parser.parse_args(list(arguments))
    except (argparse.ArgumentError, SystemExit):
        raise UsageError("verdicts: expected FOLDER --hash=HASH --expected_hash=HASH --killed_hash=HASH") from None
    folder: Path = asked.folder
    shutil.rmtree(folder / "runs", ignore_errors=True)
    runs = [_make_run(folder, mode, asked.hash if mode == "bsp" else None) for mode in MODES]
    revision, dirty = commit()
    hashes = {"expected_weights_hash": asked.expected_hash, "killed_weights_hash": asked.killed_hash}
    settings = {"modes": MODES, "workers": runs[0]["workers"], "seeds": 1, **hashes}
    plan = {"command": "deploy/compose-demo.sh", "commit": revision, "dirty": dirty, "machine": machine()}
    write_json(folder / "plan.json", plan | {"settings": settings, "runs": [run["id"] for run in runs]})
    from report import write_reports

    found = write_reports(folder).verdicts
    for verdict in found:
        print(verdict)
    print(f"the report: {folder / 'report.html'}")
    return 0 if found and all(verdict.good for verdict in found) else 1


def _make_run(folder: Path, mode: str, weights_hash: str | None) -> dict[str, Any]:
    """Its run.json, which it writes, beside copies of the metrics files by the names that a comparison has for them."""
    run_folder = folder / "runs" / f"straggler-{mode}-s1"
    run_folder.mkdir(parents=True)
    flags: dict[str, str] = {}
    began_unix, workers = float("inf"), 0
    for path, start in _starts(folder / mode):
        is_worker = "rank" in start
        name = f"worker{start['rank']}" if is_worker else f"server{start['shard']}"
        shutil.copyfile(path, run_folder / f"{name}.jsonl")
        flags |= {flag: text for flag, text in start["flags"].items() if text}
        began_unix = min(began_unix, start["unix_time"])
        workers += is_worker
    if workers == 0:
        raise UsageError(f"verdicts: {folder / mode} has no metrics files of workers")
    run = {
        "id": run_folder.name,
        "kind": "comparison",
        "mode": mode,
        "condition": "straggler",
        "seed": int(flags["seed"]),
        "workers": workers,
        "batch_size": int(flags["batch_size"]),
        "epochs": float(flags["epochs"]),
        "learning_rate": float(flags["learning_rate"]),
        "momentum": float(flags["momentum"]),
        "tuned": False,
        "staleness": None,
        "status": "done",
        "reason": "",
        "began_unix": began_unix,
        "cores": machine()["cores"],
        "weights_hash": weights_hash,
    }
    write_json(run_folder / "run.json", run)
    return run


def _starts(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The metrics files, each with its first line."""
    for path in sorted(folder.glob("*.jsonl")):
        with path.open(encoding="utf-8") as file:
            yield path, json.loads(file.readline())
