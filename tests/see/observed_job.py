"""A real job with a page: servers with --http_listen, and workers on synthetic data, which a test can stop."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PROGRAMS = Path(os.environ.get("PSGRAD_BIN", Path(__file__).resolve().parents[2] / "build/bin"))
START_LIMIT_S = 30.0
WAIT_LIMIT_S = 30.0
DATA_FLAGS = ("--dataset=synthetic:samples=6000,features=20,classes=4,test=500", "--model=mlp:20,32,4")


def get(address: str, path: str) -> str:
    """The body of a page's answer, which is 200."""
    with urllib.request.urlopen(address + path, timeout=WAIT_LIMIT_S) as answer:
        body: bytes = answer.read()
    return body.decode()


def is_well(address: str) -> bool:
    """What its /healthz says: not before the server's first look at itself, a second after it listens."""
    try:
        return get(address, "/healthz") != ""
    except urllib.error.HTTPError as error:
        if error.code != 503:
            raise
        return False


def wait_until(what: str, condition: Callable[[], Any], limit_s: float = WAIT_LIMIT_S) -> Any:
    """The condition's value once it is true; an assertion that says what was waited for at the limit."""
    deadline = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"after {limit_s:g} s: {what}"
        time.sleep(0.05)  # Between two looks at another process.
    return found


class ObservedJob:
    """Its servers' pages are `pages`, the chief's first; metrics files are in `folder`."""

    def __init__(
        self,
        folder: Path,
        *,
        workers: int = 2,
        servers: int = 1,
        server_flags: Sequence[str] = (),
        worker_flags: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.pages: list[str] = []
        self.servers: list[subprocess.Popen[str]] = []
        self.workers: list[subprocess.Popen[str]] = []
        self.address = ""
        try:
            for shard in range(servers):
                self._start_server(shard, servers, workers, server_flags)
            for rank in range(workers):
                self.workers.append(self.start_worker(rank, *worker_flags))
            for page in self.pages:
                wait_until(f"{page} is well", functools.partial(is_well, page))
        except BaseException:
            self.end()
            raise

    def metrics_file(self, name: str) -> list[dict[str, Any]]:
        """The lines of a metrics file that are whole so far: "server-0" or "worker-2"."""
        text = (self.folder / f"{name}.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def job(self) -> dict[str, Any]:
        """What the chief's page says of it."""
        found: dict[str, Any] = json.loads(get(self.pages[0], "/api/v1/job"))
        return found

    def start_worker(self, rank: int, *flags: str) -> subprocess.Popen[str]:
        """One more worker, which claims this rank. Later flags win."""
        command = [str(PROGRAMS / "ps_worker"), f"--server={self.address}", f"--rank={rank}", *DATA_FLAGS]
        command += [f"--metrics_file={self.folder / f'worker-{rank}.jsonl'}", *flags]
        with open(self.folder / f"worker-{rank}.log", "a", encoding="utf-8") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, text=True)

    def stop(self, rank: int) -> None:
        """Suspends a worker."""
        self.workers[rank].send_signal(signal.SIGSTOP)

    def go_on(self, rank: int) -> None:
        """After stop."""
        self.workers[rank].send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Ends all that runs."""
        for process in (*self.workers, *self.servers):
            process.kill()
            process.wait(WAIT_LIMIT_S)
            if process.stdout is not None:
                process.stdout.close()

    def _start_server(self, shard: int, servers: int, workers: int, flags: Sequence[str]) -> None:
        command = [str(PROGRAMS / "ps_server"), "--listen=127.0.0.1:0", "--http_listen=127.0.0.1:0"]
        command += [f"--num_workers={workers}", f"--num_shards={servers}", f"--shard={shard}"]
        command += [f"--metrics_file={self.folder / f'server-{shard}.jsonl'}", *flags]
        command += [f"--chief={self.address}"] if self.address else []
        log_path = self.folder / f"server-{shard}.log"
        with open(log_path, "a", encoding="utf-8") as log:
            server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        self.servers.append(server)
        assert server.stdout is not None
        lines = [server.stdout.readline().rstrip("\n") for _ in range(2)]
        found = [line.removeprefix(begin) for line, begin in zip(lines, ("listening on ", "page at "), strict=True)]
        assert lines == [f"listening on {found[0]}", f"page at {found[1]}"], (lines, log_path.read_text())
        self.address = self.address or found[0]
        self.pages.append(found[1].rstrip("/"))
