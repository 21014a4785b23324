"""What the tests of experiments/compare share: how to run it, and programs that play ps_server and ps_worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
COMPARE = REPOSITORY / "experiments/compare"
sys.path.insert(0, str(REPOSITORY))

from experiments.shared.machine import why_no_reports  # noqa: E402

# For a whole comparison with played programs; a machine may be busy.
LIMIT_S = 120

# They do what $FAKE says of the first run whose folder has the name: "asp-s1=crash,bsp-s1=hang". Metrics have spaces
# nowhere, as the real ones.
_COMMON = """#!/usr/bin/env python3
import json, os, signal, socket, sys, time

flags = dict(argument.removeprefix("--").split("=", 1) for argument in sys.argv[1:])
path = flags["metrics_file"]
run = os.path.basename(os.path.dirname(path))
behaviour = "ok"
for entry in os.environ.get("FAKE", "").split(","):
    name, _, value = entry.partition("=")
    if name and name in run:
        behaviour = value
        break
began = time.monotonic()

def log(text):
    print("2026-01-02 03:04:05.678 E fake: " + text, file=sys.stderr, flush=True)

def write(event, **values):
    with open(path, "a") as file:
        line = {"event": event, "t": time.monotonic() - began, **values}
        file.write(json.dumps(line, separators=(",", ":")) + "\\n")

write("start", unix_time=time.time(), flags=flags)
"""

_SERVER = """
workers = int(flags["num_workers"])
if behaviour == "port":
    log("--listen=127.0.0.1:0: address in use")
    sys.exit(1)
listener = socket.create_server(("127.0.0.1", 0))
print("listening on 127.0.0.1:%d" % listener.getsockname()[1], flush=True)
write("runs", samples=640, batch_size=64, runs=10, runs_per_epoch=10)
links = [listener.accept()[0] for _ in range(workers)]
for version in range(1, 11):
    write("apply", version=version, contributions=1, ranks=[0], staleness=[0], samples=[64], apply_s=1e-5)
if behaviour == "diverge":
    log("version 11: the weights of tensor w0 are not finite; the learning rate, 5, is too high")
    sys.exit(1)
for link in links:
    link.send(b"x")
    link.recv(1)
if behaviour == "lose":
    os.truncate(path, os.path.getsize(path) - 9)
write("end", version=10)
"""

_WORKER = """
rank = int(flags["rank"])
host, _, port = flags["server"].rpartition(":")
if behaviour == "data" and rank == 1:
    log("--dataset: there is no such file")
    sys.exit(1)
link = socket.create_connection((host, int(port)))
write("step", step=0, version=0, loss=2.3, samples=64, forward_s=1e-4, backward_s=1e-4, push_s=0, wait_s=0, pull_s=0)
if behaviour == "crash" and rank == 1:
    os.kill(os.getpid(), signal.SIGSEGV)
if behaviour == "stop" and rank == 1:
    log("about to be held")
    os.kill(os.getpid(), signal.SIGSTOP)
if behaviour == "hang":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    log("waiting for godot")
    time.sleep(1000)
if link.recv(1) != b"x":
    log("the job failed")
    sys.exit(1)
loss = None if behaviour == "nan" else 0.5
accuracy = 0.1 if behaviour == "guess" else 0.8
if behaviour == "flags":
    print("ps_worker: --activation=relu: expected another", file=sys.stderr)
    sys.exit(2)
if rank == 0:
    splits = ["test"] + (["validation"] if "validation_split" in flags else [])
    for split in splits:
        write("eval", step=1, version=10, split=split, loss=loss, accuracy=accuracy)
write("end", steps=1, samples=64, status="OK")
"""


def make_programs(folder: Path) -> Path:
    """The folder for --bin."""
    folder.mkdir()
    for name, text in (("ps_server", _SERVER), ("ps_worker", _WORKER)):
        program = folder / name
        program.write_text(_COMMON + text)
        program.chmod(0o755)
    return folder


def start_compare(*flags: str, fake: str = "") -> subprocess.Popen[str]:
    """Runs it; its output comes through pipes."""
    return subprocess.Popen(
        [sys.executable, "-B", str(COMPARE), *flags],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "FAKE": fake},
    )


def compare(*flags: str, fake: str = "") -> tuple[int, str, str]:
    """Status, stdout, stderr."""
    process = start_compare(*flags, fake=fake)
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    return process.returncode, out, err


def processes_with(text: str) -> list[str]:
    """Command lines, of all processes, that have this text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in line and str(os.getpid()) != path.parent.name:
            found.append(line)
    return found


SMALL = ("--workers=2", "--conditions=even", "--seeds=1", "--staleness=", "--no-references", "--step_time=1ms")


@unittest.skipIf(why_no_reports(), why_no_reports())
class PlayedCase(unittest.TestCase):
    """Comparisons with programs that play, in a folder that goes away; none of them may be left."""

    def setUp(self) -> None:
        """`self.output` is not there yet."""
        temporary = tempfile.TemporaryDirectory(prefix="compare-test-")
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)
        self.bin = make_programs(self.folder / "bin")
        self.output = self.folder / "output"
        self.addCleanup(self.check_that_none_is_left)

    def check_that_none_is_left(self) -> None:
        assert processes_with(str(self.folder)) == []

    def flags(self, *more: str) -> list[str]:
        return [*SMALL, f"--bin={self.bin}", f"--output={self.output}", *more]

    def run_json(self, run_id: str) -> dict[str, Any]:
        return json.loads((self.output / "runs" / run_id / "run.json").read_text())

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Fails if it takes too long."""
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.02)
