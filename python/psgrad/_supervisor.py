"""The processes of a job on this machine: started, waited for, and ended in order. None outlives who started it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from psgrad._blame import is_of_another
from psgrad._lines import READ_BYTES, LastError, Lines, Sink
from psgrad._models import check_addresses, flags_of, job_of, port_after, written

# One that failed because of another may end first; an interpreter with torch takes a while to end.
_BLAME_S = 30.0
# Processes that a child has left behind hold its pipes open.
_DRAIN_S = 1.0
# A worker that failed is started again after 1 s, 2 s, 4 s, … and at most so long; after a longer life than this it
# counts as new.
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_LONG_LIFE_S = 60.0
# When workers have ended well, servers of a job that has begun end so soon, and other workers most often do; then the
# chief is asked how the job is, which may take so long, and again after pauses that grow to this.
_SOON_S = 1.0
_ASK_S = 5.0
_ASK_ALL_S = 30.0  # And so long where it asks several servers.
_LONGEST_ASK_PAUSE_S = 16.0
# What a pipe holds: the kernel's default for what a user without privileges may ask for.
_PIPE_BYTES_MAX = 1 << 20

# This runs in a fresh interpreter, which then becomes the program: code between fork and exec (preexec_fn) is not safe
# where other threads run, as they do in a notebook. The kernel ends the process when the thread that started it ends;
# if that was before it was told to, the parent is another one by now. An interpreter ignores SIGPIPE, and a shell's
# background job SIGINT; a program would inherit it.
_TIED = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
    signal.signal(number, signal.SIG_DFL)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"{sys.argv[2]}: {error.strerror}")
"""


def tie_to(parent: int) -> None:
    """Ties this process, an interpreter, in the same way. It ends at once if `parent` is not its parent any more."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


@dataclass(frozen=True)
class Ending:
    """How a process ended: with a status, or by a signal."""

    status: int | None = None
    signal: int | None = None

    @property
    def ok(self) -> bool:
        return self.status == 0

    def __str__(self) -> str:
        if self.signal is None:
            return f"ended with status {self.status}"
        try:
            return f"was killed by signal {self.signal} ({signal.Signals(self.signal).name})"
        except ValueError:  # A real-time signal.
            return f"was killed by signal {self.signal}"


def ending_of(child: int) -> Ending | None:
    """How this child process ended, if it has. It is left unreaped, so that its number, and with it its group's, is not
    given to another one. ChildProcessError if somebody has reaped it.
    """
    ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return Ending(status=ended.si_status) if ended.si_code == os.CLD_EXITED else Ending(signal=ended.si_status)


class Process(ABC):
    """A process of a job. `name` is for people: "worker 2"; `fd` is readable once the process has ended."""

    def __init__(self, name: str, fd: int) -> None:
        self.name = name
        self.fd = fd
        self.ending: Ending | None = None  # As of the last look().

    @property
    def running(self) -> bool:
        return self.ending is None

    @property
    def failed(self) -> bool:
        return self.ending is not None and not self.ending.ok

    @property
    def error(self) -> str:
        """The exception that it failed by, in a line, if it has shown one."""
        return ""

    @property
    def blames_another(self) -> bool:
        """It failed, most likely because another one did, which may take a moment longer to end."""
        return False

    @abstractmethod
    def look(self) -> None:
        """Sets `ending` if the process has ended. Never waits."""

    @abstractmethod
    def signal(self, number: int) -> None:
        """Sends it to the process, if it runs, and to those that it has started in its process group."""

    @abstractmethod
    def release(self) -> None:
        """After its end: ends what is left of its process group, and lets go of it."""


class Child(Process):
    """A program with pipes for stdout and stderr, in a session of its own: a terminal's Ctrl-C does not reach it.

    Start it from a thread that lives longer than it does.
    """

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            start_new_session=True,
            bufsize=0,
        )
        super().__init__(name, os.pidfd_open(self._popen.pid))
        assert self._popen.stdout is not None
        assert self._popen.stderr is not None
        self.stdout = self._popen.stdout.fileno()
        self.stderr = self._popen.stderr.fileno()
        self.last_error = LastError(f"[{name}] ")
        for pipe in (self.stdout, self.stderr):
            os.set_blocking(pipe, False)

    @property
    def error(self) -> str:
        # An interpreter ends with 1 after a traceback; other statuses are the script's own.
        return self.last_error.text if self.ending is not None and self.ending.status == 1 else ""

    @property
    def blames_another(self) -> bool:
        return is_of_another(self.error)

    def look(self) -> None:
        if self.ending is None:
            self.ending = ending_of(self._popen.pid)

    def signal(self, number: int) -> None:
        if self.running:
            self._signal_group(number)

    def end_group(self) -> None:
        """After its end: ends what it has left behind."""
        self._signal_group(signal.SIGKILL)

    def release(self) -> None:
        if self._popen.returncode is not None:
            return
        self.end_group()
        self._popen.wait()
        os.close(self.fd)
        for pipe in (self._popen.stdout, self._popen.stderr):
            if pipe is not None:
                pipe.close()

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(PermissionError):  # A program that runs as somebody else.
            os.killpg(self._popen.pid, number)


class Server(Child):
    """A ps_server."""

    address: str | None = None  # Once it listens.
    model: str | None = None  # Whose it is, where a script has several models, each in a job of its own.

    @property
    def blames_another(self) -> bool:
        # 1 is also how it ends when the job has failed, which most often is a worker's doing.
        return self.ending is not None and self.ending.status == 1 and self.address is not None


@dataclass(frozen=True)
class Job:
    """A job, as its chief says."""

    has_begun: bool
    workers: int


class Failed(Exception):
    """A process ended that should not have. `process` is the one to blame, as far as that can be told."""

    def __init__(self, process: Process, text: str | None = None) -> None:
        super().__init__(text or f"{process.name} {process.ending}")
        self.process = process


class Stopped(Exception):
    """It was asked to stop, by this signal."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


@dataclass
class _Life:
    """How a worker was started, and how often the one in this place has failed, each time after a short life."""

    rank: int
    command: Sequence[str]
    env: Mapping[str, str]
    began: float
    is_restart: bool = False
    failures: int = 0  # In a row, with this one's once it is seen,
    lasted_s: float | None = None  # and how long this one has lived then.
    next_at: float | None = None  # It has failed while the job went on; when another one takes its place.
    let_pass: bool = False  # It has failed, and it has been said why that is nobody's failure.

    @property
    def came_late(self) -> bool:
        """It may be that it was started again when the job had ended."""
        return self.is_restart and self.lasted_s is not None and self.lasted_s <= _LONG_LIFE_S


class Supervisor:
    """Used by one thread, which is the one that the children are tied to. What they write goes to `sink`, as whole
    lines with the writer's name before each.

    max_restarts: a worker that fails while the job goes on is started again, at most so often in a row. Then it is
    nobody's failure.
    servers_stay: servers outlast the job, or are not this supervisor's. Then the job has ended when a worker has ended
    well.
    """

    def __init__(self, sink: Sink, max_restarts: int = 0, *, servers_stay: bool = False) -> None:
        self.servers: list[Server] = []
        self.workers: list[Process] = []
        self._max_restarts = max_restarts
        self._servers_stay = servers_stay
        self._lives: dict[Process, _Life] = {}
        self._ending = False
        # What is waited for besides the processes: descriptors to read from, and what to do then.
        self.sources: dict[int, Callable[[], object]] = {}
        self.stopped_by: int | None = None  # A signal. May be set by its handler.
        self._sink = sink
        self._pipes: dict[int, Callable[[], object]] = {}

    @property
    def processes(self) -> list[Process]:
        return [*self.workers, *self.servers]

    # ---- Starting

    def start_worker(self, rank: int, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._start_worker(_Life(rank, command, env, time.monotonic()))

    def _start_worker(self, life: _Life) -> None:
        worker = Child(f"worker {life.rank}", life.command, life.env)
        self.workers.append(worker)
        if self._max_restarts > 0:
            self._lives[worker] = life
        self._read_output(worker)

    def _replace_failed(self) -> None:
        """Sees to workers that have failed and are to be started again."""
        now = time.monotonic()
        for worker, life in list(self._lives.items()):
            if not worker.failed or life.let_pass:
                continue
            if life.lasted_s is None:
                life.lasted_s = now - life.began
                life.failures = 1 if life.lasted_s > _LONG_LIFE_S else life.failures + 1
                if self._comes_again(worker):
                    pause_s = min(_FIRST_PAUSE_S * 2 ** min(life.failures - 1, 10), _LONGEST_PAUSE_S)
                    life.next_at = now + pause_s
                    count = f"{life.failures} of {self._max_restarts} times"
                    self._say(worker, f"it is started again in {pause_s:g} s ({count})")
            if self._comes_again(worker):
                if life.next_at is not None and life.next_at <= now:
                    self._let_go(worker)
                    self._start_worker(_Life(life.rank, life.command, life.env, now, True, life.failures))
            elif (life.next_at is not None or life.came_late) and self._job_has_ended():
                life.let_pass = True
                ended = "others have ended well" if self._servers_stay else "the job has ended well without it"
                self._say(worker, f"it is not started again: {ended}")

    def _comes_again(self, process: Process) -> bool:
        """It has failed, and another one takes its place."""
        life = self._lives.get(process)
        if life is None or not process.failed or self._ending or self.stopped_by is not None:
            return False
        late = life.came_late and self._job_has_ended()
        return life.failures <= self._max_restarts and all(server.running for server in self.servers) and not late

    def _job_has_ended(self) -> bool:
        """Well: whoever comes then is too late. Where servers stay, that is a guess: a worker may have been drained."""
        some_worker = any(worker.ending is not None and worker.ending.ok for worker in self.workers)
        all_servers = all(server.ending is not None and server.ending.ok for server in self.servers)
        return some_worker and (self._servers_stay or all_servers)

    def _say(self, worker: Process, what: str) -> None:
        self._read_last_words(worker)
        self._sink.put(2, f"psrun: {worker.name} {worker.ending}; {what}\n".encode())

    def _let_go(self, worker: Process) -> None:
        self.workers.remove(worker)
        del self._lives[worker]
        if isinstance(worker, Child):
            worker.end_group()
            self._read_last_words(worker)
            for pipe in (worker.stdout, worker.stderr):
                self._pipes.pop(pipe, None)
        worker.release()

    def _read_last_words(self, worker: Process) -> None:
        """They come before what is said about it."""
        if isinstance(worker, Child):
            self._read_what_is_there(worker)

    def start_servers(
        self, count: int, workers: int, flags: Mapping[str, str], timeout_s: float, model: str | None = None
    ) -> str:
        """Returns the chief's address, once all servers listen. Failed; FileNotFoundError if there is no ps_server.

        model: whose servers they are, where there are several.
        """
        program = find_program("ps_server")
        chief = self._start_server(program, 0, server_flags(0, count, workers, flags, chief=None), model)
        self._until_listening(timeout_s)
        for shard in range(1, count):
            own = server_flags(shard, count, workers, flags, chief=chief.address)
            self._start_server(program, shard, own, model)
        self._until_listening(timeout_s)
        assert chief.address is not None
        return chief.address

    def _start_server(self, program: str, shard: int, flags: list[str], model: str | None) -> Server:
        server = Server(f"server {shard}" if model is None else f"server {model}/{shard}", [program, *flags])
        server.model = model
        self.servers.append(server)
        self._read_output(server)
        return server

    def _until_listening(self, timeout_s: float) -> None:
        if not self.until(lambda: all(server.address for server in self.servers), timeout_s):
            silent = next(server for server in self.servers if server.address is None)
            raise Failed(silent, f"{silent.name} does not listen after {timeout_s:g} s")

    # ---- Waiting

    def until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Waits for the condition; False if it is not met in time. Stopped, or Failed, if a process fails meanwhile."""
        met = self._wait(lambda: condition() or self._is_interrupted(), timeout_s)
        if self.stopped_by is not None:
            raise Stopped(self.stopped_by)
        if self._failed() is not None:
            self._wait(lambda: not self._culprit_may_follow(), _BLAME_S)
            failed = self._failed()
            assert failed is not None
            raise Failed(failed)
        return met

    def await_workers(self, *, others_may_come: bool = False) -> None:
        """All workers have ended well. Stopped; Failed, also if one has ended before the job has begun, for which the
        others would wait. Where others may come that is only said.
        """
        self.until(lambda: self._workers_have_ended() or (bool(self.servers) and self._ended_well() is not None))
        pause_s: float | None = _SOON_S if self.servers else None
        while not self.until(self._workers_have_ended, pause_s):
            assert pause_s is not None
            pause_s = min(2 * pause_s, _LONGEST_ASK_PAUSE_S)
            jobs, early = self.ask_jobs(), self._ended_well()
            if jobs and all(job.has_begun for job in jobs):
                pause_s = None
            elif any(not job.has_begun and job.workers > 0 for job in jobs) and early is not None:
                text = f"{early.name} {early.ending} before it joined the job, and others wait for it"
                if not others_may_come:
                    raise Failed(early, text)
                self._sink.put(2, f"psrun: {text}, or for one that is started elsewhere\n".encode())
                pause_s = None

    def _workers_have_ended(self) -> bool:
        return not any(worker.running or self._is_awaited(worker) for worker in self.workers)

    def _ended_well(self) -> Process | None:
        return next((worker for worker in self.workers if worker.ending is not None and worker.ending.ok), None)

    def end_unused_servers(self, timeout_s: float) -> bool:
        """The workers have ended well. Ends the servers of each job that nobody has joined; whether those were all."""
        if self.await_servers_end(min(_SOON_S, timeout_s)):
            return False
        used = False
        for servers in self._servers_of_jobs():
            job = self._ask_job(servers)
            if job is None or job.has_begun or job.workers > 0:
                used = True
                continue
            self._ps_ctl(servers, "shutdown")
            # Those that do not end, end() ends.
            self.until(lambda servers=servers: not any(one.running for one in servers), timeout_s)  # type: ignore[misc]
        return not used

    def await_servers_end(self, timeout_s: float) -> bool:
        """False if one still runs then. Stopped; Failed."""
        return self.until(self._servers_have_ended, timeout_s)

    def _servers_have_ended(self) -> bool:
        return not any(server.running for server in self.servers)

    def _servers_of_jobs(self) -> list[list[Server]]:
        """Those of each job that this has started, the chief first."""
        jobs: dict[str | None, list[Server]] = {}
        for server in self.servers:
            jobs.setdefault(server.model, []).append(server)
        return list(jobs.values())

    def ask_jobs(self) -> list[Job]:
        """Those whose chief answers."""
        asked = [self._ask_job(servers) for servers in self._servers_of_jobs()]
        return [job for job in asked if job is not None]

    def _ask_job(self, servers: Sequence[Server]) -> Job | None:
        """None if the chief does not answer."""
        status = self._ps_ctl(servers, "status")
        stage = re.search("^job .*: ([a-z ]+),", status, re.MULTILINE)
        workers = re.search("^workers: ([0-9]+)", status, re.MULTILINE)
        if stage is None or workers is None:
            return None
        return Job(has_begun=stage[1] != "gathering", workers=int(workers[1]))

    def _ps_ctl(self, servers: Sequence[Server], command: str) -> str:
        """What it prints; nothing if it fails, or something else happens before it has ended."""
        if not all(server.running for server in servers):
            return ""
        try:
            program = find_program("ps_ctl")
        except FileNotFoundError:
            return ""
        child = Child("ps_ctl", [program, f"--server={servers[0].address}", f"--timeout={_ASK_S:g}s", command])
        printed = bytearray()
        open_pipes = {child.stdout, child.stderr}

        def read(pipe: int) -> None:
            data = os.read(pipe, READ_BYTES)
            if pipe == child.stdout:
                printed.extend(data)
            if not data:
                open_pipes.discard(pipe)
                del self.sources[pipe]

        for pipe in list(open_pipes):
            self.sources[pipe] = functools.partial(read, pipe)
        try:
            # Its pipes are at their end when it has ended, or is about to.
            self._wait(lambda: not open_pipes or self._is_interrupted(), _ASK_ALL_S)
            self.sources[child.fd] = child.look
            self._wait(lambda: not child.running or self._is_interrupted(), _SOON_S)
        finally:
            for fd in (*open_pipes, child.fd):
                self.sources.pop(fd, None)
            child.look()
            child.release()  # It is killed if it still runs.
        return printed.decode(errors="replace") if child.ending is not None and child.ending.ok else ""

    def _is_interrupted(self) -> bool:
        return self.stopped_by is not None or self._failed() is not None

    def await_servers(self, timeout_s: float) -> None:
        """The workers have ended well, so the servers will, too. Stopped; Failed, also if one still runs in the end."""
        if not self.await_servers_end(timeout_s):
            late = next(server for server in self.servers if server.running)
            raise Failed(
                late,
                f"{late.name} still runs {timeout_s:g} s after the workers have ended (did they all join the job?)",
            )

    def _is_awaited(self, worker: Process) -> bool:
        """Another one takes its place, unless the job ends before that."""
        life = self._lives.get(worker)
        return life is not None and worker.failed and not life.let_pass

    def _failed(self) -> Process | None:
        """The one to blame, so far."""
        failed = [process for process in self.processes if process.failed and not self._is_let_pass(process)]
        return min(failed, key=lambda process: process.blames_another) if failed else None

    def _is_let_pass(self, process: Process) -> bool:
        """It is started again, or it is not known yet whether the job's end was too soon for that."""
        life = self._lives.get(process)
        if life is None or not (life.let_pass or life.next_at is not None or life.came_late):
            return False
        if life.let_pass or self._comes_again(process) or any(server.failed for server in self.servers):
            return True
        # Some server has ended, and so has the job; how, the others will show.
        ends = bool(self.servers) and not all(server.running for server in self.servers)
        return ends and any(one.running for one in self.processes)

    def _culprit_may_follow(self) -> bool:
        for process in self.processes:
            if process.failed:  # What it says may tell whom to blame.
                self._read_last_words(process)
        failed = self._failed()
        return failed is not None and failed.blames_another and any(worker.running for worker in self.workers)

    def _wait(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._replace_failed()
            if condition():
                return True
            now = time.monotonic()
            left = math.inf if deadline is None else deadline - now
            if left <= 0:
                return False
            starts = [life.next_at or now for worker, life in self._lives.items() if self._comes_again(worker)]
            soonest = min([left, *(max(start - now, 0.0) for start in starts)])
            self._turn(None if soonest == math.inf else soonest)

    def _turn(self, timeout_s: float | None) -> None:
        """Waits for something to happen, and sees to all that has."""
        ready = {process.fd: process.look for process in self.processes if process.running} | self.sources
        if not self._sink.full:
            ready |= self._pipes
        poll = select.poll()
        for fd in ready:
            poll.register(fd, select.POLLIN)
        if self._sink.fd is not None:
            poll.register(self._sink.fd, select.POLLOUT)
        # Rounded up: a turn that ends a moment too early would be followed by many that do not wait at all.
        happened = poll.poll(None if timeout_s is None else int(timeout_s * 1000) + 1)
        for fd, _ in happened:
            ready.get(fd, self._sink.write)()

    # ---- Output

    def _read_output(self, child: Child) -> None:
        for fd, pipe in ((1, child.stdout), (2, child.stderr)):
            self._pipes[pipe] = functools.partial(self._read, child, fd, pipe, Lines(f"[{child.name}] "))

    def _read(self, child: Child, fd: int, pipe: int, lines: Lines) -> None:
        try:
            data = os.read(pipe, READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            del self._pipes[pipe]
        text = lines.feed(data) if data else lines.end()
        if isinstance(child, Server) and child.address is None and fd == 1:
            child.address = _address_in(text)
        if fd == 2:
            child.last_error.feed(text)
        self._sink.put(fd, text)

    def _read_what_is_there(self, child: Child) -> None:
        for pipe in (child.stdout, child.stderr):
            for _ in range(_PIPE_BYTES_MAX // READ_BYTES):
                if pipe in self._pipes:
                    self._pipes[pipe]()

    # ---- Ending

    def end(self, grace_s: float) -> None:
        """Ends the workers, then the servers. Each gets `grace_s` to follow one signal before the next, harder one."""
        self._ending = True
        self._end(self.workers, (signal.SIGINT, signal.SIGTERM, signal.SIGKILL), grace_s)
        self._end(self.servers, (signal.SIGTERM, signal.SIGKILL), grace_s)
        self._wait(lambda: not self._pipes, _DRAIN_S)
        self._pipes.clear()
        for process in self.processes:
            if not process.running:
                process.release()
        self.write_out()

    def write_out(self) -> None:
        """Writes what the sink has, if somebody reads it."""
        self._wait(lambda: self._sink.fd is None, _DRAIN_S)

    def _end(self, processes: Sequence[Process], signals: Sequence[int], grace_s: float) -> None:
        for number in signals:
            for process in processes:
                process.signal(number)
            # What was killed ends, unless the kernel holds it: then nobody can help.
            if self._wait(lambda: not any(process.running for process in processes), grace_s):
                return

    def kill(self) -> None:
        """Ends all at once."""
        for process in self.processes:
            process.signal(signal.SIGKILL)


def _address_in(output: bytes) -> str | None:
    found = re.search(rb"listening on (\S+)\n", output)
    return found[1].decode() if found else None


def find_program(name: str) -> str:
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


# Flags of ps_server that follow from how the job is started.
OWN_FLAGS = ("advertise", "chief", "insecure", "listen", "num_shards", "num_workers", "shard")
# Flags that name a file of each server.
_FILE_FLAGS = ("local_socket", "metrics_file", "trace_file")


def server_flags(shard: int, servers: int, workers: int, flags: Mapping[str, str], chief: str | None) -> list[str]:
    """The command line of one of the servers. `flags` are the user's, by name."""
    own = {"listen": "127.0.0.1:0", "num_workers": str(workers)}
    if servers > 1:
        own |= {"num_shards": str(servers), "shard": str(shard)}
    if chief is not None:
        own["chief"] = chief
    given = {"optimizer": "from_worker", **flags}
    if servers > 1:
        given |= {name: _numbered(given[name], shard) for name in _FILE_FLAGS if given.get(name)}
        if "http_listen" in given:  # Each has a page and metrics of its own.
            given["http_listen"] = port_after(given["http_listen"], shard)
    return [f"--{name}={value}" for name, value in {**own, **given}.items()]


def _numbered(path: str, number: int) -> str:
    stem, extension = os.path.splitext(path)
    return f"{stem}.{number}{extension}"


@dataclass(frozen=True)
class Jobs:
    """Where workers find their job, or those of their models, by name."""

    server: str | None = None
    job: str | None = None
    servers: Mapping[str, str] = field(default_factory=dict)
    jobs: Mapping[str, str] = field(default_factory=dict)


def start_jobs(
    supervisor: Supervisor,
    models: Sequence[str],
    servers: int,
    workers: int,
    flags: Mapping[str, str],
    server: str | None,
    timeout_s: float,
) -> Jobs:
    """Starts the servers of a job, or of one for each of the models; with `server` it only says where they are.

    What Supervisor.start_servers raises; ValueError if `server` has not an address for each model.
    """
    job = flags.get("job", "default")
    if not models:
        return Jobs(server or supervisor.start_servers(servers, workers, flags, timeout_s), job)
    addresses = check_addresses(models, server) if server else {}
    if not server and flags.get("checkpoint_dir"):  # A server makes one folder, and that is the model's.
        os.makedirs(flags["checkpoint_dir"], exist_ok=True)
    for number, model in enumerate(() if server else models):
        own = flags_of(model, {"job": job, **flags}, servers_before=number * servers)
        addresses[model] = supervisor.start_servers(servers, workers, own, timeout_s, model)
    return Jobs(servers=addresses, jobs={model: job_of(job, model) for model in models})


def worker_environment(
    rank: int, local_rank: int, world: int, local_world: int, jobs: Jobs, torch_env: bool = False
) -> dict[str, str | None]:
    """What a worker finds in its environment, beside what is there already; None is for what it must not find.

    torch_env: also torchrun's names. Libraries take these for a process group that they are to join; so without it
    those of a launcher around this process, whose place they tell, are taken away.
    """
    place = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": local_world}
    environment: dict[str, str | None] = {
        "PS_SERVER": jobs.server,
        "PS_JOB": jobs.job,
        "PS_SERVERS": written(jobs.servers) or None,
        "PS_JOBS": written(jobs.jobs) or None,
        "PS_RANK": str(rank),
        "PS_NUM_WORKERS": str(world),
        "PS_LOCAL_RANK": str(local_rank),
        "PS_LOCAL_NUM_WORKERS": str(local_world),
    }
    environment |= {name: str(value) if torch_env else None for name, value in place.items()}
    if "OMP_NUM_THREADS" not in os.environ:  # Else each worker would take all cores.
        cores = len(os.sched_getaffinity(0))
        environment["OMP_NUM_THREADS"] = str(max(1, cores // local_world))
    return environment
