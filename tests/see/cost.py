"""What watching costs a job: samples a second with all that watches, beside without, in turns.

    PSGRAD_BIN=build/bin python3 -B tests/see/cost.py [--turns=9] [--epochs=10] [--hidden=128]

Three forms of one job (bsp, a server, two workers, two hidden layers) take turns: `bare`, without any file; `watched`,
with metrics files, curves for TensorBoard, a page that a reader polls each second as a browser does, and a scrape each
second; `traced`, which is watched and also writes a trace of all steps. It prints each form's median and the median of
its quotients with `bare`. A machine that does something else makes this worthless.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import statistics
import subprocess
import tempfile
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path

from observed_job import PROGRAMS

FORMS = ("bare", "watched", "traced")
WORKERS = 2
BATCH = 64
SAMPLES = 60000
LIMIT_S = 600


class Watcher:
    """Polls a page as a browser does, and scrapes it."""

    def __init__(self, page: str) -> None:
        self.page = page
        self.answers = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        cursor, events = "", 0
        while not self._ended.wait(1.0):
            try:
                self._get("/api/v1/job")
                cursor = json.loads(self._get(f"/api/v1/series?since={cursor}"))["cursor"]
                events = json.loads(self._get(f"/api/v1/events?since={events}"))["next"]
                self._get("/metrics")
            except (OSError, ValueError):  # The job has ended.
                continue

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(self.page + path, timeout=10) as answer:
            body: bytes = answer.read()
        self.answers += 1
        return body


def run(form: str, folder: Path, epochs: float, hidden: int) -> float:
    """Samples a second of a job, from when it runs until the first worker is done."""
    flags: Callable[[str], list[str]] = lambda name: {  # noqa: E731
        "bare": [],
        "watched": [f"--metrics_file={folder / name}.jsonl"],
        "traced": [f"--metrics_file={folder / name}.jsonl", f"--trace_file={folder / name}.trace"],
    }[form]
    seen = [] if form == "bare" else ["--http_listen=127.0.0.1:0"]
    curves = [] if form == "bare" else [f"--tensorboard_dir={folder / 'curves'}"]
    with open(folder / "server.log", "w+", encoding="utf-8") as log:
        server = subprocess.Popen(
            [PROGRAMS / "ps_server", f"--num_workers={WORKERS}", "--learning_rate=0.05", *flags("server"), *seen],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        assert server.stdout is not None
        address = server.stdout.readline().split()[-1]
        watcher = Watcher(server.stdout.readline().split()[-1]) if seen else None
        model = f"--model=mlp:784,{hidden},{hidden},10"
        data = f"--dataset=synthetic:samples={SAMPLES},features=784,classes=10,test=100"
        command = [PROGRAMS / "ps_worker", f"--server={address}", model, data, f"--batch_size={BATCH}"]
        command += [f"--epochs={epochs}", "--activation=relu", *curves]
        workers = [
            subprocess.Popen([*command, *flags(f"worker-{rank}")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            for rank in range(WORKERS)
        ]
        try:
            for process in (*workers, server):
                assert process.wait(LIMIT_S) == 0, f"{process.args} failed"
        finally:
            for process in (*workers, server):
                process.kill()
            if watcher is not None:
                watcher.end()
            server.stdout.close()
        log.seek(0)
        text = log.read()
    assert watcher is None or watcher.answers > 0, "nobody has watched: more epochs are needed"
    return SAMPLES * epochs / (logged(text, r"rank \d+ .* is done") - logged(text, "the job is running"))


def logged(text: str, what: str) -> float:
    """When the log said it first, in seconds."""
    found = re.search(rf"^(\S+ \S+) . ps_server: {what}", text, re.MULTILINE)
    assert found is not None, text
    return datetime.datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S.%f").timestamp()


def main() -> None:
    """Measures, and says what it found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--epochs", type=float, default=10)
    parser.add_argument("--hidden", type=int, default=128)
    options = parser.parse_args()
    found: dict[str, list[float]] = {form: [] for form in FORMS}
    for turn in range(options.turns):
        for form in FORMS[turn % len(FORMS) :] + FORMS[: turn % len(FORMS)]:
            with tempfile.TemporaryDirectory() as folder:
                found[form].append(run(form, Path(folder), options.epochs, options.hidden))
        print(f"turn {turn + 1}: " + ", ".join(f"{form} {found[form][-1]:,.0f}" for form in FORMS), flush=True)
    for form in FORMS:
        quotients = [one / bare for one, bare in zip(found[form], found["bare"], strict=True)]
        median, share = statistics.median(found[form]), statistics.median(quotients)
        print(f"{form}: {median:,.0f} samples/s, {share:.3f} of bare ({min(quotients):.3f} to {max(quotients):.3f})")


if __name__ == "__main__":
    main()
