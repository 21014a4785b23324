"""psrun: starts the servers and workers of a job on this machine, and ends them together."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from psgrad._lines import Output
from psgrad._models import check_addresses, check_flags, names_addresses, names_in, read
from psgrad._supervisor import OWN_FLAGS, Failed, Stopped, Supervisor, start_jobs, worker_environment

_USAGE = """\
usage: psrun [flags] SCRIPT.py [argument …]
       psrun [flags] -m MODULE [argument …]

Starts the servers and workers of a job on this machine. What they write comes with [worker 1] or [server 0] before each
line. When one fails for good, or on Ctrl-C, all are ended: workers first, by SIGINT, SIGTERM and SIGKILL, then servers;
a second Ctrl-C kills them at once.

  --workers=N             processes that run the script (1)
  --servers=N             ps_server processes that hold the model (1)
  --server=ADDRESS        start no servers; the workers are those of the job whose chief has this address
  --job=NAME              name of the job (default)
  --models=NAME,NAME      the script has several models (psgrad.torch.DistributedOptimizer(…, name=NAME)): each has
                          --servers servers, and a job (JOB/NAME), of its own. A flag of ps_server is for all of them,
                          and --NAME.mode=asp for one's alone; --checkpoint_dir=DIR becomes DIR/NAME, and
                          --metrics_file=a.jsonl a.NAME.jsonl. With servers that are there already:
                          --server=NAME=ADDRESS,NAME=ADDRESS
  --grace=10s             how long processes that are to end may take before the next, harder signal
  --server_timeout=30s    how long servers may take to start, and to end after the workers
  --max_restarts=N        a worker that fails while the job goes on is started again, at most N times in a row (0; 3
                          for servers of psrun's own with which workers come and go). A life of over a minute begins
                          the count anew
  --min_workers=N         workers may come and go, as long as there are N; and
  --max_workers=N         as long as there are not more than N. Both go to ps_server, with --budget=job, by which
                          samples are handed out
  --torch_env             workers find torchrun's RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE, too. Hugging
                          Face's Trainer and Accelerate would take these for a process group to join
  --FLAG=VALUE            any other flag goes to ps_server, as in --mode=asp --staleness=3 (see ps_server --help). The
                          optimizer is the script's unless --optimizer says otherwise. With several servers, each has a
                          metrics file of its own: --metrics_file=a.jsonl makes a.0.jsonl, a.1.jsonl, … So it is with
                          --http_listen=127.0.0.1:8080, by which one watches the job in a browser: the first server
                          takes this port, and others those after it

Workers find PS_SERVER and PS_JOB (with --models PS_SERVERS and PS_JOBS), PS_RANK, PS_NUM_WORKERS, PS_LOCAL_RANK,
PS_LOCAL_NUM_WORKERS and, unless it is set, OMP_NUM_THREADS in their environment.

On several machines, start ps_server by hand and on each machine psrun --server=ADDRESS --workers=N. The ranks follow
from torchrun's RANK and WORLD_SIZE, which may be set by hand, or else from Slurm's SLURM_PROCID and SLURM_NTASKS: each
of their processes stands for N workers. Under torchrun psrun is not needed: a script needs only PS_SERVER beside it.

Exit status: 0 if all ended with 0, or were started again and the job ended well; that of the first worker that failed,
or 1 if it was killed or a server failed; 2 for a wrong flag; 130 after Ctrl-C, 143 after SIGTERM. The first failure is
the last line that psrun writes.
"""

_RUNNER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_script.py")
_TRUE = ("true", "t", "yes", "y", "1")  # As ps_server's flags have it.
_EXIT_FAILED = 1
_EXIT_USAGE = 2
_EXIT_SIGNAL = 128  # Plus its number, as shells have it.


class UsageError(Exception):
    """What is wrong with the command line."""


class HelpAsked(Exception):
    """The command line asks what psrun is."""


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    command: list[str]  # What each worker runs.
    workers: int
    servers: int
    server: str | None
    job: str
    models: tuple[str, ...]  # None are named where the script has one.
    grace_s: float
    server_timeout_s: float
    max_restarts: int
    elastic: bool  # Workers come and go.
    torch_env: bool  # They find torchrun's names in their environment.
    server_flags: dict[str, str]  # By name.


_OWN = ("workers", "servers", "server", "job", "models", "grace", "server_timeout", "max_restarts")
_ELASTIC = ("min_workers", "max_workers")  # Flags of servers with which workers come and go.


def parse(arguments: Sequence[str]) -> Options:
    """The options; UsageError, HelpAsked. Flags end with the first argument that is none."""
    own: dict[str, str] = {}
    for_servers: dict[str, str] = {}
    rest = list(arguments)
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "--"):
        flag = rest.pop(0)
        if flag in ("-h", "--help"):
            raise HelpAsked
        name, equals, value = flag.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if name == "torch_env":
            own[name] = value if equals else "true"
        elif name in _OWN:
            if not equals:  # As in --workers 4.
                if not rest:
                    raise UsageError(f"{flag}: a value is missing")
                value = rest.pop(0)
            own[name] = value
        elif name in OWN_FLAGS:
            raise UsageError(f"{flag}: psrun itself sets --{name} of ps_server")
        elif not flag.startswith("--"):
            raise UsageError(f"{flag}: not a flag; those of psrun and ps_server begin with --")
        else:
            for_servers[name] = value if equals else "true"
    bounds = [for_servers.get(name, own.get("workers", "1")) for name in _ELASTIC]
    elastic = bounds[0] != bounds[1]
    if elastic:
        for_servers.setdefault("budget", "job")
    options = Options(
        command=_command(rest, for_servers),
        workers=_count("workers", own),
        servers=_count("servers", own),
        server=own.get("server"),
        job=own.get("job", "default"),
        models=_models(own),
        grace_s=_seconds("grace", own, 10),
        server_timeout_s=_seconds("server_timeout", own, 30),
        max_restarts=_count("max_restarts", own, 3 if elastic else 0, least=0),
        elastic=elastic,
        torch_env=own.get("torch_env", "false").lower() in _TRUE,
        server_flags=for_servers,
    )
    if options.server is not None and (for_servers or "servers" in own):
        wrong = next(iter(for_servers), "servers")
        raise UsageError(f"--{wrong} is for servers that psrun starts; with --server it starts none")
    try:
        check_flags(options.models, for_servers)
        if options.models and options.server:
            check_addresses(options.models, options.server)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return options


def _models(flags: Mapping[str, str]) -> tuple[str, ...]:
    """With --server=g=HOST:PORT,d=HOST:PORT they need not be named again."""
    try:
        if "models" in flags:
            return names_in(flags["models"])
        server = flags.get("server", "")
        return tuple(read(server)) if names_addresses(server) else ()
    except ValueError as error:
        raise UsageError(f"--{'models' if 'models' in flags else 'server'}: {error}") from None


def _command(rest: list[str], flags: Mapping[str, str]) -> list[str]:
    if rest and rest[0] == "--":
        rest = rest[1:]
    elif rest and rest[0] == "-m":
        if len(rest) == 1:
            raise UsageError("-m: the module is missing")
        return [sys.executable, _RUNNER, *rest]
    if not rest:
        raise UsageError("the script is missing")
    script = rest[0]
    if not os.path.exists(script):
        hint = "; flags of ps_server are given as --FLAG=VALUE" if flags else ""
        raise UsageError(f"{script}: there is no such script{hint}")
    is_source = os.path.isfile(script) and not script.endswith((".pyc", ".pyz", ".zip"))
    return [sys.executable, *([_RUNNER] if is_source else []), *rest]


def _count(name: str, flags: Mapping[str, str], otherwise: int = 1, least: int = 1) -> int:
    text = flags.get(name, str(otherwise))
    if re.fullmatch("[0-9]{1,5}", text) is None or int(text) < least:
        raise UsageError(f"--{name}={text}: expected a number from {least} on")
    return int(text)


def _seconds(name: str, flags: Mapping[str, str], otherwise_s: float) -> float:
    if name not in flags:
        return otherwise_s
    parts = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|)", flags[name])
    if parts is None:
        raise UsageError(f"--{name}={flags[name]}: expected a duration, as in 10s or 500ms")
    return float(parts[1]) * {"": 1, "ms": 0.001, "s": 1, "m": 60, "h": 3600}[parts[2]]


@dataclass(frozen=True)
class Place:
    """Which of several launchers of one job this is, and which of those on this machine."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1


def place_in(environment: Mapping[str, str]) -> Place:
    """What torchrun says, or else Slurm. UsageError for what cannot be."""
    for rank, world, local_rank, local_world in (
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    ):
        if rank not in environment or world not in environment:
            continue
        try:
            place = Place(
                rank=int(environment[rank]),
                world=int(environment[world]),
                local_rank=int(environment.get(local_rank, "0")),
                local_world=_tasks_of_node(environment.get(local_world, "1"), environment.get("SLURM_NODEID", "0")),
            )
        except ValueError as error:
            raise UsageError(f"{rank}, {world}, {local_rank} and {local_world} in the environment: {error}") from None
        for number, name, count, whole in (
            (place.rank, rank, place.world, world),
            (place.local_rank, local_rank, place.local_world, local_world),
        ):
            if not 0 <= number < count:
                raise UsageError(f"{name}={number} of {whole}={count} in the environment cannot be")
        return place
    return Place()


def _tasks_of_node(text: str, node: str) -> int:
    """torchrun gives the number of this node, as in 2; Slurm those of all nodes, as in 2(x3),1."""
    tasks: list[int] = []
    for part in text.split(","):
        count, _, times = part.removesuffix(")").partition("(x")
        tasks += [int(count)] * int(times or 1)
    return tasks[min(int(node), len(tasks) - 1)]


class Run:
    """One run of psrun."""

    def __init__(self, options: Options) -> None:
        self._options = options
        # Servers of its own make a job of its own, whatever this process is part of.
        self._place = place_in(os.environ) if options.server else Place()
        self._output = Output(on_closed=lambda: self._on_signal(signal.SIGPIPE))
        stays = options.server is not None or self._servers_stay()
        self._supervisor = Supervisor(self._output, options.max_restarts, servers_stay=stays)

    def run(self) -> int:
        """The exit status."""
        self._watch_signals()
        last_words = ""
        try:
            self._start()
            self._supervisor.await_workers(others_may_come=self._options.elastic)
            self._await_servers()
            status = 0
        except FileNotFoundError as error:
            self._say(str(error))
            status = _EXIT_FAILED
        except Failed as failure:
            what = f"{failure}: {failure.process.error}" if failure.process.error else str(failure)
            if self._any_run():  # What they say as they end comes in between.
                self._say(f"{failure}: ending the others")
                what = f"the first failure: {what}"
            last_words = what
            status = self._status_of(failure)
        except Stopped as stopped:
            self._say(f"{stopped}: ending all")
            status = _EXIT_SIGNAL + stopped.number
        self._supervisor.end(self._options.grace_s)
        if last_words:
            self._say(last_words)
            self._supervisor.write_out()
        return status

    def _start(self) -> None:
        options, place = self._options, self._place
        jobs = start_jobs(
            self._supervisor,
            options.models,
            options.servers,
            options.workers,
            {**options.server_flags, "job": options.job},
            options.server,
            options.server_timeout_s,
        )
        for number in range(options.workers):
            rank = place.rank * options.workers + number
            change = worker_environment(
                rank=rank,
                local_rank=place.local_rank * options.workers + number,
                world=place.world * options.workers,
                local_world=place.local_world * options.workers,
                jobs=jobs,
                torch_env=options.torch_env,
            )
            # Else an interpreter would hold lines back, as nobody seems to read them.
            environment = {"PYTHONUNBUFFERED": "1", **os.environ, **change}
            found = {name: value for name, value in environment.items() if value is not None}
            self._supervisor.start_worker(rank, options.command, found)

    def _servers_stay(self) -> bool:
        return self._options.server_flags.get("keep_running", "").lower() in _TRUE

    def _await_servers(self) -> None:
        if not self._servers_stay():
            supervisor, limit_s = self._supervisor, self._options.server_timeout_s
            if supervisor.end_unused_servers(limit_s):
                self._say("the workers have ended, and none has joined the job: its servers were ended")
                return
            said = False
            while self._options.elastic and not supervisor.await_servers_end(limit_s):
                if all(job.workers == 0 for job in supervisor.ask_jobs()):
                    break
                if not said:
                    self._say("these workers have ended, and others train: servers run until the job ends, or Ctrl-C")
                said = True
            supervisor.await_servers(limit_s)
            return
        self._say("the workers have ended; the servers run until Ctrl-C (--keep_running)")
        with contextlib.suppress(Stopped):
            self._supervisor.until(lambda: not self._any_run())

    def _any_run(self) -> bool:
        return any(process.running for process in self._supervisor.processes)

    def _status_of(self, failure: Failed) -> int:
        process = failure.process
        status = process.ending.status if process.ending else None
        if process in self._supervisor.workers:
            return status or _EXIT_FAILED
        refused = not self._supervisor.workers and status == _EXIT_USAGE
        return _EXIT_USAGE if refused else _EXIT_FAILED

    def _say(self, text: str) -> None:
        self._output.put(2, f"psrun: {text}\n".encode(errors="surrogateescape"))

    # ---- Signals

    def _watch_signals(self) -> None:
        # A signal wakes poll() through this socket; its handler runs between two instructions of the interpreter.
        self._wakeup, send = socket.socketpair()
        for end in (self._wakeup, send):
            end.setblocking(False)
        signal.set_wakeup_fd(send.detach(), warn_on_full_buffer=False)
        self._supervisor.sources[self._wakeup.fileno()] = lambda: len(self._wakeup.recv(4096))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # What is ignored stays so: SIGINT in a shell's background job, SIGHUP under nohup.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, _: self._on_signal(number))

    def _on_signal(self, number: int) -> None:
        supervisor = self._supervisor
        if supervisor.stopped_by is None:
            supervisor.stopped_by = number
        elif number != signal.SIGPIPE:
            supervisor.kill()


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    for standard in range(3):  # So that no pipe or socket takes the place of one that is closed.
        try:
            os.fstat(standard)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    try:
        return Run(parse(arguments)).run()
    except HelpAsked:
        print(_USAGE, end="")
        return 0
    except UsageError as error:
        print(f"psrun: {error} (psrun --help)", file=sys.stderr)
        return _EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())
