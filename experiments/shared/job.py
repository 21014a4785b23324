"""A job: its servers and workers, from start to end, and who is to blame if it fails."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.shared.processes import Child, CpuClock, Stop, end_all, running, wait_until

START_LIMIT_S = 30.0  # For a server to listen.
END_LIMIT_S = 60.0  # For the servers to end after the workers.
GRACE_S = 10.0  # For a process to end after SIGTERM, before SIGKILL.
_LISTENING = "listening on "
_LOG_PREFIX = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+ ")
# As psrun says it: "psrun: worker 1 ended with status 1: ending the others".
_PSRUN_BLAMES = re.compile(r"psrun: ((?:worker|server) \d+) (?:ended with|was killed by) [^:]*")
_TAIL_BYTES = 64 << 10
_REASON_CHARACTERS = 300


class JobFailed(Exception):
    """The job is over. `status` is "failed" or "timed out"; `blamed` is who failed by itself, if anybody did."""

    def __init__(self, status: str, reason: str = "", blamed: Child | None = None) -> None:
        super().__init__(reason or (failure_reason(blamed) if blamed else ""))
        self.status = status
        self.blamed = blamed


class Interrupted(Exception):
    """The job was stopped by a signal, and is as if it had not been."""


@dataclass(frozen=True)
class Part:
    """A server or a worker of a job."""

    flags: list[str]  # Besides those that say who is who.
    # What the program is started with, to run on a host or a processor of its own: ["ip", "netns", "exec", "h1"], say.
    on: Sequence[str] = ()
    metrics: bool = True  # They are written to FOLDER/NAME.jsonl.

    def command(self, program: Path, folder: Path, name: str, flags: Sequence[str]) -> list[str]:
        metrics = [f"--metrics_file={folder / f'{name}.jsonl'}"] if self.metrics else []
        return [*self.on, str(program), *metrics, *flags, *self.flags]


class Job:
    """Processes in a folder. Its methods raise JobFailed and Interrupted; end() is to be called whatever happened."""

    def __init__(self, folder: Path, stop: Stop, blame_s: float = 1.0) -> None:
        """`blame_s`: after one has failed, for others to fail, who may be the cause, with the reason in their logs."""
        self.folder = folder
        self.servers: list[Child] = []
        self.workers: list[Child] = []
        self.chief = ""  # Its address, once it listens.
        self.clock = CpuClock()
        self._stop = stop
        self._blame_s = blame_s

    @property
    def children(self) -> list[Child]:
        return [*self.servers, *self.workers]  # Servers first: they know first why a job fails.

    def start_worker(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> Child:
        """Any program that the job is over without."""
        self.workers.append(self._child(name, command, environment))
        return self.workers[-1]

    def start(self, bin: Path, servers: Sequence[Part], workers: Sequence[Part]) -> None:
        """ps_server for each part of the model, the chief first, and ps_worker for each rank."""
        for shard, part in enumerate(servers):
            flags = [f"--num_workers={len(workers)}"]
            if len(servers) > 1:
                flags += [f"--num_shards={len(servers)}", f"--shard={shard}"]
            if self.chief:
                flags.append(f"--chief={self.chief}")
            name = f"server{shard}"
            self.servers.append(self._child(name, part.command(bin / "ps_server", self.folder, name, flags)))
            self.chief = self.chief or self._address(self.servers[0])
        for rank, part in enumerate(workers):
            flags, name = [f"--server={self.chief}", f"--rank={rank}"], f"worker{rank}"
            self.start_worker(name, part.command(bin / "ps_worker", self.folder, name, flags))

    def _child(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> Child:
        try:
            return Child(name, command, self.folder, environment)
        except OSError as error:
            raise JobFailed("failed", f"{error.filename}: {error.strerror}") from None

    def _address(self, server: Child) -> str:
        """What its first line on stdout says."""

        def said() -> str:
            with server.out.open(errors="replace") as out:
                line = out.readline()
            return line.strip() if line.endswith("\n") else ""

        if not wait_until(lambda: said() or not server.running, START_LIMIT_S, lambda: self._stop.requested):
            self._check_stop()
            why = f"{server.name} was not listening within {START_LIMIT_S:g} s: {last_line(server)}"
            raise JobFailed("timed out", why)
        line = said()
        if not line:
            raise JobFailed("failed", blamed=server)
        if not line.startswith(_LISTENING):
            raise JobFailed("failed", f"{server.name} said '{line}', expected 'listening on HOST:PORT'")
        return line.removeprefix(_LISTENING)

    def wait(self, limit_s: float) -> None:
        """Until all have ended well."""

        def over() -> bool:
            self.clock.look(self.children)
            running(self.servers)  # They may have failed.
            return not running(self.workers) or self._blamed() is not None

        in_time = wait_until(over, limit_s, lambda: self._stop.requested)
        self._check_stop()
        if self._blamed() is not None:
            wait_until(self._all_ended, self._blame_s, lambda: self._stop.requested)
            raise JobFailed("failed", blamed=self._blamed())
        if not in_time:
            raise JobFailed("timed out", f"ran longer than {limit_s:g} s; {self._last_words()}")
        if not wait_until(self._all_ended, END_LIMIT_S, lambda: self._stop.requested):
            self._check_stop()
            why = f"servers ran {END_LIMIT_S:g} s longer than the workers; {self._last_words()}"
            raise JobFailed("timed out", why)
        if self._blamed() is not None:
            raise JobFailed("failed", blamed=self._blamed())

    def end(self, grace_s: float = GRACE_S) -> list[Child]:
        """Returns those that had to be killed."""
        return end_all(self.children, grace_s, lambda: self._stop.hurry)

    def _all_ended(self) -> bool:
        return not running(self.children)

    def _check_stop(self) -> None:
        if self._stop.requested:
            raise Interrupted

    def _blamed(self) -> Child | None:
        """Among those that have failed by themselves: who was killed, else a server, else a worker."""
        failed = [child for child in self.children if child.status not in (None, 0)]
        return next((child for child in failed if (child.status or 0) < 0), failed[0] if failed else None)

    def _last_words(self) -> str:
        """Who has not ended, and the last line of the one that holds the others up, as far as can be seen."""
        late = [child for child in self.children if child.running]
        if not late:
            return "all have ended since"
        stuck = next((child for child in late if child.stopped), None) or min(late, key=self._last_sign_unix_s)
        state = f"{stuck.name} is stopped" if stuck.stopped else f"{stuck.name} was silent longest"
        return f"not ended: {names(late)}; {state}, its last line: {last_line(stuck) or 'none'}"

    def _last_sign_unix_s(self, child: Child) -> float:
        """When it last wrote to one of its files."""
        files = (child.log, child.out, self.folder / f"{child.name}.jsonl")
        return max(file.stat().st_mtime for file in files if file.exists())


def names(children: Sequence[Child]) -> str:
    return ", ".join(child.name for child in children)


def log_tail(path: Path) -> list[str]:
    """The last lines that say something, without their times."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [_LOG_PREFIX.sub("", line).strip() for line in text.splitlines() if line.strip()]


def last_line(child: Child) -> str:
    """The last one of its log, else of its output."""
    lines = log_tail(child.log) or log_tail(child.out)
    return lines[-1][:_REASON_CHARACTERS] if lines else ""


def first_line_with(pattern: re.Pattern[str], children: Sequence[Child]) -> str | None:
    """In the ends of their logs."""
    lines = (line for child in children for line in log_tail(child.log) if pattern.search(line))
    return next((line[:_REASON_CHARACTERS] for line in lines), None)


def failure_reason(child: Child) -> str:
    """How this process failed, in a line."""
    said = last_line(child)
    blamed = next(filter(None, map(_PSRUN_BLAMES.match, log_tail(child.log))), None)
    if blamed:  # What it said is above, and the others' ends may be below.
        prefix = f"[{blamed[1]}] "
        own = [line.removeprefix(prefix) for line in log_tail(child.log) if line.startswith(prefix)]
        return blamed[0].removeprefix("psrun: ") + (f": {own[-1][:_REASON_CHARACTERS]}" if own else "")
    if said.startswith("I "):  # What it told of as it went on is not the cause.
        said = ""
    return f"{child.name} {child.ending()}" + (f": {said}" if said else "")
