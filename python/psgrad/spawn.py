"""psgrad.spawn: what psrun does, for a function of a script or a notebook."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Literal

from psgrad._blame import is_of_another
from psgrad._lines import Sink
from psgrad._models import check_addresses, check_flags, names_in
from psgrad._supervisor import (
    OWN_FLAGS,
    Ending,
    Failed,
    Process,
    Supervisor,
    ending_of,
    start_jobs,
    tie_to,
    worker_environment,
)

_LINES_KEPT = 20  # The last that servers wrote, for an error.


class SpawnError(RuntimeError):
    """A worker or server failed. `rank` is the worker's, None for a server; `traceback` is the text of a worker's
    exception, empty if there was none.
    """

    def __init__(self, message: str, rank: int | None = None, traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback


def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    *,
    workers: int = 2,
    servers: int = 1,
    mode: str = "bsp",
    server: str | None = None,
    models: Sequence[str] = (),
    context: Literal["spawn", "fork"] = "spawn",
    grace: float = 10.0,
    server_timeout: float = 30.0,
    torch_env: bool = False,
    **server_flags: object,
) -> list[Any]:
    """Runs fn(*args) in `workers` processes of a job, with servers of its own; returns their results by rank.

    The workers find PS_RANK, PS_NUM_WORKERS, PS_SERVER and what else psrun gives them in their environment.

    fn: a function of a module, or of a script whose own work is under `if __name__ == "__main__":`. It, its arguments
        and its results are pickled, tensors with all that they hold: nothing is shared.
    server: the address of a job's chief; then no servers are started, and the workers are that job's.
    models: names of the models that fn trains, if there are several: each has servers, and a job, of its own, as with
        psrun --models. `server`, if there is one, is then "NAME=HOST:PORT,NAME=HOST:PORT".
    context: "spawn" starts the workers as fresh processes. "fork" makes them copies of this one, for a function that is
        defined in a notebook; nothing may have been trained in this process before, as threads are not copied.
    grace: seconds for processes that are to end before the next, harder signal.
    server_timeout: seconds for servers to start, and to end after the workers.
    torch_env: whether they find torchrun's RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE there, too.
    server_flags: any other flag of ps_server, as in optimizer="adam", staleness=3.

    SpawnError if a worker or server fails: with the first failed worker's rank and traceback. Then, and on Ctrl-C, all
    are ended: workers first, then servers. ValueError, TypeError for arguments that cannot be; FileNotFoundError if
    there is no ps_server.
    """
    if not isinstance(mode, str):
        raise TypeError(f"mode is {mode!r}; expected the name of one")
    flags = {"mode": mode, **_texts(server_flags)}
    if isinstance(models, str):
        raise TypeError(f"models={models!r}: a sequence of names is expected, as in models=('g', 'd')")
    models = names_in(",".join(models)) if models else ()
    _check(fn, args, workers, servers, context, server, models, flags)
    sink = _Stderr()
    supervisor = Supervisor(sink)
    try:
        jobs = start_jobs(supervisor, models, servers, workers, flags, server, server_timeout)
        places = [worker_environment(rank, rank, workers, workers, jobs, torch_env) for rank in range(workers)]
        started = _start_workers(supervisor, context, places, fn, args)
        supervisor.await_workers(others_may_come="min_workers" in flags or "max_workers" in flags)
        if not supervisor.end_unused_servers(server_timeout):
            supervisor.await_servers(server_timeout)
    except Failed as failure:
        _end(supervisor, grace)
        raise _error(failure, sink) from None
    except BaseException:
        _end(supervisor, grace)
        raise
    _end(supervisor, grace)
    return [worker.result() for worker in started]


def _end(supervisor: Supervisor, grace_s: float) -> None:
    try:
        supervisor.end(grace_s)
    except KeyboardInterrupt:  # Once more: then without grace.
        supervisor.kill()
        supervisor.end(0)
        raise


def _error(failure: Failed, sink: _Stderr) -> SpawnError:
    process = failure.process
    if not isinstance(process, _Worker):
        return SpawnError("\n".join([str(failure), *sink.last_lines]))
    if process.complaint:
        return SpawnError(f"{process.name} {process.complaint}", process.rank)
    if process.traceback:
        return SpawnError(f"{process.name} failed:\n{process.traceback}", process.rank, process.traceback)
    return SpawnError(str(failure), process.rank)


# ---- Arguments


def _texts(flags: Mapping[str, object]) -> dict[str, str]:
    """As ps_server takes them. None stands for a flag that is not given."""
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in flags.items()
        if value is not None
    }


def _check(
    fn: Callable[..., Any],
    args: Sequence[Any],
    workers: int,
    servers: int,
    context: str,
    server: str | None,
    models: Sequence[str],
    flags: Mapping[str, str],
) -> None:
    for name, value in (("workers", workers), ("servers", servers)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} is {value!r}; expected a whole number")
        if value < 1:
            raise ValueError(f"{name} is {value}; expected at least 1")
    for name in flags:
        if name in OWN_FLAGS:
            raise TypeError(f"spawn itself sets --{name} of ps_server")
        if server is not None and name not in ("mode", "job"):
            raise TypeError(f"{name} is for servers that spawn starts; with server={server!r} it starts none")
    check_flags(models, flags)
    if models and server:
        check_addresses(models, server)
    if context == "spawn":
        _check_can_start_afresh(fn, args)
    elif context == "fork":
        _check_can_fork()
    else:
        raise ValueError(f"context is {context!r}; expected 'spawn' or 'fork'")


def _check_can_start_afresh(fn: Callable[..., Any], args: Sequence[Any]) -> None:
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            "spawn was called while a worker imported the script; put what the script does under "
            'if __name__ == "__main__":'
        )
    in_main = getattr(fn, "__module__", None) == "__main__"
    if in_main and not hasattr(sys.modules["__main__"], "__file__"):
        raise ValueError(
            f"{_name_of(fn)} is defined in a notebook or at a prompt, from where a fresh process cannot import it: "
            "write it into a module (%%writefile train.py, then: from train import …), or pass context='fork'"
        )
    try:
        pickle.dumps((fn, tuple(args)))
    except Exception as error:  # Whatever a __reduce__ raises.
        raise ValueError(
            f"{_name_of(fn)} or its arguments cannot be passed to a fresh process: {error}; use a function that is "
            "defined at the top level of a module, or pass context='fork'"
        ) from error


def _check_can_fork() -> None:
    core = sys.modules.get("psgrad._core")
    if core is not None and getattr(core, "was_used", lambda: False)():
        raise ValueError(
            "context='fork': a psgrad client was used in this process, and its threads and connections are not copied "
            "by a fork: restart the notebook's kernel, or use a function of a module and context='spawn'"
        )


def _name_of(fn: Callable[..., Any]) -> str:
    return str(getattr(fn, "__qualname__", fn))


# ---- The workers


def _start_workers(
    supervisor: Supervisor,
    start: str,
    places: Sequence[Mapping[str, str | None]],
    fn: Callable[..., Any],
    args: Sequence[Any],
) -> list[_Worker]:
    context: Any = multiprocessing.get_context(start)
    call = (fn, tuple(args))
    # multiprocessing would put tensors into memory that all processes share: a model's buffers, for one.
    task = pickle.dumps(call) if start == "spawn" else call
    workers = []
    for rank, environment in enumerate(places):
        receive, send = context.Pipe(duplex=False)
        process = context.Process(
            target=_run,
            args=(os.getpid(), environment.get("OMP_NUM_THREADS"), task, send),
            name=f"worker {rank}",
        )
        with _environment(environment):
            process.start()
        send.close()
        worker = _Worker(rank, process, receive)
        workers.append(worker)
        supervisor.workers.append(worker)
        supervisor.sources[receive.fileno()] = functools.partial(_receive, supervisor, worker)
    return workers


def _receive(supervisor: Supervisor, worker: _Worker) -> None:
    fd = worker.connection.fileno()
    if not worker.receive():
        del supervisor.sources[fd]


class _Worker(Process):
    """A process of multiprocessing."""

    def __init__(self, rank: int, process: Any, connection: Connection) -> None:
        super().__init__(f"worker {rank}", process.sentinel)
        self.rank = rank
        self.connection = connection
        self.traceback = ""
        self.complaint = ""  # What is wrong with the result.
        self._result = pickle.dumps(None)
        self._process = process
        self._is_victim = False
        self._reaped = False

    @property
    def blames_another(self) -> bool:
        return self._is_victim

    def result(self) -> Any:
        """SpawnError if it is of a kind that only the worker has."""
        try:
            return pickle.loads(self._result)
        except Exception as error:  # Whatever a __setstate__ raises.
            raise SpawnError(f"{self.name} returned what cannot be unpickled here: {error}", self.rank) from error

    def look(self) -> None:
        if self.ending is not None:
            return
        try:
            self.ending = ending_of(self._process.pid)
        except ChildProcessError:  # multiprocessing reaps what has ended whenever it starts another process.
            self._reaped = True
            code = self._process.exitcode
            self.ending = Ending(status=code) if code >= 0 else Ending(signal=-code)
        if self.ending is not None:
            while self.receive():
                pass

    def receive(self) -> bool:
        """Takes what it has sent, if that is there; False if nothing will come any more."""
        if self.connection.closed or not self.connection.poll():
            return False
        try:
            kind, *content = self.connection.recv()
        except (EOFError, OSError):  # It is closed, or the worker was killed while it was sending.
            return False
        if kind == "result":
            (self._result,) = content
        elif kind == "complaint":
            (self.complaint,) = content
        else:
            self.traceback, self._is_victim = content
        return True

    def signal(self, number: int) -> None:
        if not self.running:
            return
        with contextlib.suppress(ProcessLookupError):
            pid = self._process.pid
            if os.getpgid(pid) == pid:
                os.killpg(pid, number)
            else:  # It has not come so far yet.
                os.kill(pid, number)

    def release(self) -> None:
        if not self._reaped:
            with contextlib.suppress(ProcessLookupError):  # It never had a group.
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.join()
        self.connection.close()


def _run(parent: int, threads: str | None, task: Any, pipe: Connection) -> None:
    """What a worker does: the task is a function with its arguments, pickled if this is a fresh process."""
    tie_to(parent)
    os.setsid()  # A terminal's Ctrl-C is for the parent, which passes it on.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if threads is not None and (torch := sys.modules.get("torch")):  # A fork has torch as the parent set it up.
        torch.set_num_threads(int(threads))
    try:
        fn, args = pickle.loads(task) if isinstance(task, bytes) else task
        try:
            result = fn(*args)
        except SystemExit as ended:
            if ended.code:
                raise
            result = None
        # A fork has no interpreter's exit that would do it; and models are returned with the job's last weights.
        if life := sys.modules.get("psgrad.torch.life"):
            life.finish_all()
    except SystemExit as ended:
        _leave_jobs(ended)
        raise
    except KeyboardInterrupt as error:
        _leave_jobs(error)
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        frames = error.__traceback__.tb_next if error.__traceback__ else None  # Without this one.
        text = "".join(traceback.format_exception(type(error), error, frames))
        pipe.send(("error", text, is_of_another(error)))
        _leave_jobs(error)
        sys.exit(1)
    try:
        # Not as multiprocessing does it: a tensor would be in shared memory that this process takes with it.
        data = pickle.dumps(result)
    except Exception as error:  # Whatever a __reduce__ raises.
        kind = f"{type(result).__module__}.{type(result).__qualname__}"
        pipe.send(("complaint", f"returned a {kind} that cannot be pickled: {error}"))
        _leave_jobs(error)
        sys.exit(1)
    pipe.send(("result", data))


def _leave_jobs(error: BaseException) -> None:
    """Else the worker would count as finished at the interpreter's exit, and wait for the others there."""
    if life := sys.modules.get("psgrad.torch.life"):
        life.leave_all(error)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Sets them while a process is started: some libraries read theirs when they are loaded, before fn runs."""
    before = {name: os.environ.get(name) for name in variables}
    _set(variables)
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


class _Stderr(Sink):
    """Shows what servers log, and where their pages are, also in a notebook."""

    def __init__(self) -> None:
        self.last_lines: deque[str] = deque(maxlen=_LINES_KEPT)

    def put(self, fd: int, data: bytes) -> None:
        if fd == 1:
            data = b"".join(line for line in data.splitlines(keepends=True) if b"] page at " in line)
        if data:
            text = data.decode(errors="replace")
            self.last_lines.extend(text.splitlines())
            print(text, end="", file=sys.stderr, flush=True)
