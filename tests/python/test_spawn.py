"""psgrad.spawn: workers of a function, and what becomes of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from conftest import await_exit_of
from psgrad.spawn import SpawnError, spawn

TIMEOUT_S = 30.0
NO_SERVER: Any = {"server": "127.0.0.1:1"}

needs_programs = pytest.mark.skipif(
    not os.access(os.path.join(os.environ.get("PSGRAD_BIN", "/none"), "ps_worker"), os.X_OK),
    reason="$PSGRAD_BIN does not name a folder with ps_server and ps_worker",
)


class JobFailed(Exception):
    """As psgrad.JobFailed."""


def place(text: str) -> list[str]:
    names = ("PS_RANK", "PS_LOCAL_RANK", "PS_NUM_WORKERS", "PS_LOCAL_NUM_WORKERS", "PS_SERVER", "PS_JOB")
    return [text, *(os.environ[name] for name in names)]


def threads() -> str:
    return os.environ["OMP_NUM_THREADS"]


def train(*flags: str) -> int:
    worker = [os.environ["PSGRAD_BIN"] + "/ps_worker", "--server=" + os.environ["PS_SERVER"]]
    data = ["--dataset=synthetic:samples=200,features=10,classes=3", "--model=mlp:10,3", "--batch_size=10"]
    return subprocess.run(
        [*worker, "--rank=" + os.environ["PS_RANK"], *data, *flags], stdin=subprocess.DEVNULL
    ).returncode


def fail_on(rank: int) -> None:
    if int(os.environ["PS_RANK"]) == rank:
        raise ValueError(f"rank {rank} cannot")
    time.sleep(100)


def blame_another(folder: str) -> None:
    """Rank 0 fails only because rank 1 has, and is faster."""
    begun, done = Path(folder) / "rank 1 has begun", Path(folder) / "rank 0 has failed"
    if os.environ["PS_RANK"] == "0":
        while not begun.exists():
            time.sleep(0.01)
        JobFailed.__module__ = "psgrad"
        done.touch()
        raise JobFailed("rank 1 was lost")
    begun.touch()
    while not done.exists():
        time.sleep(0.01)
    time.sleep(0.1)
    raise ValueError("the cause")


def kill_oneself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_while_the_result_is_sent() -> None:
    def send_bytes(self: Connection, data: bytes) -> None:
        os.write(self.fileno(), len(data).to_bytes(4, "big") + data[:-1])
        kill_oneself()

    Connection._send_bytes = send_bytes  # type: ignore[attr-defined]


def leave_early(status: int) -> None:
    sys.exit(status)


def unpicklable() -> object:
    return lambda: None


def square(number: int) -> int:
    return number * number


class OnlyThere:
    def __setstate__(self, state: object) -> None:
        raise ValueError("no such thing here")


def only_there() -> OnlyThere:
    result = OnlyThere()
    result.__dict__["some"] = "state"
    return result


def leave_another_training(log: str) -> None:
    worker = [os.environ["PSGRAD_BIN"] + "/ps_worker", "--server=" + os.environ["PS_SERVER"], "--epochs=1000000"]
    data = ["--dataset=synthetic:samples=200,features=10,classes=3", "--model=mlp:10,3"]
    with open(log, "wb") as file:
        subprocess.Popen([*worker, *data], stdout=file, stderr=file, start_new_session=True)
    while "rank 0 of 1 as" not in Path(log).read_text():
        time.sleep(0.01)


def large() -> bytes:
    return bytes(10_000_000)


# ---- What comes back


def test_results_come_by_rank_from_workers_that_know_their_place() -> None:
    results = spawn(place, ("x",), workers=2, job="j", **NO_SERVER)
    assert results == [["x", str(rank), str(rank), "2", "2", "127.0.0.1:1", "j"] for rank in range(2)]
    assert "PS_RANK" not in os.environ


def test_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert spawn(threads, workers=2, **NO_SERVER) == [str(max(1, len(os.sched_getaffinity(0)) // 2))] * 2


def test_large_results_come_back() -> None:
    assert spawn(large, workers=2, **NO_SERVER) == [bytes(10_000_000)] * 2


@needs_programs
def test_it_trains_with_servers_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    assert spawn(train, ("--epochs=2",), workers=2, servers=2, optimizer="momentum", momentum=0.5) == [0, 0]
    output = capfd.readouterr()
    assert "weights hash: " in output.out
    assert "[server 0]" in output.err
    assert "the job is finished" in output.err


def test_a_fork_runs_what_is_defined_anywhere() -> None:
    # In a process of its own: in this one a client may have been used.
    code = f"import psgrad; secret = 7; print(psgrad.spawn(lambda: secret, workers=2, context='fork', **{NO_SERVER!r}))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "[7, 7]\n"


# ---- Failures


def test_a_failed_worker_is_named_with_its_traceback_and_ends_the_others() -> None:
    with pytest.raises(
        SpawnError, match=r"(?s)worker 1 failed:\nTraceback.*in fail_on.*ValueError: rank 1 cannot"
    ) as raised:
        spawn(fail_on, (1,), workers=3, **NO_SERVER)
    assert raised.value.rank == 1
    assert raised.value.traceback.startswith("Traceback")


def test_the_cause_is_named_where_another_worker_failed_because_of_it(tmp_path: Path) -> None:
    with pytest.raises(SpawnError, match="the cause") as raised:
        spawn(blame_another, (str(tmp_path),), workers=2, **NO_SERVER)
    assert raised.value.rank == 1


@pytest.mark.parametrize(
    ("fn", "args", "message"),
    [
        (kill_oneself, (), r"^worker 0 was killed by signal 9 \(SIGKILL\)$"),
        (die_while_the_result_is_sent, (), r"^worker 0 was killed by signal 9 \(SIGKILL\)$"),
        (leave_early, (3,), "^worker 0 ended with status 3$"),
        (unpicklable, (), "^worker 0 returned a builtins.function that cannot be pickled: Can't pickle local object"),
        (only_there, (), "^worker 0 returned what cannot be unpickled here: no such thing here$"),
    ],
)
def test_any_end_but_a_good_one_is_an_error(fn: Callable[..., object], args: tuple[int, ...], message: str) -> None:
    with pytest.raises(SpawnError, match=message):
        spawn(fn, args, workers=1, **NO_SERVER)


def test_a_worker_may_exit_with_status_0() -> None:
    assert spawn(leave_early, (0,), workers=1, **NO_SERVER) == [None]


@needs_programs
def test_a_flag_that_servers_refuse_is_an_error_in_their_words() -> None:
    with pytest.raises(SpawnError, match=r"(?s)server 0 ended with status 2.*--mode=foo: expected bsp") as raised:
        spawn(place, ("x",), mode="foo")
    assert raised.value.rank is None


@needs_programs
def test_servers_that_do_not_end_after_the_workers_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(SpawnError, match=r"server 0 still runs 2 s after .*did they all join the job"):
        spawn(leave_another_training, (str(tmp_path / "log"),), workers=1, optimizer="sgd", server_timeout=2.0)


@needs_programs
def test_functions_that_never_join_end_the_job_at_once() -> None:
    began = time.monotonic()
    assert spawn(square, (3,), workers=2, server_timeout=25.0) == [9, 9]
    assert time.monotonic() - began < 20


# ---- Arguments


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"workers": 0}, ValueError, "workers is 0"),
        ({"servers": 0}, ValueError, "servers is 0"),
        ({"context": "forkserver"}, ValueError, "context is 'forkserver'"),
        ({"num_workers": 3}, TypeError, "spawn itself sets --num_workers"),
        ({"staleness": 3, **NO_SERVER}, TypeError, "staleness is for servers that spawn starts"),
        ({"fn": lambda: None}, ValueError, "cannot be passed to a fresh process.*context='fork'"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        spawn(**{"fn": threads, **arguments})


def test_a_function_of_a_notebook_is_refused_with_what_to_do() -> None:
    code = "from psgrad.spawn import spawn\ndef fn(): pass\nspawn(fn, server='127.0.0.1:1')"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert "ValueError: fn is defined in a notebook or at a prompt" in ran.stderr
    assert "context='fork'" in ran.stderr


def test_a_fork_after_a_client_was_used_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    core = ModuleType("psgrad._core")
    core.was_used = lambda: True  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "psgrad._core", core)
    with pytest.raises(ValueError, match=r"a psgrad client was used in this process.*restart the notebook"):
        spawn(threads, context="fork", **NO_SERVER)


def test_a_script_without_a_guard_is_told_about_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("from psgrad.spawn import spawn\ndef fn(): pass\nspawn(fn, server='127.0.0.1:1')\n")
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert 'put what the script does under if __name__ == "__main__":' in ran.stderr
    assert ran.returncode == 1


# ---- Ending

WAITS = """
    import os, sys, time
    from psgrad.spawn import spawn

    def fn():
        try:
            print("process", os.getpid(), flush=True)
            time.sleep(100)
        finally:
            print("cleaned up", flush=True)

    if __name__ == "__main__":
        spawn(fn, workers=2, server="127.0.0.1:1")
"""


def start_waiting(tmp_path: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """A script, once its workers run: and their processes."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(WAITS))
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               start_new_session=True)  # fmt: skip
    assert process.stdout is not None
    return process, [int(process.stdout.readline().split()[1]) for _ in range(2)]


def test_ctrl_c_ends_the_workers_in_order(tmp_path: Path) -> None:
    process, workers = start_waiting(tmp_path)
    with process:
        os.killpg(process.pid, signal.SIGINT)  # As a terminal does.
        output, errors = process.communicate(timeout=TIMEOUT_S)
    assert output.count("cleaned up") == 2
    assert errors.splitlines()[-1] == "KeyboardInterrupt"
    await_exit_of(workers)


def test_no_worker_outlives_a_killed_script(tmp_path: Path) -> None:
    process, workers = start_waiting(tmp_path)
    with process:
        process.kill()
        await_exit_of(workers)
